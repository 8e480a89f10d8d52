"""Files that others made, read in a process of its own: what it breaks, or how long it takes, harms nothing else.

Run as `python -m app.documents.apart FILE NAME LIMITS`; the document comes back on stdout as one line of JSON and its
text, an error as one line and exit code 3.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path, PurePath
from typing import Any

from app.documents import packed
from app.documents.document import Document, File, Limits, Page
from app.documents.read import display_name, read_document
from app.errors import BadDocument, DocumentTooLarge

_ROOT = Path(__file__).parents[2]
_REFUSED = 3
_GRACE_S = 5.0  # the process watches its own clock between pages; this is for one that hangs within one
_MEMORY = 8 << 30  # address space: a text of all characters allowed, several times over
_READERS = threading.BoundedSemaphore(4)  # at once; more would only share processors and memory
_ERRORS = {"BadDocument": BadDocument, "DocumentTooLarge": DocumentTooLarge}
_LARGE = 16 << 20  # bytes
_SUFFIXES = frozenset((".html", ".htm", ".xhtml", ".ipynb"))


def read_safely(path: Path, name: str = "", limits: Limits | None = None) -> Document:
    """Like read_document, for files whose readers are large programs; plain text is read here and now."""
    limits = limits or Limits()
    name = display_name(name or path.resolve().name)
    return _read_apart(path, name, limits) if _needs_care(path, name) else read_document(path, name, limits)


def _needs_care(path: Path, name: str) -> bool:
    if os.path.isdir(path) or PurePath(name).suffix.lower() in _SUFFIXES:
        return True
    if not os.path.isfile(path):  # opening a pipe would wait for whoever writes into it
        return False
    try:
        with path.open("rb") as file:
            head = file.read(1024)
            size = os.fstat(file.fileno()).st_size
    except OSError:
        return False  # read_document says what is wrong
    if size > _LARGE:  # decoded it takes several times its size, and this process would keep some of that
        return True
    known = head.startswith((b"PK", b"{\\rtf")) or b"%PDF-" in head
    return known or packed.is_packed(head) or packed.is_tar(head)


def _read_apart(path: Path, name: str, limits: Limits) -> Document:
    told = {key: value for key, value in asdict(limits).items() if key != "began"}
    command = [sys.executable, "-P", "-m", __name__, str(path.absolute()), name, json.dumps(told)]
    env = {**os.environ, "PYTHONPATH": str(_ROOT)}
    try:
        with _READERS:
            most = limits.max_seconds + _GRACE_S
            done = subprocess.run(command, env=env, capture_output=True, timeout=most, check=False)
    except subprocess.TimeoutExpired as error:
        raise DocumentTooLarge(
            f"{name} takes longer than {limits.max_seconds:,.0f} s to read, the limit for one document. Split it."
        ) from error
    head, _, text = done.stdout.partition(b"\n")
    if done.returncode == _REFUSED:
        what = json.loads(head)
        raise _ERRORS[what["kind"]](what["message"])
    if done.returncode != 0:
        raise BadDocument(
            f"{name} cannot be read: its reader broke on it (code {done.returncode}). It is damaged, or too large for"
            " this machine. Save it anew, as PDF or plain text."
        )
    facts = json.loads(head)
    facts["pages"] = tuple(Page(*page) for page in facts["pages"])
    facts["files"] = tuple(File(*file) for file in facts["files"])
    facts["warnings"] = tuple(facts["warnings"])
    return Document(text=text.decode("utf-8", "surrogatepass"), **facts)


def _main(file: str, name: str, limits: str) -> int:
    bounds = Limits(**json.loads(limits))
    _bound(bounds)
    out = sys.stdout.buffer
    try:
        document = read_document(Path(file), name, bounds)
    except BadDocument as error:
        kind = "DocumentTooLarge" if isinstance(error, DocumentTooLarge) else "BadDocument"
        out.write(json.dumps({"kind": kind, "message": str(error)}).encode() + b"\n")
        return _REFUSED
    facts: dict[str, Any] = vars(document) | {
        "pages": [(page.number, page.start, page.end) for page in document.pages],
        "files": [(file.path, file.start, file.end) for file in document.files],
    }
    text = facts.pop("text").encode("utf-8", "surrogatepass")
    out.write(json.dumps(facts).encode() + b"\n")
    out.write(text)
    return 0


def _bound(limits: Limits) -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    seconds = int(limits.max_seconds + 2 * _GRACE_S)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))  # also when nobody waits any more
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
