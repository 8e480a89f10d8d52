"""The library: one folder for all, in it what each browser may see."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from app.chat import Chat
from app.documents import Document
from app.library.chats import ChatStore
from app.library.documents import DocumentStore
from app.library.files import read_json, write_whole
from models.files import sweep as sweep_parts

log = logging.getLogger(__name__)

_LABELLED = re.compile(rb'"label": "([0-9a-f]{32})"')  # as json.dumps writes it; quotes inside of names are escaped
YOUNG_S = 600.0  # what is younger may be another program's that is about to name it


@dataclass(frozen=True)
class Shelved:
    """A document in a person's list: `added` and `used` in seconds since 1970; a pinned one is never evicted."""

    label: str
    name: str
    pages: int
    added: float
    used: float
    tokens: int | None = None
    pinned: bool = False


def _shelved(plain: Any) -> Shelved | None:
    """An entry of a saved list, without fields that are not known here; None for what is none."""
    try:
        entry = Shelved(**{field.name: plain[field.name] for field in fields(Shelved) if field.name in plain})
        return entry if isinstance(entry.label, str) and isinstance(entry.used, int | float) else None
    except TypeError:
        return None


class Owner:
    """What belongs to one browser: its list of documents and its chats. Nobody else's list shows them.

    Methods raise OSError where the disk does not give or take what they need; nothing has changed then.
    """

    def __init__(self, folder: Path, documents: DocumentStore) -> None:
        self.chats = ChatStore(folder / "chats")
        self._documents = documents
        self._file = folder / "documents.json"
        self._lock = threading.RLock()
        self._read: tuple[int, dict[str, Shelved]] | None = None  # time of the file, and what it holds

    def documents(self) -> list[Shelved]:
        """The list, the last used first."""
        return sorted(self._shelf().values(), key=lambda entry: entry.used, reverse=True)

    def add(self, document: Document, tokens: int | None = None) -> str:
        """Put a document on the list, or note that it was used again; gives its label."""
        with self._documents.naming, self._lock:
            label, now = self._documents.put(document), time.time()
            new = Shelved(label, document.name, len(document.pages), now, now, tokens)
            shelf = self._shelf()
            old = shelf.get(label, new)
            self._write(shelf | {label: replace(old, used=now, tokens=old.tokens or tokens)})
        return label

    def open(self, label: str) -> Document | None:
        """A document of the list; None when it is not on it, or its text is gone or damaged."""
        return self._documents.get(label) if label in self._shelf() else None

    def pin(self, label: str, pinned: bool) -> None:
        """Keep what was read of a document whatever the quota, or let it go again."""
        with self._lock:
            shelf = self._shelf()
            if label in shelf:
                self._write(shelf | {label: replace(shelf[label], pinned=pinned)})

    def remove(self, label: str) -> None:
        """Take a document off the list; chats that read it keep its text."""
        with self._lock:
            shelf = self._shelf()
            if label in shelf:
                self._write({other: entry for other, entry in shelf.items() if other != label})

    def open_chat(self, chat_id: str) -> Chat | None:
        """A saved chat with its documents; None when it is not there."""
        return self.chats.open(chat_id, self._documents.get)

    def export_chat(self, chat_id: str, kind: str) -> str | None:
        """A saved chat as "md" or "json"; None when it is not there."""
        return self.chats.export(chat_id, kind, self._documents.get)

    def save_chat(self, chat: Chat, growing: tuple[str, str] | None = None) -> None:
        """Write a chat as it stands, and the documents that it has read; `growing` as in `ChatStore.save`."""
        documents = {id(s.document): s.document for turn in list(chat.tree.values()) for s in turn.sources}
        with self._documents.naming:
            for document in documents.values():
                if document.pages:
                    self._documents.put(document)
            self.chats.save(chat, growing)

    def pinned(self) -> set[str]:
        """Labels of pinned documents."""
        return {entry.label for entry in self._shelf().values() if entry.pinned}

    def listed(self) -> set[str]:
        """Labels of the documents on the list, those of a damaged list included."""
        found: set[str] = set()
        for path in self._file.parent.glob(f"{self._file.name}*"):
            with suppress(FileNotFoundError):
                found.update(label.decode() for label in _LABELLED.findall(path.read_bytes()))
        return found

    def labels(self) -> set[str]:
        """Labels of all documents that the list or a chat names."""
        return self.listed() | self.chats.documents()

    def _shelf(self) -> dict[str, Shelved]:
        """The list as the disk has it, which another program may have changed."""
        with self._lock:
            try:
                changed = self._file.stat().st_mtime_ns
            except FileNotFoundError:
                return {}
            if self._read is None or self._read[0] != changed:
                entries = read_json(self._file)
                found = map(_shelved, entries if isinstance(entries, list) else [])
                self._read = changed, {entry.label: entry for entry in found if entry is not None}
                if not isinstance(entries, list):  # what follows is written anew; this is for people to look at
                    with suppress(OSError):
                        shutil.copyfile(self._file, self._file.with_name(f"{self._file.name}.damaged"))
            return dict(self._read[1])

    def _write(self, shelf: dict[str, Shelved]) -> None:
        write_whole(self._file, json.dumps([asdict(entry) for entry in shelf.values()], ensure_ascii=False))
        self._read = self._file.stat().st_mtime_ns, shelf


