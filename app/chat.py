"""Conversations: what was read, asked and answered, as the token ids that the model saw."""

from __future__ import annotations

import hashlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any, Literal, TypeVar
from uuid import uuid4

import numpy as np

from app.documents import Document
from app.engine.generation import Generation
from app.engine.types import FinishReason, SamplingParams
from app.errors import UsageError
from app.evidence import Passage, Quote

# Between documents and question. Of 15 facts in 3,100 to 6,100 tokens of dry text the embedded model finds 10 with this
# line and 6 with a plain rule instead; with unquantised weights and cache it does no better.
_INSTRUCTION = "Answer from the {} above.\n\n"

CUT = ("cancelled", "length", "loop", "interrupted")  # reasons of answers that can be continued

T = TypeVar("T")


@dataclass(frozen=True)
class Selection:
    """Pages `first_page` to `last_page` of a document, both included, counted from 1."""

    document: Document
    first_page: int
    last_page: int

    @classmethod
    def whole(cls, document: Document) -> Selection:
        return cls(document, 1, len(document.pages))

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for equal text; cheap to compare."""
        document = self.document
        return document.sha256, document.kind, len(document.text), self.first_page, self.last_page

    @property
    def label(self) -> str:
        """Names the document among saved things: equal for equal content under an equal name."""
        document = self.document
        if not document.pages:  # its text is gone from the library, which left its label in place of its hash
            return document.sha256
        return hashlib.sha256(f"{document.sha256} {document.kind} {document.name}".encode()).hexdigest()[:32]

    @property
    def text(self) -> str:
        """The selected text; raises UsageError for pages that the document does not have."""
        return self.document.slice(self.first_page, self.last_page)

    @property
    def start(self) -> int:
        """Where the selected text begins in the document's."""
        return self.document.pages[self.first_page - 1].start

    @property
    def title(self) -> str:
        """The line that names this source in the prompt."""
        first, last = self.first_page, self.last_page
        pages = f"page {first}" if first == last else f"pages {first}-{last}"
        return f"{self.document.name} ({pages} of {len(self.document.pages)})"


@dataclass(frozen=True)
class Turn:
    """One question with what was read for it, and its answer. `prompt_ids` are the ids that this turn added.

    `parent` is the turn it follows, None for the first. One that is not `answered` (it runs, failed, or was stopped
    before a word) is shown, but the model never sees it. `at` is in seconds since 1970.
    """

    question: str
    sources: tuple[Selection, ...]
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    answer: str
    finish_reason: FinishReason | Literal["running", "failed", "interrupted"]
    answered: bool = True
    error: str = ""
    parent: str | None = None
    id: str = field(default_factory=lambda: uuid4().hex[:16])
    at: float = field(default_factory=time.time)
    passages: tuple[Passage, ...] = ()  # where question and answer looked, the strongest first
    quotes: tuple[Quote, ...] = ()
    model: str = ""  # that answered
    sampling: SamplingParams | None = None  # of this answer, where it was asked again and so varied

    @cached_property
    def digests(self) -> tuple[bytes, bytes]:
        """Of `prompt_ids` and `answer_ids`, made once: a chat is saved every few seconds, and there may be millions."""
        prompt, answer = (np.asarray(ids, dtype=np.int32).tobytes() for ids in (self.prompt_ids, self.answer_ids))
        return hashlib.sha256(prompt).digest(), hashlib.sha256(answer).digest()


