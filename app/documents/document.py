"""What a reader gives: a document's text and where its pages lie in it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from app.errors import DocumentTooLarge, UsageError

Kind = Literal["text", "pdf", "docx", "html"]

# C0 and C1 controls but tab and newline, DEL, the byte-order mark and U+FFFE/U+FFFF, which are no characters.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufeff\ufffe\uffff]")
_NEWLINE = re.compile("\r\n|[\r\x85\u2028\u2029]")

PAGE_CHARS = 3000


@dataclass(frozen=True)
class Limits:
    """How large a document may be: bytes of the file, bytes it unpacks to, characters of its text."""

    max_bytes: int = 256 << 20
    max_unpacked_bytes: int = 512 << 20
    max_chars: int = 64_000_000

    def check_chars(self, name: str, chars: int) -> None:
        """Raise DocumentTooLarge when a text is longer than `max_chars`."""
        if chars > self.max_chars:
            raise DocumentTooLarge(
                f"{name} holds more than {self.max_chars:,} characters, the limit for one document. Split the file."
            )


@dataclass(frozen=True)
class Page:
    """Page `number` (from 1) is `text[start:end]` of its document."""

    number: int
    start: int
    end: int


@dataclass(frozen=True)
class Document:
    """A file's text. Pages follow one another without a gap and cover the whole text."""

    name: str
    kind: Kind
    text: str
    pages: tuple[Page, ...]
    warnings: tuple[str, ...]
    size_bytes: int
    sha256: str

    def slice(self, first_page: int, last_page: int) -> str:
        """The text of pages `first_page` to `last_page`, both counted from 1 and included."""
        if not 1 <= first_page <= last_page <= len(self.pages):
            raise UsageError(
                f"Pages {first_page} to {last_page} of {self.name} were asked for; it has pages 1 to {len(self.pages)}."
            )
        return self.text[self.pages[first_page - 1].start : self.pages[last_page - 1].end]


@dataclass(frozen=True)
class Extract:
    """A reader's raw result: the text of each page and what the person should know."""

    kind: Kind
    pages: list[str]
    warnings: tuple[str, ...] = ()


def clean(text: str) -> tuple[str, int]:
    """Text with `\\n` line ends and without control characters, and how many of those it had."""
    return _CONTROL.subn("", unify_line_ends(text))


def unify_line_ends(text: str) -> str:
    """Every kind of line end as `\\n`."""
    return _NEWLINE.sub("\n", text)


def paginate(text: str) -> Iterator[str]:
    """Pages of a plain text: at form feeds, else after a line end about every `PAGE_CHARS` characters."""
    if 0 < text.count("\f") * 100 <= max(1000, len(text)):  # more of them are no page breaks but dirt
        yield from (page + "\n" for page in text.split("\f"))
        return
    start = 0
    while start < len(text):
        end = start + PAGE_CHARS
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield text[start:end]
        start = end


def lay_out(pages: Iterable[str]) -> tuple[str, tuple[Page, ...]]:
    """Join pages to one text and map them."""
    parts: list[str] = []
    spans: list[Page] = []
    at = 0
    for number, part in enumerate(pages, 1):
        parts.append(part)
        spans.append(Page(number, at, at + len(part)))
        at += len(part)
    return "".join(parts), tuple(spans)


def count(number: int, noun: str) -> str:
    """ "1 page", "1,024 pages"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
