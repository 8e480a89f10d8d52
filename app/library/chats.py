"""Chats on disk: one JSON a chat, and beside it a file of token ids that only grows."""

from __future__ import annotations

import json
import re
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from app.chat import Chat, Selection, Turn
from app.documents import Document
from app.engine.types import SamplingParams
from app.evidence import Passage, Quote
from app.library.export import markdown
from app.library.files import names_in, read_json, write_whole

_ID = re.compile(r"[0-9a-f]{32}")
_NAMED = re.compile(rb'"document": "([0-9a-f]{32})"')  # as json.dumps writes it; quotes inside of texts are escaped
_TITLE = 60  # characters
_ALIKE = 512  # tokens by which chats are compared before all of their ids are read


@dataclass(frozen=True)
class Listed:
    """A chat in the list: `updated` in seconds since 1970, `about` names the documents that it read first."""

    id: str
    title: str
    updated: float
    about: str = ""


class ChatStore:
    """The chats of one person. A damaged file is left alone and not listed. Methods may be called from any thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._known: dict[str, tuple[int, Listed, str]] = {}  # id: (time of the file, entry, its words)
        self.unread = ""
        self._deleted: set[str] = set()
        self._places: dict[str, dict[bytes, list[int]]] = {}  # chat: by their hash, where its ids lie already

    def save(self, chat: Chat, growing: tuple[str, str] | None = None) -> None:
        """Write a chat as it stands; one without a question is not worth a file.

        growing: a turn's id and the words of its answer so far, where the chat does not have them yet.
        """
        if not chat.tree:
            return
        with self._lock:
            if chat.id in self._deleted:  # while this was on its way
                return
            chat.title = chat.title or _title(next(iter(chat.tree.values())).question)
            turns = [self._plain(chat.id, turn) | _grown(turn, growing) for turn in list(chat.tree.values())]
            plain: dict[str, Any] = {"id": chat.id, "title": chat.title, "system": chat.system, "created": chat.created}
            plain |= {"sampling": asdict(chat.sampling), "head": chat.head, "ids_of": chat.ids_of, "turns": turns}
            write_whole(self._path(chat.id), json.dumps(plain, ensure_ascii=False))

    def open(self, chat_id: str, document_of: Callable[[str], Document | None]) -> Chat | None:
        """A saved chat; None when it is not there. Documents that are gone leave their names."""
        plain = self._read(chat_id)
        if plain is None:
            return None
        chat = self._chat(plain, document_of)
        places = self._places.setdefault(chat_id, {})
        for turn, entry in zip(chat.tree.values(), plain["turns"], strict=True):
            prompt, answer = turn.digests
            for ids, digest, place in (
                (turn.prompt_ids, prompt, entry["prompt"]),
                (turn.answer_ids, answer, entry["ids"]),
            ):
                if len(ids) == place[1]:  # else they could not be read, and are not there
                    places[digest] = place
        return chat

    def _chat(self, plain: dict[str, Any], document_of: Callable[[str], Document | None]) -> Chat:
        try:
            ids = self._ids(plain["id"])
        except OSError:
            ids = b""  # made anew from the texts
        sampling = _sampling(plain["sampling"])
        chat = Chat(plain["system"], plain["id"], plain["title"], plain["created"], sampling, plain["ids_of"])
        documents: dict[str, Document | None] = {}
        for entry in plain["turns"]:
            for source in entry["sources"]:
                if source["document"] not in documents:
                    documents[source["document"]] = document_of(source["document"])
            chat.tree[entry["id"]] = _turn(entry, documents, ids)
        chat.head = plain["head"]
        return chat

    def find(self, words: str = "") -> list[Listed]:
        """All chats, or those that hold every one of these words; the newest first.

        `unread` says then whether the disk did not give one. Raises OSError where it gives none.
        """
        wanted = words.casefold().split()
        found: list[Listed] = []
        self.unread = ""
        for path in names_in(self.folder, ".json"):
            try:
                entry = self._entry(path)
            except OSError as error:
                self.unread = f"A chat cannot be read just now ({error.strerror or error}); nothing of it is changed."
                continue
            if entry is not None and all(word in entry[1] for word in wanted):
                found.append(entry[0])
        return sorted(found, key=lambda listed: listed.updated, reverse=True)

    def rename(self, chat_id: str, title: str, opened: Iterable[Chat] = ()) -> None:
        """Give a chat another title, also where it is `opened`, before a save can write the old one back.

        An empty one changes nothing.
        """
        title = " ".join(title.split())[:200]
        with self._lock:
            plain = self._read(chat_id)
            if plain is not None and title:
                write_whole(self._path(chat_id), json.dumps(plain | {"title": title}, ensure_ascii=False))
                for chat in opened:
                    chat.title = title

    def delete(self, chat_id: str) -> None:
        """Forget a chat."""
        if _ID.fullmatch(chat_id):
            with self._lock:
                self._path(chat_id).unlink(missing_ok=True)
                self._deleted.add(chat_id)
                with suppress(OSError):  # of no chat any more, they go with the next `tidy`
                    (self.folder / f"{chat_id}.ids").unlink(missing_ok=True)
                self._places.pop(chat_id, None)
                self._known.pop(chat_id, None)

    def deleted(self, chat_id: str) -> bool:
        """Whether a chat was deleted here; it is not written any more."""
        return chat_id in self._deleted

    def documents(self) -> set[str]:
        """The labels of all documents that any chat has read, damaged chats included.

        Raises OSError where one cannot be read: what it names is not known then.
        """
        labels: set[str] = set()
        for path in names_in(self.folder, ".json"):
            with suppress(FileNotFoundError):  # deleted just now
                labels.update(label.decode() for label in _NAMED.findall(path.read_bytes()))
        return labels

    def paths(self, likes: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
        """Token ids of every branch of every chat with one that begins with the same tokens as one of `likes`."""
        wanted = {_bytes(like[:_ALIKE]) for like in likes}
        for path in names_in(self.folder, ".json"):
            plain = self._read(path.stem)
            if plain is None:
                continue
            places = _beginnings(plain["turns"])
            begins = [self._ids(path.stem, start, 4 * min(count, _ALIKE)) for start, count in places if count]
            if any(have and want.startswith(have[: len(want)]) for have in begins for want in wanted):
                yield from self._chat(plain, lambda label: None).paths()

    def tidy(self, before: float) -> None:
        """Delete ids that were written before a time and belong to no chat: a program was killed between the two."""
        for path in names_in(self.folder, ".ids"):
            with suppress(FileNotFoundError):
                if not path.with_suffix(".json").exists() and path.stat().st_mtime < before:
                    path.unlink()

    def export(self, chat_id: str, kind: str, document_of: Callable[[str], Document | None]) -> str | None:
        """A chat as "md" (what is seen) or "json" (all branches); None when it is not there."""
        plain = self._read(chat_id)
        if plain is None:
            return None
        if kind == "md":
            return markdown(self._chat(plain, document_of))
        for turn in plain["turns"]:
            turn.pop("prompt", None)
            turn.pop("ids", None)
        return json.dumps({"format": "octavo-chat", "version": 1} | plain, ensure_ascii=False, indent=2) + "\n"

    def _path(self, chat_id: str) -> Path:
        return self.folder / f"{chat_id}.json"

    def _read(self, chat_id: str) -> dict[str, Any] | None:
        plain = read_json(self._path(chat_id)) if _ID.fullmatch(chat_id) else None
        return plain if isinstance(plain, dict) and plain.get("id") == chat_id and _is_chat(plain) else None

    def _entry(self, path: Path) -> tuple[Listed, str] | None:
        try:
            changed = path.stat().st_mtime_ns
        except FileNotFoundError:
            return None
        known = self._known.get(path.stem)
        if known is None or known[0] != changed:
            plain = self._read(path.stem)
            if plain is None:
                return None
            parts = [plain["title"]]
            for turn in plain["turns"]:
                parts += [turn["question"], turn["answer"], *(source["name"] for source in turn["sources"])]
            named = next(([s["name"] for s in turn["sources"]] for turn in plain["turns"] if turn["sources"]), [])
            newest = max(plain["created"], *(turn["at"] for turn in plain["turns"]))  # a branch is newer than its turns
            listed = Listed(plain["id"], plain["title"], newest, ", ".join(named))
            known = self._known[path.stem] = (changed, listed, "\n".join(parts).casefold())
        return known[1], known[2]

    def _plain(self, chat_id: str, turn: Turn) -> dict[str, Any]:
        sources = [
            {"document": s.label, "name": s.document.name, "first_page": s.first_page, "last_page": s.last_page}
            for s in turn.sources
        ]
        names = ("id", "parent", "question", "answer", "finish_reason", "answered", "error", "at", "model")
        said = {name: getattr(turn, name) for name in names}
        said |= {"passages": [asdict(p) for p in turn.passages], "quotes": [asdict(q) for q in turn.quotes]}
        if turn.sampling is not None:
            said["sampling"] = asdict(turn.sampling)
        prompt, answer = turn.digests
        places = {
            "prompt": self._place(chat_id, turn.prompt_ids, prompt),
            "ids": self._place(chat_id, turn.answer_ids, answer),
        }
        return said | {"sources": sources} | places

    def _place(self, chat_id: str, ids: tuple[int, ...], digest: bytes) -> list[int]:
        """[offset, count, CRC-32] of ids in the chat's file; what is there already is not written again."""
        places = self._places.setdefault(chat_id, {})
        if digest not in places:
            data = _bytes(ids)
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with (self.folder / f"{chat_id}.ids").open("ab") as file:
                start = file.tell()
                file.write(data)
            places[digest] = [start, len(ids), zlib.crc32(data)]  # only now: a full disk may have taken a part of it
        return places[digest]

    def _ids(self, chat_id: str, start: int = 0, size: int = -1) -> bytes:
        try:
            with (self.folder / f"{chat_id}.ids").open("rb") as file:
                file.seek(start)
                return file.read(size)
        except FileNotFoundError:
            return b""


