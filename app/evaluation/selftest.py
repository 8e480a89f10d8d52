"""Does this model, at this setting, really see all of a document? Facts are planted in it, and asked for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from app.errors import UsageError
from app.evaluation.examiner import Examiner
from app.evaluation.haystack import Haystack, make_needles
from app.evaluation.needle import ANSWER_TOKENS
from app.evaluation.passkeys import PromptMaker

MOST = 50


@dataclass(frozen=True)
class Seen:
    """One planted fact: its depth (0 the beginning, 1 the end), whether the answer named it, the answer itself."""

    depth: float
    found: bool
    answer: str


class SelfTest:
    """A run over one text: iterate over it for what was found, the shallowest first; `examiner.stop` ends it.

    One pass code at a time is planted and asked for, at `count` even depths. Several at once would test something else:
    the embedded model then answers with the code of another thing, with all heads full too (of 32 codes planted by
    eights it named 21 with full attention in 16 bits; of 16 planted singly all 16, as served). What is in front of a
    fact is read once for all; what follows it is read again, so a run reads about half as many documents as it has
    facts.

    `tokens` of the document's `of` are tested: of a longer one than the context holds it is the beginning.
    """

    def __init__(self, examiner: Examiner, text: str, count: int) -> None:
        if not 1 <= count <= MOST:
            raise UsageError(f"{count} facts: choose from 1 to {MOST}.")
        self.examiner = examiner
        self.count = count
        self._maker = PromptMaker(examiner.tokenizer, Haystack.of(text, examiner.tokenizer))
        drawn = make_needles(2 * MOST, random.Random("0 self-test"))
        self._needles = [needle for needle in drawn if needle.answer not in text][:count]
        longest = max(len(self._maker.document(0, [(0, needle)], 0)[0]) for needle in self._needles)
        question = max(len(self._maker.render([], needle.question)) for needle in self._needles)
        self._room = examiner.capacity - ANSWER_TOKENS - question - longest - 8
        self.of = len(self._maker.haystack.ids)
        self.tokens = min(self.of, self._room)
        if self.tokens < 1:
            raise UsageError(f"A fact and its question do not fit into a context of {examiner.capacity:,} tokens.")

    def __iter__(self) -> Iterator[Seen]:
        """Raises what `Examiner.ask` raises."""
        for index, needle in enumerate(self._needles):
            depth = index / max(1, self.count - 1)
            fact = len(self._maker.document(0, [(depth, needle)], 0)[0])
            document, places = self._maker.document(self.tokens + fact, [(depth, needle)], 0)
            ids = self._maker.render(document, needle.question)
            answer = self.examiner.ask(ids, ANSWER_TOKENS, self._maker.head + places[0])
            yield Seen(depth, needle.answer in answer, answer.strip())
