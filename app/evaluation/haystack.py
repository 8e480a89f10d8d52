"""Long text with facts planted in it, and what to ask about them. The text is the user's; the facts are ours."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from app.documents import read_document
from app.errors import UsageError
from app.tokenizer import TextTokenizer

_COLOURS = (
    "amber azure black blue bronze brown copper crimson golden green grey indigo ivory orange pink purple".split()
)
_COLOURS += "red scarlet silver teal violet white yellow".split()
_THINGS = (
    "anchor barrel bell bottle bridge cabin candle carriage castle chest clock compass engine ferry garden".split()
)
_THINGS += "gate hammer harbour island kettle ladder lantern library locker mirror museum piano safe ship".split()
_THINGS += "tower vault wagon".split()
MOST_NEEDLES = len(_COLOURS) * len(_THINGS)  # at a time: each is of another thing


@dataclass(frozen=True)
class Needle:
    """A fact: what it is about, the sentence that states it, the question, how the answer begins, and the answer."""

    name: str
    sentence: str
    question: str
    lead: str
    answer: str


def make_needles(count: int, random_: random.Random) -> list[Needle]:
    """`count` pass codes of different things, MOST_NEEDLES at most."""
    names = random_.sample([f"{colour} {thing}" for colour in _COLOURS for thing in _THINGS], count)
    needles = []
    for name in names:
        code = str(random_.randrange(10000, 100000))
        needles.append(
            Needle(
                name,
                f" The pass code of the {name} is {code}. Remember it: {code} is the pass code of the {name}.",
                f"What is the pass code of the {name}?",
                f"The pass code of the {name} is",
                code,
            )
        )
    return needles


@dataclass(frozen=True)
class Haystack:
    """A long text, its token ids, and the places among them where a sentence has ended."""

    text: str
    ids: Sequence[int]
    breaks: Sequence[int]

    @classmethod
    def of(cls, text: str, tokenizer: TextTokenizer) -> Haystack:
        """The haystack of a text; it is repeated where more tokens are asked for than it has."""
        ids = tokenizer.encode_text(text.strip() + "\n\n")
        ends = [bytes(tokenizer.token_bytes(token)).rstrip(b" ")[-1:] in (b".", b"\n") for token in ids]
        breaks = [at + 1 for at, end in enumerate(ends) if end]
        return cls(text, ids, breaks)

    def take(self, count: int, start: int = 0) -> list[int]:
        """`count` ids from `start` on, from the beginning again where the text ends."""
        size = len(self.ids)
        return [self.ids[at % size] for at in range(start, start + count)]

    def place(self, wanted: int, start: int = 0) -> int:
        """The end of a sentence at or behind `wanted` tokens from `start`, or `wanted` where there is none near."""
        at = (start + wanted) % len(self.ids)
        index = bisect_left(self.breaks, at)
        near = self.breaks[index] - at if index < len(self.breaks) else len(self.ids)
        return wanted + near if wanted and near < 64 else wanted


def read_haystack(source: Path | None) -> str:
    """Text of a file, or of the files in a directory in the order of their names; without one Python's own manual."""
    if source is None:
        import pydoc_data.topics

        return "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    if not source.exists():
        raise UsageError(f"--haystack: there is no {source}. Give a text file or a directory of them.")
    files = [source] if source.is_file() else sorted(path for path in source.rglob("*") if path.is_file())
    text = "\n\n".join(read_document(file).text for file in files)
    if not text.strip():
        raise UsageError(f"--haystack: {source} has no text.")
    return text
