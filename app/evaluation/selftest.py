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


@dataclass(frozen=True)
class Seen:
    """One planted fact: its depth (0 the beginning, 1 the end), whether the answer named it, the answer itself.

    `tokens` are those of the document that were read; of a longer one than the context holds it is the beginning.
    """

    depth: float
    found: bool
    answer: str
    tokens: int


def self_test(examiner: Examiner, text: str, count: int, seed: int = 0) -> Iterator[Seen]:
    """`count` pass codes at even depths of a text, each asked for by itself; the text is read once."""
    if not 1 <= count <= 50:
        raise UsageError(f"{count} facts: choose from 1 to 50.")
    maker = PromptMaker(examiner.tokenizer, Haystack.of(text, examiner.tokenizer))
    needles = make_needles(count, random.Random(f"{seed} self-test"))
    planted = [(i / max(1, count - 1), needle) for i, needle in enumerate(needles)]
    extra = len(maker.document(0, planted, 0)[0])
    room = examiner.capacity - ANSWER_TOKENS - len(maker.render([], needles[0].question)) - 8 - extra
    tokens = min(len(maker.haystack.ids), room)
    if tokens < 1:
        raise UsageError(f"{count} facts do not fit into a context of {examiner.capacity:,} tokens: plant fewer.")
    document, places = maker.document(tokens + extra, planted, 0)
    for depth, needle in planted:
        ids = maker.render(document, needle.question)
        answer = examiner.ask(ids, ANSWER_TOKENS, maker.head + places[-1])
        yield Seen(depth, needle.answer in answer, answer.strip(), tokens)
