"""Small files of the library: written whole, and read with damage told apart from what the disk does not give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from app.documents.document import without_halves
from models.files import writing


def write_whole(path: Path, data: bytes | str) -> None:
    """Write a file so that no reader ever sees a part of it, whatever happens."""
    with writing(path) as file:
        file.write(data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data)


def read_json(path: Path) -> Any:
    """The content of a JSON file; None when it is not there, damaged, or no file.

    Raises OSError where the disk does not give it: that must not pass for a file that is not there, since what is not
    there is written anew.
    """
    try:
        return parse_json(path.read_bytes())
    except (FileNotFoundError, IsADirectoryError):
        return None


def names_in(folder: Path, suffix: str) -> list[Path]:
    """The files of a folder with a suffix; raises OSError where it cannot be looked into, unlike `Path.glob`."""
    try:
        return [path for path in folder.iterdir() if path.suffix == suffix]
    except FileNotFoundError:
        return []


def parse_json(data: bytes) -> Any:
    """JSON from bytes, without halves of characters; None for what is none."""
    try:
        return json.loads(without_halves(data.decode("utf-8", "surrogatepass")))
    except (ValueError, RecursionError):
        return None
