"""Machine code that was compiled on this machine, kept in a folder with a checksum."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path

CHECKSUM = 32  # bytes of SHA-256 behind the code

_kept_in = Path("~/.cache/octavo/kernels").expanduser()


def keep_in(folder: Path) -> None:
    """Where compiled code is kept from now on, for every later program of this process."""
    global _kept_in
    _kept_in = folder


def kept(stem: str, suffix: str, key: str, compile_code: Callable[[], bytes]) -> Path:
    """A file with the code for `key` (source, options, compiler, processor), compiled where it is missing or damaged.

    Behind the code lies its checksum: a GPU's driver hangs on a truncated file, and a processor runs a damaged one.
    """
    name = f"{stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}{suffix}"
    path = _kept_in / name
    try:
        held = path.read_bytes()
        if hashlib.sha256(held[:-CHECKSUM]).digest() == held[-CHECKSUM:]:
            return path
    except OSError:
        pass
    code = compile_code()
    sealed = code + hashlib.sha256(code).digest()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return _write(path, sealed)
    except OSError:  # a read-only home costs a compilation a start
        return _write(Path(tempfile.mkdtemp(prefix="octavo-")) / name, sealed)


def _write(path: Path, sealed: bytes) -> Path:
    """Whole or not at all, also beside another process."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        part = Path(file.name)
        try:
            file.write(sealed)
            file.flush()
            return part.replace(path)
        except OSError:  # a full disk
            part.unlink()
            raise
