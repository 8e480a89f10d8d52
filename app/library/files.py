"""Files that are whole or not there."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

from app.documents.document import without_halves


def write_whole(path: Path, data: bytes | str) -> None:
    """Write a file so that no reader ever sees a part of it, whatever happens."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    part = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        with part.open("wb") as file:
            file.write(data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def read_json(path: Path) -> Any:
    """The content of a JSON file; None when it is not there or damaged."""
    try:
        return json.loads(without_halves(path.read_bytes().decode("utf-8", "surrogatepass")))
    except (OSError, ValueError, RecursionError):
        return None