@dataclass(eq=False)
class Chat:
    """One person's conversation; whoever made it owns it.

    A tree: going back and asking otherwise begins a branch, and nothing is lost. `head` is the turn that the next one
    follows, and the path to it is what people see. Threads add turns while others look through `tree`: through a copy.
    """

    system: str | None = None
    id: str = field(default_factory=lambda: uuid4().hex)
    title: str = ""
    created: float = field(default_factory=time.time)
    sampling: SamplingParams = field(default_factory=SamplingParams)  # of its answers
    ids_of: str = ""  # whose token ids its turns hold, see TokenIds.revive
    head: str | None = None
    tree: dict[str, Turn] = field(default_factory=dict)
    asking: threading.Lock = field(default_factory=threading.Lock, repr=False)  # held while a question is prepared
    _running: weakref.ref[Generation] | None = field(default=None, repr=False)
    _finished: threading.Event | None = field(default=None, repr=False)

    def path(self, end: str | None) -> list[Turn]:
        """Every turn from the first to the one with the id `end`."""
        turns = []
        while end is not None:
            turns.append(self.tree[end])
            end = turns[-1].parent
        return turns[::-1]

    @property
    def turns(self) -> list[Turn]:
        """The turns that the next question follows: what the model has read and written."""
        return [turn for turn in self.path(self.head) if turn.answered]

    @property
    def token_count(self) -> int:
        """Tokens of the conversation so far."""
        return sum(len(turn.prompt_ids) + len(turn.answer_ids) for turn in self.turns)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The conversation so far, as the model read and wrote it."""
        return ids_of(self.turns)

    def paths(self) -> Iterator[tuple[int, ...]]:
        """The token ids of every branch up to its end, and of every turn that was not answered."""
        followed = {turn.parent for turn in list(self.tree.values())}
        for turn in list(self.tree.values()):
            if turn.id not in followed or not turn.answered:
                before = [t for t in self.path(turn.parent) if t.answered]
                yield ids_of([*before, turn])

    def has(self, source: Selection) -> bool:
        """Whether these pages were read in an earlier turn."""
        return any(source.key == seen.key for turn in self.turns for seen in turn.sources)

    def add(self, turn: Turn) -> Turn:
        """Put a turn behind the head and make it the head."""
        turn = replace(turn, parent=self.head)
        self.tree[turn.id] = turn
        self.head = turn.id
        return turn

    def begin(self, question: str, sources: Sequence[Selection] = (), sampling: SamplingParams | None = None) -> Turn:
        """Add a turn whose answer is to come; `sampling` where it is not the chat's."""
        return self.add(Turn(question, tuple(sources), (), (), "", "running", answered=False, sampling=sampling))

    def update(self, turn_id: str, **changes: Any) -> Turn:
        """Change what a turn says; gives the new one."""
        turn = self.tree[turn_id] = replace(self.tree[turn_id], **changes)
        return turn

    def siblings(self, turn_id: str) -> list[Turn]:
        """A turn and its alternatives, the oldest first."""
        parent = self.tree[turn_id].parent
        return [turn for turn in list(self.tree.values()) if turn.parent == parent]

    def show(self, turn_id: str) -> None:
        """Make the newest end of the branch with this turn the head."""
        while True:
            below = [turn.id for turn in list(self.tree.values()) if turn.parent == turn_id]
            if not below:
                self.head = turn_id
                return
            turn_id = below[-1]

    def fork(self, turn_id: str) -> Chat:
        """A chat of its own that goes on from this turn."""
        title = f"Branch of {self.title.removeprefix('Branch of ')}"
        twin = Chat(self.system, title=title, sampling=self.sampling, ids_of=self.ids_of, head=turn_id)
        twin.tree = {turn.id: turn for turn in self.path(turn_id)}
        return twin

    def follow(self, generation: Generation) -> None:
        """Remember the answer that runs; it is not kept alive, since dropping it is how it is cancelled."""
        self._running, self._finished = weakref.ref(generation), generation.finished

    def settle(self) -> None:
        """Wait for the last answer if it is on its way out; raises UsageError while it runs."""
        if self._finished is None or self._finished.is_set():
            return
        running = self._running() if self._running is not None else None
        if running is not None and not running.cancelled:
            raise UsageError("This chat is still answering. Stop that answer first, or wait for its end.")
        del running
        self._finished.wait()


def ids_of(turns: Sequence[Turn]) -> tuple[int, ...]:
    """The token ids of turns, one after another."""
    return tuple(chain.from_iterable(turn.prompt_ids + turn.answer_ids for turn in turns))


def selection_of(document: Document | Selection) -> Selection:
    """A document as a selection of all its pages."""
    return document if isinstance(document, Selection) else Selection.whole(document)


def new_sources(before: Sequence[Turn], documents: Sequence[Document | Selection] | None) -> tuple[Selection, ...]:
    """Those that no turn before has read, each once."""
    seen = {source.key for turn in before for source in turn.sources}
    chosen = {source.key: source for source in map(selection_of, documents or ())}
    return tuple(source for key, source in chosen.items() if key not in seen)


def content_of(sources: Sequence[Selection], question: str, text_of: Callable[[Selection], T]) -> list[str | T]:
    """A user's message: the documents, each under its title, then the question. `text_of` gives a document's text."""
    content: list[str | T] = []
    for source in sources:
        content += [f"Document: {source.title}\n\n", text_of(source), "\n\n"]
    if sources:
        content.append(_INSTRUCTION.format("document" if len(sources) == 1 else "documents"))
    content.append(question.strip())
    return content