def _bytes(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, dtype="<i4").tobytes()


def _is_chat(plain: dict[str, Any]) -> bool:
    """Whether JSON has all that a chat has: one file with another shape must not hide the others."""
    try:
        gone: dict[str, Document | None] = {s["document"]: None for e in plain["turns"] for s in e["sources"]}
        turns = {entry["id"]: _turn(entry, gone, b"") for entry in plain["turns"]}
        texts = [plain["title"], *(text for turn in turns.values() for text in (turn.question, turn.answer, turn.id))]
        times = [plain["created"], *(turn.at for turn in turns.values())]
        _sampling(plain["sampling"])
        order = [None, *turns]  # a turn stands behind the one that it follows
        linked = plain["head"] in order and all(t.parent in order[:at] for at, t in enumerate(turns.values(), 1))
    except (KeyError, TypeError, ValueError, AttributeError):
        return False
    right = all(isinstance(text, str) for text in texts) and all(isinstance(at, int | float) for at in times)
    return bool(turns) and linked and right and {"system", "ids_of"} <= set(plain)


def _beginnings(turns: Sequence[dict[str, Any]]) -> Iterator[tuple[int, int]]:
    """Where the ids of each turn lie, and how many, that has no answered one in front of it."""
    in_front: set[str | None] = {None}
    for turn in turns:
        if turn["parent"] in in_front:
            yield turn["prompt"][0], turn["prompt"][1]
            if not turn["answered"]:
                in_front.add(turn["id"])


