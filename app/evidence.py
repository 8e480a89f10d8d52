"""Passages that a question and its answer looked at; and whether what the answer quotes stands in the documents."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from app.documents import Document, is_code
from app.engine.detokenize import TokenBytes
from models.evidence import Looked

_PASSAGE_CHARS = 500  # what a card shows
_PARAGRAPH = re.compile(r"\n\s*\n")
_SENTENCE = re.compile(r"(?<=[.!?\u3002\uff01\uff1f])[\"'”’)]*\s+|\n")
_MOST = 4  # passages of an answer
_LEAD_CHARS = 60  # that a card shows before the words that had most of the attention
_KEY_CHARS = 160  # of the words within a passage that had most of the attention
# A passage with less of the attention than this, or than this share of the strongest one's, is in passing: no card.
_WEAK, _BESIDE = 0.05, 1 / 6
_QUOTE = re.compile(
    '\u201c([^\u201c\u201d]+)\u201d|\u201e([^\u201c\u201d\u201e]+)[\u201c\u201d]|"([^"\n]+)"|\u00ab([^\u00ab\u00bb]+)\u00bb'
)
# Blocks of code, code within a line and tags: what stands in quotation marks there is a string, nobody's words.
_FENCED = re.compile(
    r"^ {0,3}(?P<fence>`{3,}|~{3,})[^\n]*(?:\n.*?(?:^ {0,3}(?P=fence)[`~]*[ \t]*$|\Z)|\Z)", re.M | re.S
)
_CODE = re.compile(r"(?<!`)(`+)(?!`)[^\n]*?(?<!`)\1(?!`)|</?[A-Za-z!][^<>]*>")
_MARKS = re.compile('["\u201c\u201d\u201e\u00ab\u00bb]')
_BLOCKQUOTE = re.compile(r"(?:^[ ]{0,3}> ?.*\n?)+", re.MULTILINE)
_WORD = re.compile(r"\w+")
_WORDS = re.compile(r"\S+")
_EMPHASIS = re.compile(r"\*+|(?<!\w)_+|_+(?!\w)|`+")
_QUOTE_WORDS = 3  # shorter ones are names and terms
_ALIKE = {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "-"}


@dataclass(frozen=True)
class Passage:
    """Characters `start` to `end` of a document's text; what is shown of them begins on page `page`, in line `line`.

    name: the file. page and line count from 1, lines as in app.documents.Place. document: its label in the library.
    strength: the passage's share, 0 to 1, of what question and answer gave to all documents. Of its excerpt,
    characters `key_start` to `key_end` had most; 0 and 0 where that is not known.
    """

    document: str
    name: str
    start: int
    end: int
    page: int
    line: int
    strength: float
    excerpt: str
    key_start: int = 0
    key_end: int = 0

    @property
    def shown(self) -> int:
        """From where on the excerpt is shown: its beginning, or a little before the words that had most."""
        return _shown(self.name, self.excerpt, self.key_start)

    def begin(self, document: Document) -> int:
        """The character of its document where what is shown begins."""
        return max(document.text.find(self.excerpt, self.start, self.end), self.start) + self.shown


@dataclass(frozen=True)
class Quote:
    """Words that an answer quotes, and where a document has them: None where none has.

    name, page, line: of the file. document: its label in the library, with the words from character `start` to `end`.
    """

    text: str
    name: str | None
    page: int | None
    document: str | None = None
    start: int = 0
    end: int = 0
    line: int | None = None


@dataclass(frozen=True)
class Source:
    """A stretch of a document, `text` from character `offset` on, and its token ids, from `start` on in a prompt."""

    label: str
    document: Document
    text: str
    offset: int
    ids: Sequence[int]
    start: int


def find_ids(prompt: Sequence[int] | np.ndarray, ids: Sequence[int]) -> int | None:
    """Where in a prompt these ids stand; None where they do not."""
    haystack, needle = (np.asarray(x, dtype=np.int64).tobytes() for x in (prompt, ids))
    at = haystack.find(needle) if needle else -1
    while at % 8 and at >= 0:  # within an id
        at = haystack.find(needle, at + 1)
    return at // 8 if at >= 0 else None


def passages(looked: Looked, sources: Sequence[Source], tokenizer: TokenBytes) -> list[Passage]:
    """The passages with most attention, strongest first, at most `_MOST`; few where the attention is spread thin."""
    sums: dict[tuple[int, int, int], float] = {}
    looks: dict[tuple[int, int, int], list[tuple[int, float]]] = {}  # the same by character
    for number, source in enumerate(sources):
        inside = (looked.positions >= source.start) & (looked.positions < source.start + len(source.ids))
        places = char_offsets(tokenizer, source, looked.positions[inside] - source.start)
        bounds: tuple[int, int] | None = None
        for place, mass in zip(places, looked.masses[inside], strict=True):
            if bounds is None or not bounds[0] <= place < bounds[1]:
                bounds = _bounds(source.document.text, place)
            key = number, *bounds
            sums[key] = sums.get(key, 0.0) + float(mass)
            looks.setdefault(key, []).append((place, max(float(mass), 0.0)))
    sums = {key: mass for key, mass in sums.items() if mass > 0}
    total, found = sum(sums.values()), _joined(sums, sources)
    best = sorted(found.items(), key=lambda item: (-item[1], item[0]))[:_MOST]
    return [
        _passage(sources[number], start, end, mass / total, looks[number, start, end])
        for (number, start, end), mass in best
        if mass > max(_WEAK * total, _BESIDE * best[0][1])
    ]


def _joined(sums: Mapping[tuple[int, int, int], float], sources: Sequence[Source]) -> dict[tuple[int, int, int], float]:
    """Passages (source, start, end) with their attention; a weaker one counts for one that it is part of.

    They overlap, or they are neighbours within one line that was too long for a card.
    """
    joined: dict[tuple[int, int, int], float] = {}
    for part in sorted(sums, key=lambda part: (-sums[part], part)):
        number, start, end = part
        for other in joined:
            low, high = min(start, other[1]), max(end, other[2])
            if other[0] != number or start > other[2] or end < other[1]:
                continue
            overlap = start < other[2] and other[1] < end
            if overlap or "\n" not in sources[number].document.text[low:high].strip("\n"):
                joined[other] += sums[part]
                break
        else:
            joined[part] = sums[part]
    return joined


def char_offsets(tokenizer: TokenBytes, source: Source, tokens: np.ndarray) -> list[int]:
    """The character of the document's text in which each of a source's tokens begins."""
    start = source.offset + len(source.text) - len(source.text.lstrip())
    encoded = np.frombuffer(source.text.strip().encode(errors="replace"), dtype=np.uint8)
    kinds, at = np.unique(np.asarray(source.ids, dtype=np.int64), return_inverse=True)
    ends = np.cumsum(np.array([len(tokenizer.token_bytes(token)) for token in kinds.tolist()], dtype=np.int64)[at])
    begins = np.concatenate(([0], ends))[tokens]
    if len(ends) and ends[-1] != len(encoded):  # a tokenizer that rewrites its text: where about
        begins = begins * len(encoded) // max(int(ends[-1]), 1)
    chars = np.cumsum((encoded & 0xC0) != 0x80, dtype=np.int32)  # bytes that begin a character
    return (start + chars[np.minimum(begins, len(encoded) - 1)] - 1).tolist()


def _bounds(text: str, at: int) -> tuple[int, int]:
    """The passage around a character: a paragraph, or whole sentences of one that is too long for a card."""
    reach = 8 * _PASSAGE_CHARS
    low, high = max(0, at - reach), min(len(text), at + reach)
    before = [found.end() for found in _PARAGRAPH.finditer(text, low, at + 1) if found.end() <= at]
    start = before[-1] if before else _anchor(text, at - at % reach)
    after = _PARAGRAPH.search(text, at, high)
    end = after.start() if after and after.start() > at else (after.end() if after else high)
    while end - start > _PASSAGE_CHARS:
        cuts = [found.end() for found in _SENTENCE.finditer(text, start, start + _PASSAGE_CHARS) if found.end() > start]
        cut = cuts[-1] if cuts else start + _PASSAGE_CHARS
        if at < cut:
            return start, cut
        start = cut
    return start, max(end, at + 1)


def _anchor(text: str, base: int) -> int:
    """Where passages of a paragraph without an end in sight begin: the same for every place behind it."""
    low = max(0, base - _PASSAGE_CHARS)
    return max((found.end() for found in _SENTENCE.finditer(text, low, base) if found.end() <= base), default=base)


def _key(text: str, start: int, end: int, looks: Sequence[tuple[int, float]]) -> tuple[int, int]:
    """The sentence of a passage that was looked at most, or the words around the middle of those looks."""
    cuts = [start, *(found.end() for found in _SENTENCE.finditer(text, start, end) if found.end() < end), end]
    sums = [sum(mass for place, mass in looks if low <= place < high) for low, high in pairwise(cuts)]
    at = sums.index(max(sums))
    low, high = cuts[at], cuts[at + 1]
    if high - low > _KEY_CHARS:
        inside = sorted(look for look in looks if low <= look[0] < high)
        half = sum(mass for _, mass in inside) / 2
        sofar = accumulate(mass for _, mass in inside)
        middle = next(place for (place, _), mass in zip(inside, sofar, strict=True) if mass >= half)
        low = max(low, min(middle - _KEY_CHARS // 2, high - _KEY_CHARS))
        high = min(high, low + _KEY_CHARS)
        words = [found.span() for found in _WORDS.finditer(text, low, high)][1:-1]  # the outer ones may be cut
        low, high = (words[0][0], words[-1][1]) if words else (low, high)
    return high - len(text[low:high].lstrip()), low + len(text[low:high].rstrip())


def _passage(source: Source, start: int, end: int, strength: float, looks: Sequence[tuple[int, float]]) -> Passage:
    document = source.document
    text = document.text[start:end]
    before = start + len(text) - len(text.lstrip())
    before = max(start, document.text.rfind("\n", start, before) + 1)  # with the first line's indentation
    excerpt = document.text[before:end].rstrip()
    low, high = (min(max(at - before, 0), len(excerpt)) for at in _key(document.text, start, end, looks))
    place = document.place(before + _shown(document.place(before).file, excerpt, low))
    return Passage(source.label, place.file, start, end, place.page, place.line, round(strength, 4), excerpt, low, high)


def _shown(name: str, excerpt: str, low: int) -> int:
    """Where in an excerpt a card begins whose words that had most begin at `low`."""
    if low <= _LEAD_CHARS:
        return 0
    if is_code(name):  # whole lines: indentation says something
        return excerpt.rfind("\n", 0, low) + 1
    lead = excerpt[low - _LEAD_CHARS : low].partition(" ")
    return low - len((lead[2] if lead[1] else lead[0]).lstrip())


def quotes(answer: str, documents: Mapping[str, Document]) -> list[Quote]:
    """Each verbatim quote of an answer, found or not in documents by their labels.

    Line breaks, emphasis and kinds of quotation mark and dash do not count.
    """
    quoted = [text for text in dict.fromkeys(_quoted(answer)) if len(_WORD.findall(text)) >= _QUOTE_WORDS]
    if not quoted:
        return []
    texts = [(label, document, _plain(document.text)) for label, document in documents.items()]
    return [_look_up(text, texts) for text in quoted]


def _quoted(answer: str) -> Iterator[str]:
    answer = _FENCED.sub("\n", answer)
    for block in _BLOCKQUOTE.findall(answer):
        yield re.sub(r"^[ ]{0,3}> ?", "", block, flags=re.MULTILINE).strip()
    said = _CODE.sub(lambda code: _MARKS.sub(" ", code[0]), _BLOCKQUOTE.sub("\n", answer))
    for groups in _QUOTE.findall(said):
        yield next(group for group in groups if group).strip()


def _look_up(text: str, texts: Sequence[tuple[str, Document, str]]) -> Quote:
    said = _plain(text)
    for version in dict.fromkeys((said, _EMPHASIS.sub("", said))):
        words = version.rstrip(" .,;:!?\u2026").split()
        pattern = re.compile(r"\s+".join(map(re.escape, words)), re.IGNORECASE)
        for label, document, plain in texts:
            if found := pattern.search(plain):
                place = document.place(found.start())
                return Quote(text, place.file, place.page, label, found.start(), found.end(), place.line)
    return Quote(text, None, None)


def _plain(text: str) -> str:
    """A text with one kind of quotation mark and dash, character for character."""
    for kind, plain in _ALIKE.items():
        text = text.replace(kind, plain)
    return text
