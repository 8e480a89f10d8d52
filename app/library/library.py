"""The library: one folder for all, in it what each browser may see."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from app.chat import Chat
from app.documents import Document
from app.library.chats import ChatStore
from app.library.documents import DocumentStore
from app.library.files import read_json, write_whole


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
    """What belongs to one browser: its list of documents and its chats. Nobody else's list shows them."""

    def __init__(self, folder: Path, documents: DocumentStore) -> None:
        self.chats = ChatStore(folder / "chats")
        self._documents = documents
        self._file = folder / "documents.json"
        self._lock = threading.Lock()
        entries = read_json(self._file)
        found = map(_shelved, entries if isinstance(entries, list) else [])
        self._shelf = {entry.label: entry for entry in found if entry is not None}

    def documents(self) -> list[Shelved]:
        """The list, the last used first."""
        return sorted(self._shelf.values(), key=lambda entry: entry.used, reverse=True)

    def add(self, document: Document, tokens: int | None = None) -> str:
        """Put a document on the list, or note that it was used again; gives its label."""
        with self._documents.naming, self._lock:
            label, now = self._documents.put(document), time.time()
            new = Shelved(label, document.name, len(document.pages), now, now, tokens)
            old = self._shelf.get(label, new)
            self._change(label, replace(old, used=now, tokens=old.tokens or tokens))
        return label

    def open(self, label: str) -> Document | None:
        """A document of the list; None when it is not on it, or its text is gone."""
        return self._documents.get(label) if label in self._shelf else None

    def pin(self, label: str, pinned: bool) -> None:
        """Keep what was read of a document whatever the quota, or let it go again."""
        with self._lock:
            if label in self._shelf:
                self._change(label, replace(self._shelf[label], pinned=pinned))

    def remove(self, label: str) -> None:
        """Take a document off the list; chats that read it keep its text."""
        with self._lock:
            if self._shelf.pop(label, None) is not None:
                self._save()

    def open_chat(self, chat_id: str) -> Chat | None:
        """A saved chat with its documents; None when it is not there."""
        return self.chats.open(chat_id, self._documents.get)

    def save_chat(self, chat: Chat) -> None:
        """Write a chat as it stands, and the documents that it has read."""
        documents = {id(s.document): s.document for turn in list(chat.tree.values()) for s in turn.sources}
        with self._documents.naming:
            for document in documents.values():
                if document.pages:
                    self._documents.put(document)
            self.chats.save(chat)

    def pinned(self) -> set[str]:
        """Labels of pinned documents."""
        return {entry.label for entry in list(self._shelf.values()) if entry.pinned}

    def labels(self) -> set[str]:
        """Labels of all documents that the list or a chat names."""
        return set(self._shelf) | self.chats.documents()

    def _change(self, label: str, entry: Shelved) -> None:
        self._shelf[label] = entry
        self._save()

    def _save(self) -> None:
        write_whole(self._file, json.dumps([asdict(entry) for entry in self._shelf.values()], ensure_ascii=False))


class Library:
    """Documents once for all, and owners by the secret that only their browser knows; nothing is written until used."""

    def __init__(self, folder: Path) -> None:
        self.documents = DocumentStore(folder / "documents")
        self._folder = folder / "owners"
        self._owners: dict[str, Owner] = {}
        self._lock = threading.Lock()

    def owner(self, secret: str) -> Owner:
        """What belongs to the browser with this secret."""
        return self._owner(hashlib.sha256(secret.encode()).hexdigest()[:32])

    def pinned(self) -> frozenset[str]:
        """Labels of the documents that anybody has pinned."""
        return frozenset().union(*(owner.pinned() for owner in self._all()))

    def shared(self, label: str, but: Owner) -> bool:
        """Whether anybody else has a document on their list."""
        return any(entry.label == label for owner in self._all() if owner is not but for entry in owner.documents())

    def sweep(self, tell: Callable[[str], None] = lambda label: None) -> None:
        """Delete documents that no list and no chat names any more; `tell` hears which."""
        with self.documents.naming:
            named = set().union(*(owner.labels() for owner in self._all()))
            for label in set(self.documents.labels()) - named:
                self.documents.drop(label)
                tell(label)

    def _all(self) -> list[Owner]:
        names = [path.name for path in self._folder.iterdir()] if self._folder.is_dir() else []
        return [self._owner(name) for name in names]

    def _owner(self, name: str) -> Owner:
        with self._lock:
            if name not in self._owners:
                self._owners[name] = Owner(self._folder / name, self.documents)
            return self._owners[name]
