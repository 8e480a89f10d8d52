"""Prompts with pass codes hidden in a haystack, and tasks of copying, for identification and tests."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from app.evaluation.haystack import Haystack, Needle, make_needles
from app.prompt import Encoded, PromptBuilder
from app.tokenizer import TextTokenizer
from models.identify import Sample

_PASSKEYS = 10  # as DuoAttention plants


class PromptMaker:
    """Prompts of one tokenizer over one haystack."""

    def __init__(self, tokenizer: TextTokenizer, haystack: Haystack) -> None:
        self.tokenizer = tokenizer
        self.haystack = haystack
        self.prompts = PromptBuilder(tokenizer)
        self._frame = len(self.render([], "What is the pass code of the crimson lighthouse?"))
        self.head = self.render([-1], "").index(-1)

    def document(self, tokens: int, needles: Sequence[tuple[float, Needle]], start: int) -> tuple[list[int], list[int]]:
        """Haystack from token `start` on, with each needle behind the sentence at its depth (0 to 1); `tokens` long.

        Also the places in it where the needles begin, in order, and its own end.
        """
        ordered = sorted(needles, key=lambda pair: pair[0])
        planted = [(depth, self._encode(needle.sentence)) for depth, needle in ordered]
        body = max(0, tokens - sum(len(ids) for _, ids in planted))
        ids: list[int] = []
        places: list[int] = []
        used = 0
        for depth, sentence in planted:
            at = max(used, min(self.haystack.place(int(body * depth), start), body))
            ids += self.haystack.take(at - used, start + used)
            places.append(len(ids))
            ids += sentence
            used = at
        ids += self.haystack.take(body - used, start + used)
        return ids, [*places, len(ids)]

    def prompt_at(
        self, tokens: int, needles: Sequence[tuple[float, Needle]], question: str, start: int
    ) -> tuple[list[int], list[int]]:
        """A prompt of about `tokens` tokens: the document, then the question about it; and `document`'s places."""
        document, places = self.document(tokens - self._frame, needles, start)
        return self.render(document, question), [self.head + place for place in places]

    def render(self, document: Sequence[int], question: str) -> list[int]:
        """A prompt that asks about a document given as token ids."""
        head, instruction = "Document: book.txt (page 1 of 1)\n\n", "\n\nAnswer from the document above.\n\n"
        return self.prompts.first([head, Encoded(document), instruction, question])

    def passkeys(self, tokens: int, random_: random.Random) -> Sample:
        """DuoAttention's task: ten pass codes in a document of about `tokens` tokens, all of them asked for."""
        needles = make_needles(_PASSKEYS, random_)
        names = ", the ".join(needle.name for needle in needles)
        answer = self._encode("\n".join(f"{needle.lead} {needle.answer}." for needle in needles))
        depths = [(random_.random(), needle) for needle in needles]
        start = random_.randrange(len(self.haystack.ids))
        ids, _ = self.prompt_at(tokens - len(answer), depths, f"What are the pass codes of the {names}?", start)
        return Sample(torch.tensor(ids + answer), len(answer))

    def copying(self, tokens: int, random_: random.Random) -> Sample:
        """Text, other text, and the first text again: what to copy lies two thirds of the length back."""
        part = tokens // 3
        ids = self.haystack.take(2 * part, random_.randrange(len(self.haystack.ids)))
        return Sample(torch.tensor(ids + ids[:part]), part - 1)

    def plain(self, tokens: int, start: int) -> Sample:
        """The haystack as it is, every token of it scored."""
        return Sample(torch.tensor(self.haystack.take(tokens, start)), tokens - 1)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode_text(text, start=False)
