"""A disk that is full, fails, or does not give a file: told, nothing lost, nothing half-written."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch

import models.files
from app.api.store import FileStore
from app.chat import Chat, Selection, Turn
from app.documents import Document, read_document
from app.engine.snapshots import SnapshotStore
from app.errors import describe
from app.library import Library
from models.cache.pool import BlockPool
from tests.library.test_kill import SHAPE, cache, parts

Fail = Callable[..., None]


class _Full:
    """A file on a disk with so many bytes left."""

    def __init__(self, file: BinaryIO, room: list[int], number: int) -> None:
        self._file, self._room, self._number = file, room, number

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if size > self._room[0]:
            self._file.write(memoryview(data)[: self._room[0]])
            self._room[0] = 0
            raise OSError(self._number, os.strerror(self._number))
        self._room[0] -= size
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _Full:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def fileno(self) -> int:
        return self._file.fileno()


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes the disk still takes, in a list of one; set it to change that."""
    left, whole = [1 << 40], Path.open

    def open_it(path: Path, mode: str = "r", *more: Any, **options: Any) -> Any:
        file: Any = whole(path, mode, *more, **options)
        return _Full(file, left, errno.ENOSPC) if mode in ("xb", "wb", "ab") else file

    monkeypatch.setattr(Path, "open", open_it)
    return left


@pytest.fixture
def document(tmp_path: Path) -> Document:
    path = tmp_path / "heron.txt"
    path.write_text("The word is heron. " * 100)
    return read_document(path)


def _state(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*.json")}


@pytest.mark.parametrize("left", [0, 1, 100, 2500])
def test_a_full_disk_costs_nothing_that_is_there(
    tmp_path: Path, document: Document, room: list[int], left: int
) -> None:
    folder = tmp_path / "library"
    owner = Library(folder).owner("secret")
    first = owner.add(document)
    chat = Chat()
    chat.add(Turn("First?", (Selection.whole(document),), tuple(range(700)), (1,), "One.", "stop"))
    owner.save_chat(chat)
    before = _state(folder)
    path = tmp_path / "other.txt"
    path.write_text("Another word. " * 300)
    other = read_document(path)
    chat.add(Turn("Second?", (Selection.whole(other),), tuple(range(900)), (2,), "Two.", "stop"))
    for act in (
        lambda: owner.add(other),
        lambda: owner.save_chat(chat),
        lambda: owner.pin(first, True) if left < 100 else owner.save_chat(chat),
        lambda: owner.remove(first) if not left else owner.save_chat(chat),
    ):
        room[0] = left
        with pytest.raises(OSError, match="No space left") as caught:
            act()
        assert describe(caught.value)[:2] == ("The disk is full: make room, then try again. Nothing is changed.", 507)
        assert parts(folder) == []
        assert _state(folder) == before
        assert [(one.label, one.pinned) for one in owner.documents()] == [(first, False)]
    room[0] = 1 << 40
    owner.save_chat(chat)  # what the full disk took of the ids is not taken for theirs
    label = owner.add(other)
    back = Library(folder).owner("secret").open_chat(chat.id)
    assert back is not None
    assert [turn.prompt_ids for turn in back.turns] == [tuple(range(700)), tuple(range(900))]
    assert {one.label for one in Library(folder).owner("secret").documents()} == {first, label}


@pytest.mark.parametrize("left", [0, 8, 3000, 20_000])
def test_a_full_disk_costs_the_saving_of_what_was_read(tmp_path: Path, room: list[int], left: int) -> None:
    store = SnapshotStore(tmp_path, "kind", 1 << 40)
    pool = BlockPool(SHAPE, 60, torch.device("cpu"))
    store.save(np.arange(1000), cache(pool, 1000), ("a",), wait=True)
    store.flush()
    room[0] = left
    store.save(np.arange(3000), cache(pool, 3000), ("b",), wait=True)
    store.flush()
    assert "could not be saved" in store.notes[-1] and "No space left" in store.notes[-1]
    assert parts(tmp_path) == []
    assert store.labels() == {"a"}
    room[0] = 1 << 40
    store.save(np.arange(3000), cache(pool, 3000), ("b",), wait=True)
    store.flush()
    assert store.labels() == {"a", "b"}
    store.close()
    assert pool.free == pool.blocks
    assert SnapshotStore(tmp_path, "kind", 1 << 40).labels() == {"a", "b"}


@pytest.mark.parametrize("left", [0, 3, 20])
def test_a_full_disk_keeps_no_half_of_a_stored_file(tmp_path: Path, room: list[int], left: int) -> None:
    source, folder = tmp_path / "a.txt", tmp_path / "files"
    source.write_text("some words")
    store = FileStore(folder)
    kept = store.add(source, "a.txt", "user_data", "ann")
    room[0] = left
    with pytest.raises(OSError, match="No space left"):
        store.add(source, "b.txt", "user_data", "ann")
    assert [file.id for file in store.files("ann")] == [kept.id]
    assert len(list(folder.iterdir())) == 2


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Fail:
    """Has the disk refuse to give files whose names end so."""
    whole_bytes, whole_open = Path.read_bytes, Path.open

    def fail(*endings: str, number: int = errno.EIO) -> None:
        def check(path: Path) -> None:
            if str(path).endswith(endings):
                raise OSError(number, os.strerror(number), str(path))

        def read_bytes(path: Path) -> bytes:
            check(path)
            return whole_bytes(path)

        def open_it(path: Path, mode: str = "r", *more: Any, **options: Any) -> Any:
            if "r" in mode:
                check(path)
            return whole_open(path, mode, *more, **options)

        monkeypatch.setattr(Path, "read_bytes", read_bytes)
        monkeypatch.setattr(Path, "open", open_it)

    return fail


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EMFILE])
def test_a_list_that_cannot_be_read_is_not_written_anew(
    tmp_path: Path, document: Document, failing: Fail, number: int
) -> None:
    folder = tmp_path / "library"
    label = Library(folder).owner("secret").add(document)
    before = _state(folder)
    failing("documents.json", number=number)
    library = Library(folder)
    owner = library.owner("secret")
    for act in (
        owner.documents,
        lambda: owner.add(document),
        lambda: owner.pin(label, True),
        lambda: owner.remove(label),
        library.pinned,  # so nothing is evicted while it is not known what is pinned
        library.sweep,
    ):
        with pytest.raises(OSError, match="documents.json"):
            act()  # type: ignore[operator]
    library.tidy()
    failing()
    assert _state(folder) == before
    assert [one.label for one in owner.documents()] == [label]