def _grown(turn: Turn, growing: tuple[str, str] | None) -> dict[str, Any]:
    """What the words change that came since a turn was written last; ids of such are made anew from them."""
    if growing is None or growing[0] != turn.id:
        return {}
    more = len(growing[1]) > len(turn.answer) and growing[1].startswith(turn.answer)  # else it has ended meanwhile
    return {"answer": growing[1], "ids": [0, 0, 0]} if more else {}


def _title(question: str) -> str:
    words = " ".join(question.split())
    return words if len(words) <= _TITLE else words[:_TITLE].rsplit(" ", 1)[0] + "\u2026"


def _turn(entry: dict[str, Any], documents: dict[str, Document | None], ids: bytes) -> Turn:
    def stored(place: Sequence[int]) -> tuple[int, ...]:
        start, count, checksum = place
        data = ids[start : start + 4 * count]
        if len(data) < 4 * count or zlib.crc32(data) != checksum:
            return ()
        return tuple(np.frombuffer(data, dtype="<i4").tolist())

    sources = []
    for source in entry["sources"]:
        gone = Document(source["name"], "text", "", (), (), 0, source["document"])
        document = documents[source["document"]] or gone
        sources.append(Selection(document, source["first_page"], source["last_page"]))
    interrupted = entry["finish_reason"] == "running"  # by the end of the program, whatever it was
    return Turn(
        entry["question"],
        tuple(sources),
        stored(entry["prompt"]),
        stored(entry["ids"]),
        entry["answer"],
        "interrupted" if interrupted else entry["finish_reason"],
        entry["answered"] or (interrupted and bool(entry["answer"])),
        entry["error"],
        entry["parent"],
        entry["id"],
        entry["at"],
        tuple(Passage(**passage) for passage in entry["passages"]),
        tuple(Quote(**quote) for quote in entry["quotes"]),
        entry.get("model", ""),
        _sampling(entry["sampling"]) if "sampling" in entry else None,
    )


def _sampling(plain: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**plain | {"stop": tuple(plain["stop"])})
