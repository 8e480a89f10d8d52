"""Whether what a command is to write can be written: asked before the work, not behind it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from app.errors import UsageError


def folder_to_write(flag: str, folder: Path) -> None:
    """See that files can be written into the directory or where it would be made; raises UsageError with the flag."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{flag}: {folder} is a file; name a directory.")
    try:
        place = folder
        while not place.exists():
            place = place.parent
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise UsageError(
            f"{flag}: nothing can be written in {folder} ({error.strerror or error}). Choose another place."
        ) from error


def file_to_write(flag: str, file: Path) -> None:
    """See that the file can be written, whose directory must be there; raises UsageError naming the flag."""
    if file.is_dir():
        raise UsageError(f"{flag}: {file} is a directory; name a file in it.")
    if not file.parent.is_dir():
        raise UsageError(f"{flag}: there is no directory {file.parent}.")
    if not file.exists():
        folder_to_write(flag, file.parent)
    elif not os.access(file, os.W_OK):
        raise UsageError(f"{flag}: {file} may not be written to. Choose another place.")
