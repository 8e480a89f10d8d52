"""Files that clients have stored: on disk, by id, each for its owner alone."""

from __future__ import annotations

import json
import logging
import re
import secrets
import shutil
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from app.api.errors import ApiError
from app.chat import Selection
from app.documents import Document, read_safely
from app.library.files import names_in, read_json
from models.files import sweep, writing

log = logging.getLogger(__name__)

MAX_FILES = 1000
MAX_BYTES = 16 << 30
_KEPT_CHARS = 64_000_000  # of texts in memory, so that a question about a stored file does not parse it again
_ID = re.compile(r"file-[0-9a-f]{24}")


@dataclass(frozen=True)
class StoredFile:
    """A stored file: `created_at` in seconds since 1970, `bytes` of the file, `owner` as FileStore has it."""

    id: str
    filename: str
    bytes: int
    created_at: int
    purpose: str
    owner: str
    label: str = ""  # of its text, see Selection

    def as_object(self) -> dict[str, object]:
        """OpenAI's file object."""
        shown = {key: value for key, value in asdict(self).items() if key not in ("owner", "label")}
        return shown | {"object": "file", "status": "processed"}


class FileStore:
    """Keeps uploads under a folder, a pair of files each: the content, and a JSON that is written last.

    `owner` is any text that names who asks; nobody is told of another's file. Methods may be called from any thread.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._texts: OrderedDict[str, Document] = OrderedDict()

    def add(self, source: Path, filename: str, purpose: str, owner: str) -> StoredFile:
        """Keep a copy of a file if it is a document that can be read.

        Raises BadDocument, DocumentTooLarge, ApiError, or OSError, after which nothing of it is kept.
        """
        document = read_safely(source, filename)
        label = Selection.whole(document).label
        file_id = f"file-{secrets.token_hex(12)}"
        stored = StoredFile(file_id, document.name, document.size_bytes, int(time.time()), purpose, owner, label)
        with self._lock:
            known = self._all()
            if len(known) >= MAX_FILES or sum(file.bytes for file in known) + stored.bytes > MAX_BYTES:
                raise ApiError(
                    f"The store is full: it holds {MAX_FILES:,} files and {MAX_BYTES >> 30} GiB at most. Delete some.",
                    413,
                )
            try:
                with source.open("rb") as given, writing(self._content(file_id)) as kept:
                    shutil.copyfileobj(given, kept, 1 << 20)
                with writing(self._facts(file_id)) as facts:
                    facts.write(json.dumps(asdict(stored)).encode())
            except OSError:
                self._content(file_id).unlink(missing_ok=True)
                raise
            self._remember(file_id, document)
        return stored

    def files(self, owner: str) -> list[StoredFile]:
        """The owner's files, the newest first."""
        with self._lock:
            own = [file for file in self._all() if file.owner == owner]
        return sorted(own, key=lambda file: (file.created_at, file.id), reverse=True)

    def get(self, file_id: str, owner: str) -> StoredFile:
        """One file; raises ApiError (404) also for one that belongs to another."""
        stored = self._load(self._facts(file_id)) if _ID.fullmatch(file_id) else None
        if stored is None or stored.owner != owner:
            raise ApiError(f"There is no file {file_id!r}.", 404, "file_id", "file_not_found")
        return stored

    def path(self, file_id: str, owner: str) -> Path:
        """Where the file's content lies; raises ApiError (404) also where it is gone from the disk."""
        path = self._content(self.get(file_id, owner).id)
        if not path.is_file():
            gone = f"The content of file {file_id!r} is gone from the disk. Delete the file, and store it anew."
            raise ApiError(gone, 404, "file_id", "file_not_found")
        return path

    def document(self, file_id: str, owner: str) -> Document:
        """The file's text."""
        stored = self.get(file_id, owner)
        with self._lock:
            if (known := self._texts.get(file_id)) is not None:
                self._texts.move_to_end(file_id)
                return known
        document = read_safely(self._content(file_id), stored.filename)
        with self._lock:
            self._remember(file_id, document)
        return document

    def delete(self, file_id: str, owner: str) -> None:
        """Delete a file, and its text in memory."""
        self.get(file_id, owner)
        with self._lock:
            self._texts.pop(file_id, None)
            self._facts(file_id).unlink(missing_ok=True)
            self._content(file_id).unlink(missing_ok=True)

    def labels(self) -> set[str]:
        """The labels of all stored texts, whosever they are."""
        with self._lock:
            return {file.label for file in self._all()}

    def tidy(self, before: float) -> None:
        """Delete contents written before a time that no facts belong to: a program was killed between the two.

        Never fails.
        """
        try:
            sweep(self._folder)
            for path in names_in(self._folder, ".bin"):
                with suppress(FileNotFoundError):
                    if path.is_file() and not path.with_suffix(".json").exists() and path.stat().st_mtime < before:
                        path.unlink()
        except OSError as error:
            log.warning("The stored files could not be tidied: %s", error)

    def _remember(self, file_id: str, document: Document) -> None:
        self._texts[file_id] = document
        while len(self._texts) > 1 and sum(len(known.text) for known in self._texts.values()) > _KEPT_CHARS:
            self._texts.popitem(last=False)

    def _all(self) -> list[StoredFile]:
        return [file for path in names_in(self._folder, ".json") if (file := self._load(path)) is not None]

    def _load(self, facts: Path) -> StoredFile | None:
        """None for one that is gone or damaged; raises OSError where the disk does not give it."""
        try:
            file = StoredFile(**read_json(facts))
        except TypeError:
            return None
        right = all(type(getattr(file, field.name)).__name__ == field.type for field in fields(StoredFile))
        return file if right and file.id == facts.stem and _ID.fullmatch(file.id) else None

    def _facts(self, file_id: str) -> Path:
        return self._folder / f"{file_id}.json"

    def _content(self, file_id: str) -> Path:
        return self._folder / f"{file_id}.bin"
