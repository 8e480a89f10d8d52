"""Documents, questions and turns as the token ids that the loaded model reads."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from app.chat import Chat, Selection, Turn, content_of
from app.engine.types import Mark
from app.errors import UsageError
from app.evidence import Source, find_ids
from app.library.documents import DocumentStore
from app.prompt import Encoded, PromptBuilder
from app.tokenizer import TextTokenizer

_CACHED_TOKENS = 8_000_000  # ids of documents kept for the next question about them, 8 bytes each


class TokenIds:
    """Ids by one model's tokenizer and template, which `kind` names. Methods may be called from any thread.

    Those of documents are remembered, and kept on disk beside the texts that `documents` keeps.
    """

    def __init__(self, tokenizer: TextTokenizer, prompts: PromptBuilder, kind: str, documents: DocumentStore) -> None:
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._kind = kind
        self._documents = documents
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[Any, ...], tuple[int, ...]] = OrderedDict()

    def of(
        self,
        source: Selection,
        progress: Callable[[float], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> tuple[int, ...]:
        """The ids of some pages; `progress` gets fractions from 0 to 1, `cancelled` may end it with Cancelled."""
        with self._lock:
            if source.key in self._known:
                self._known.move_to_end(source.key)
                return self._known[source.key]
        name = f"{source.label}-{source.first_page}-{source.last_page}-{self._kind}"
        if (ids := self._documents.ids(name)) is None:
            text = source.text.strip()
            ids = tuple(self._tokenizer.encode_text(text, start=False, progress=progress, cancelled=cancelled))
            if self._documents.has(source.label):
                self._documents.keep_ids(name, ids)
        with self._lock:
            self._known[source.key] = ids
            total = sum(map(len, self._known.values()))
            while total > _CACHED_TOKENS and len(self._known) > 1:
                total -= len(self._known.popitem(last=False)[1])
        return ids

    def content(self, sources: Sequence[Selection], question: str) -> list[str | Encoded]:
        """A user's message for the prompt builder."""
        return content_of(sources, question, lambda source: Encoded(self.of(source)))

    def added(self, first: bool, system: str | None, sources: Sequence[Selection], question: str) -> list[int]:
        """What a question adds to a conversation; `system` stands ahead of the first."""
        content = self.content(sources, question)
        return self._prompts.first(content, system) if first else self._prompts.next(content)

    def revive(self, chat: Chat, turns: Sequence[Turn]) -> None:
        """Ids for a saved chat that another model wrote, or whose ids are lost: made anew from its texts."""
        if chat.ids_of != self._kind:
            for turn in list(chat.tree.values()):
                chat.update(turn.id, prompt_ids=(), answer_ids=())
            chat.ids_of = self._kind
        turns = [chat.tree[turn.id] for turn in turns]
        if all(turn.prompt_ids and (turn.answer_ids or not turn.answer) for turn in turns):
            return
        for at, turn in enumerate(turns):
            if any(not source.document.pages for source in turn.sources):
                gone = next(source.document.name for source in turn.sources if not source.document.pages)
                raise UsageError(f"The text of {gone} is no longer in the library. Add it again in a new chat.")
            prompt_ids = tuple(self.added(at == 0, chat.system, turn.sources, turn.question))
            answer_ids = tuple(self._tokenizer.encode_text(turn.answer, start=False))
            chat.update(turn.id, prompt_ids=prompt_ids, answer_ids=answer_ids)

    def marks(self, prompt: Sequence[int], start: int, sources: Sequence[Selection]) -> tuple[Mark, ...]:
        """Where each document ends in a prompt whose tokens from `start` on hold them in this order."""
        marks, prompt_ids = [], np.asarray(prompt, dtype=np.int64)
        for source in sources:
            ids = self.of(source)
            if (at := find_ids(prompt_ids[start:], ids)) is not None:
                start += at + len(ids)
                marks.append(Mark(start, source.label))
        return tuple(marks)

    def begin(self, prompt: Sequence[int], frame: int, question: str) -> int:
        """Where a question begins in a prompt that frames it from token `frame` on; `frame` where that is not found."""
        ids = self._tokenizer.encode_text(question.strip(), start=False)
        return frame + (find_ids(np.asarray(prompt[frame:], dtype=np.int64), ids) or 0)

    def places(self, prompt: Sequence[int], read: Sequence[Selection]) -> list[Source]:
        """Where in a prompt the documents stand that were read for it; without those whose text is gone."""
        prompt_ids = np.asarray(prompt, dtype=np.int64)
        return [
            Source(source.label, source.document, source.text, source.start, ids, start)
            for source in read
            if source.document.pages and (start := find_ids(prompt_ids, ids := self.of(source))) is not None
        ]
