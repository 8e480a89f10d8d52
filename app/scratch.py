"""This program's temporary files, in a folder of its own; those of programs that were killed are deleted."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from models.files import hold, unheld

_PREFIX = "octavo-"
_HELD = "in-use"  # a file that a living program holds; with the program its hold is gone, even after a kill
_FORGOTTEN_S = 86_400.0  # a folder without that file is a compiler's, or was made this moment

_lock = threading.Lock()
_own: tuple[Path, BinaryIO] | None = None


def new_folder() -> Path:
    """A new empty folder; whoever asks deletes it, and the program's end does it at the latest."""
    return Path(tempfile.mkdtemp(dir=_root()))


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A new empty folder that is gone with the block."""
    path = new_folder()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def sweep() -> None:
    """Delete the folders of programs that were killed. Those of other users and of living programs stay."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            facts = folder.lstat()
            if folder.is_symlink() or not folder.is_dir() or facts.st_uid != os.getuid():
                continue
            if not (folder / _HELD).exists():
                if time.time() - facts.st_mtime > _FORGOTTEN_S:
                    shutil.rmtree(folder, ignore_errors=True)
                continue
        except (OSError, AttributeError):  # gone just now; or Windows, where nobody's owner is told
            continue
        with unheld(folder / _HELD) as free:
            if free:
                shutil.rmtree(folder, ignore_errors=True)


def _root() -> Path:
    global _own
    with _lock:
        while _own is None or not (_own[0] / _HELD).exists():  # also when something has tidied it away
            folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
            file = (folder / _HELD).open("wb")
            hold(file)
            _own = folder, file
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return _own[0]
