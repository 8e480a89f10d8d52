"""Files: whole or not there while programs are killed that write them, and JSON objects in them."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

PART = ".part"


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds; raises OSError, or ValueError for what is none."""
    return json_object(path.read_bytes())


def json_object(data: bytes) -> dict[str, Any]:
    """The JSON object that UTF-8 bytes spell; raises ValueError in words for people."""
    try:
        value = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(json_fault(error)) from error
    if not isinstance(value, dict):
        raise ValueError("it must hold one JSON object")
    return value


def json_fault(error: Exception) -> str:
    """What is wrong with JSON that raised this, where Python's words are for programmers."""
    if isinstance(error, json.JSONDecodeError):
        return str(error)
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    return "it is nested too deeply" if isinstance(error, RecursionError) else "a number has too many digits"


@contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """A file that is found under `path` once the block has ended well; until then, and after an error, nothing is.

    What is written lies beside it under a name with `.part`, which `sweep` deletes if this program is killed.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    part, file = _new_part(path)
    with file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def sweep(folder: Path) -> None:
    """Delete what killed programs were writing in a folder and those below it; what is written just now stays."""
    for part in folder.rglob(f"*{PART}"):
        with unheld(part) as free:
            if free:
                part.unlink(missing_ok=True)


def hold(file: BinaryIO) -> None:
    """Mark an open file as in use until it is closed or this program ends, however that comes about."""
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            pass  # a file system without locks: nothing is swept there either


def take(file: BinaryIO) -> bool:
    """As `hold`, but without waiting: False when another holds the file."""
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            pass  # a file system without locks
    return True


@contextmanager
def unheld(path: Path) -> Iterator[bool]:
    """Whether a file is there, is this user's, and no living program holds it; none begins to while the block runs."""
    try:
        found = path.lstat()
        if fcntl is None or not os.path.isfile(path) or path.is_symlink() or found.st_uid != os.getuid():
            yield False
            return
        file = path.open("rb")
    except OSError:
        yield False
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True


def _new_part(path: Path) -> tuple[Path, BinaryIO]:
    while True:
        part = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PART}")
        file = part.open("xb")
        hold(file)
        if part.exists():  # else a sweep came between the file and its mark
            return part, file
        file.close()