def test_a_text_that_cannot_be_read_is_kept(tmp_path: Path, document: Document, failing: Fail) -> None:
    owner = Library(tmp_path / "library").owner("secret")
    label = owner.add(document)
    chat = Chat()
    chat.add(Turn("First?", (Selection.whole(document),), tuple(range(700)), (1,), "One.", "stop"))
    owner.save_chat(chat)
    before = _state(tmp_path)
    failing(f"{label}.json")
    owner = Library(tmp_path / "library").owner("secret")
    with pytest.raises(OSError, match=label):
        owner.open(label)
    with pytest.raises(OSError, match=label):
        owner.open_chat(chat.id)
    failing()
    assert _state(tmp_path) == before


def test_a_chat_that_cannot_be_read_hides_no_other_and_is_told(tmp_path: Path, failing: Fail) -> None:
    owner = Library(tmp_path).owner("secret")
    one, two = Chat(), Chat()
    for chat in (one, two):
        chat.begin("What?")
        owner.save_chat(chat)
    before = _state(tmp_path)
    failing(f"{one.id}.json", number=errno.EACCES)
    owner = Library(tmp_path).owner("secret")
    assert [listed.id for listed in owner.chats.find()] == [two.id]
    assert "cannot be read just now (Permission denied)" in owner.chats.unread
    with pytest.raises(OSError, match=one.id):
        owner.chats.rename(one.id, "Other")
    failing()
    assert _state(tmp_path) == before
    assert len(owner.chats.find()) == 2 and owner.chats.unread == ""


def test_a_folder_that_cannot_be_looked_into_is_not_empty(
    tmp_path: Path, document: Document, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library(tmp_path)
    owner = library.owner("secret")
    chat = Chat()
    chat.begin("What?", [Selection.whole(document)])
    owner.save_chat(chat)
    label = Selection.whole(document).label

    def refuse(path: Path) -> Iterator[Path]:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    for act in (owner.chats.find, owner.chats.documents, library.sweep):
        with pytest.raises(PermissionError):
            act()  # type: ignore[operator]
    FileStore(tmp_path / "files").tidy(0)  # a start goes on without it
    monkeypatch.undo()
    library.sweep()
    assert library.documents.has(label)


def test_a_snapshot_that_the_disk_does_not_give_stays(tmp_path: Path, failing: Fail) -> None:
    store = SnapshotStore(tmp_path, "kind", 1 << 40)
    pool = BlockPool(SHAPE, 60, torch.device("cpu"))
    for length, label in ((1000, "a"), (2000, "b")):
        store.save(np.arange(length), cache(pool, length), (label,), wait=True)
        store.flush()
    files = sorted(tmp_path.glob("*.kv"))
    chain = store.find(np.arange(3000))
    failing(chain[0][0].name)
    assert store.read(chain, pool, (), lambda tokens: None) is None
    assert "cannot be used; the text is read again" in store.notes[-1]
    assert store.find(np.arange(3000)) == []
    store.close()
    blind = SnapshotStore(tmp_path, "kind", 1 << 40)  # a start with such a disk
    assert blind.labels() == frozenset()
    blind.close()
    assert sorted(tmp_path.glob("*.kv")) == files
    failing()
    again = SnapshotStore(tmp_path, "kind", 1 << 40)
    assert again.labels() == {"a", "b"}
    again.close()
    assert pool.free == pool.blocks
    assert models.files.PART not in {path.suffix for path in tmp_path.iterdir()}
