"""What a model's files hold, as a hash: saved caches belong to exactly these weights."""

from __future__ import annotations

import hashlib
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from models.files import read_json, writing

_SHA256 = re.compile(r"[0-9a-f]{64}")


def fingerprint(model: Path, memo: Path) -> str:
    """sha256 over config and weights of a .gguf file or a directory of safetensors.

    A file is hashed again only when its size or time has changed since `memo`, a JSON file, was written. The hub's
    cache names large files by their sha256, which is taken as it is.
    """
    files = [model] if model.is_file() else [model / "config.json", *sorted(model.glob("*.safetensors"))]
    try:
        known = read_json(memo)
    except (OSError, ValueError):
        known = {}
    with ThreadPoolExecutor(4, "fingerprint") as workers:
        digests = list(workers.map(lambda file: _digest(file.resolve(), known), files))
    fresh = {str(file.resolve()): entry for file, entry in zip(files, digests, strict=True)}
    if any(known.get(name) != entry for name, entry in fresh.items()):
        try:
            with writing(memo) as file:
                file.write(json.dumps(known | fresh).encode())
        except OSError:
            pass  # hashed again next time
    return hashlib.sha256("".join(str(entry[2]) for entry in digests).encode()).hexdigest()


def _digest(file: Path, known: dict[str, list[object]]) -> list[object]:
    """[size, time of the last change, sha256]."""
    facts = file.stat()
    entry = known.get(str(file))
    if isinstance(entry, list) and entry[:2] == [facts.st_size, facts.st_mtime_ns] and len(entry) == 3:
        return entry
    if file.parent.name == "blobs" and _SHA256.fullmatch(file.name):
        return [facts.st_size, facts.st_mtime_ns, file.name]
    with file.open("rb") as data:
        return [facts.st_size, facts.st_mtime_ns, hashlib.file_digest(data, "sha256").hexdigest()]
