"""What a reader gives: a document's text and where its pages lie in it."""

from __future__ import annotations

import re
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Literal

from app.errors import DocumentTooLarge, UsageError

Kind = Literal["text", "pdf", "docx", "html", "epub", "notebook", "code", "odt", "rtf"]

# C0 and C1 controls but tab and newline, DEL, the byte-order mark and U+FFFE/U+FFFF, which are no characters.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufeff\ufffe\uffff]")
_HALF = re.compile("[\ud800-\udfff]")  # of a surrogate pair: no character, and no encoding takes it
_ENDING = re.compile(r"(?:\.\w{1,12}){0,2}\Z")
_NEWLINE = re.compile("\r\n|[\r\x85\u2028\u2029]")

PAGE_CHARS = 3000

# What people read in paragraphs. Every other kind of file is read line by line, with its spaces.
_PROSE = {".txt", ".text", ".md", ".markdown", ".rst", ".log", ".html", ".htm", ".xhtml", ".rtf", ".ipynb"}
_PROSE |= {".pdf", ".docx", ".odt", ".epub"}


def is_code(name: str) -> bool:
    """Whether a file of this name is shown as it stands: source code, data, settings."""
    suffix = PurePosixPath(name).suffix.lower()
    return bool(suffix) and suffix not in _PROSE


@dataclass(frozen=True)
class Limits:
    """How large a document may be: bytes of the file, bytes it unpacks to, characters of its text, seconds to read.

    The clock runs from when the limits were made.
    """

    max_bytes: int = 256 << 20
    max_unpacked_bytes: int = 512 << 20
    max_chars: int = 64_000_000
    max_seconds: float = 300.0
    began: float = field(default_factory=time.monotonic)

    def check_chars(self, name: str, chars: int) -> None:
        """Raise DocumentTooLarge when a text is longer than `max_chars`."""
        if chars > self.max_chars:
            raise DocumentTooLarge(
                f"{name} holds more than {self.max_chars:,} characters, the limit for one document. Split the file."
            )

    def check_unpacked(self, name: str, size: int) -> None:
        """Raise DocumentTooLarge when more than `max_unpacked_bytes` come out of an archive."""
        if size > self.max_unpacked_bytes:
            most = self.max_unpacked_bytes / (1 << 20)
            raise DocumentTooLarge(f"{name} unpacks to more than {most:,.1f} MiB, the limit. Add a part of it.")

    def check_time(self, name: str) -> None:
        """Raise DocumentTooLarge when reading takes longer than `max_seconds`."""
        if time.monotonic() - self.began > self.max_seconds:
            raise DocumentTooLarge(
                f"{name} takes longer than {self.max_seconds:,.0f} s to read, the limit for one document. Split it."
            )


class Meter:
    """Counts what a reader has found so far: a limit then ends its walk, whatever little a file made much text of."""

    def __init__(self, limits: Limits, name: str) -> None:
        self._limits, self._name, self._chars = limits, name, 0

    def __call__(self, text: str) -> str:
        """The text as it is; raises DocumentTooLarge where it is too much, or has taken too long."""
        self._chars += len(text)
        self._limits.check_chars(self._name, self._chars)
        self._limits.check_time(self._name)
        return text


@dataclass(frozen=True)
class Page:
    """Page `number` (from 1) is `text[start:end]` of its document."""

    number: int
    start: int
    end: int


@dataclass(frozen=True)
class File:
    """A file of a folder or archive, whose content is `text[start:end]` of its document."""

    path: str
    start: int
    end: int


@dataclass(frozen=True)
class Place:
    """Where something stands: the file's name or path, the page, and the line, both from 1.

    Lines are counted as whoever looks them up counts them: on its page in a PDF, else in the whole file.
    """

    file: str
    page: int
    line: int


@dataclass(frozen=True)
class Document:
    """A file's text, or that of a folder's or archive's `files` in order, which do not overlap.

    Pages follow one another without a gap and cover the whole text.
    """

    name: str
    kind: Kind
    text: str
    pages: tuple[Page, ...]
    warnings: tuple[str, ...]
    size_bytes: int
    sha256: str
    files: tuple[File, ...] = ()

    def place(self, at: int) -> Place:
        """Where character `at` of the text stands; what is in no file, as a folder's tree, is in the document."""
        page = self.pages[bisect_right(self.pages, at, key=lambda page: page.start) - 1]
        index = bisect_right(self.files, at, key=lambda file: file.start) - 1
        if index >= 0 and at < self.files[index].end:
            file = self.files[index]
            begin = max(file.start, page.start) if file.path.lower().endswith(".pdf") else file.start
            return Place(file.path, page.number, self.text.count("\n", begin, at) + 1)
        begin = page.start if self.kind == "pdf" else 0
        return Place(self.name, page.number, self.text.count("\n", begin, at) + 1)

    def slice(self, first_page: int, last_page: int) -> str:
        """The text of pages `first_page` to `last_page`, both counted from 1 and included."""
        if not 1 <= first_page <= last_page <= len(self.pages):
            raise UsageError(
                f"Pages {first_page} to {last_page} of {self.name} were asked for; it has pages 1 to {len(self.pages)}."
            )
        return self.text[self.pages[first_page - 1].start : self.pages[last_page - 1].end]


@dataclass(frozen=True)
class Extract:
    """A reader's raw result: the text of each page and what the person should know.

    `files`: of each file inside, its path, the index of its first page, and the characters ahead of it on that page.
    """

    kind: Kind
    pages: list[str]
    warnings: tuple[str, ...] = ()
    files: tuple[tuple[str, int, int], ...] = ()


def clean(text: str) -> tuple[str, int]:
    """Text with `\\n` line ends and without control characters, and how many of those it had."""
    return _CONTROL.subn("", without_halves(unify_line_ends(text)))


def shortened(name: str, most: int) -> str:
    """A name or path of at most `most` characters; it keeps its ending, such as .tar.gz, which tells what it is."""
    if len(name) <= most:
        return name
    ending = _ENDING.search(name)[0]  # type: ignore[index]  # matches nothing at least
    return name[: most - len(ending) - 1] + "…" + ending


def without_halves(text: str) -> str:
    """Text with U+FFFD for each half of a surrogate pair: JSON carries them, and a page with one is never sent."""
    return _HALF.sub("\ufffd", text)


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
