"""Conversations: what was read, asked and answered, as the token ids that the model saw."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from itertools import chain
from typing import Any
from uuid import uuid4

from app.documents import Document
from app.engine.engine import Generation
from app.engine.types import FinishReason
from app.errors import UsageError


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
    def text(self) -> str:
        """The selected text; raises UsageError for pages that the document does not have."""
        return self.document.slice(self.first_page, self.last_page)

    @property
    def title(self) -> str:
        """The line that names this source in the prompt."""
        first, last = self.first_page, self.last_page
        pages = f"page {first}" if first == last else f"pages {first}-{last}"
        return f"{self.document.name} ({pages} of {len(self.document.pages)})"


@dataclass(frozen=True)
class Turn:
    """One question with what was read for it, and its answer. `prompt_ids` are the ids that this turn added."""

    question: str
    sources: tuple[Selection, ...]
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    answer: str
    finish_reason: FinishReason


@dataclass(eq=False)
class Chat:
    """One person's conversation; whoever made it owns it. It only grows: what was read stays read."""

    system: str | None = None
    id: str = field(default_factory=lambda: uuid4().hex)
    turns: list[Turn] = field(default_factory=list)
    asking: threading.Lock = field(default_factory=threading.Lock, repr=False)  # held while a question is prepared
    _running: weakref.ref[Generation] | None = field(default=None, repr=False)
    _finished: threading.Event | None = field(default=None, repr=False)

    @property
    def token_count(self) -> int:
        """Tokens of the conversation so far."""
        return sum(len(turn.prompt_ids) + len(turn.answer_ids) for turn in tuple(self.turns))

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The conversation so far, as the model read and wrote it."""
        return tuple(chain.from_iterable(turn.prompt_ids + turn.answer_ids for turn in tuple(self.turns)))

    def has(self, source: Selection) -> bool:
        """Whether these pages were read in an earlier turn."""
        return any(source.key == seen.key for turn in tuple(self.turns) for seen in turn.sources)

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