class Library:
    """Documents once for all, and owners by the secret that only their browser knows; nothing is written until used.

    Other programs may use the same folder at the same time, so what is deleted is judged by what the disk says.
    """

    def __init__(self, folder: Path) -> None:
        self.documents = DocumentStore(folder / "documents")
        self.also_named: Callable[[], set[str]] = set  # labels of what is stored elsewhere, such as the API's files
        self._whole = folder
        self._folder = folder / "owners"
        self._owners: dict[str, Owner] = {}
        self._lock = threading.Lock()

    def owner(self, secret: str) -> Owner:
        """What belongs to the browser with this secret."""
        return self._owner(hashlib.sha256(secret.encode()).hexdigest()[:32])

    def pinned(self) -> frozenset[str]:
        """Labels of the documents that anybody has pinned."""
        return frozenset().union(*(owner.pinned() for owner in self._all()))

    def listed(self) -> set[str]:
        """Labels of the documents that are on anybody's list, or stored by a program."""
        return self.also_named().union(*(owner.listed() for owner in self._all()))

    def named(self) -> set[str]:
        """Labels of the documents that a list, a chat or a program names."""
        return self.also_named().union(*(owner.labels() for owner in self._all()))

    def paths(self, likes: Sequence[Sequence[int]]) -> Iterator[Sequence[int]]:
        """As `ChatStore.paths`, of everybody's chats."""
        for owner in self._all():
            yield from owner.chats.paths(likes)

    def sweep(self, tell: Callable[[str], None] = lambda label: None, before: float = float("inf")) -> None:
        """Delete documents, written before a time, that nothing names any more; `tell` hears which."""
        with self.documents.naming:
            for label in self.documents.labels(before) - self.named():
                self.documents.drop(label)
                tell(label)

    def let_go(self, label: str, tell: Callable[[str], None]) -> None:
        """Delete what is kept of a document, if nothing names it any more; `tell` hears of it then.

        Beside its text these are the ids of its pages, which a file of the API has without a text here.
        """
        with self.documents.naming:
            if label not in self.named():
                self.documents.drop(label)
                tell(label)

    def tidy(self) -> None:
        """Delete what programs left here that were killed; never fails."""
        try:
            sweep_parts(self._whole)
            for owner in self._all():
                owner.chats.tidy(time.time() - YOUNG_S)
            self.sweep(before=time.time() - YOUNG_S)
        except OSError as error:
            log.warning("The library could not be tidied: %s", error)

    def _all(self) -> list[Owner]:
        try:
            names = [path.name for path in self._folder.iterdir() if path.is_dir()]
        except FileNotFoundError:
            return []
        return [self._owner(name) for name in names]

    def _owner(self, name: str) -> Owner:
        with self._lock:
            if name not in self._owners:
                self._owners[name] = Owner(self._folder / name, self.documents)
            return self._owners[name]
