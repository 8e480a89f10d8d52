"""A document on its way into a chat."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from app.chat import Selection
from app.documents import Document, Page
from app.errors import describe

log = logging.getLogger("octavo.ui")


@dataclass(eq=False)
class Attachment:
    """A document on the shelf; `document` is None while it is read and when `error` says why it cannot be."""

    name: str
    id: str = field(default_factory=lambda: secrets.token_hex(4))
    document: Document | None = None
    error: str = ""
    counts: dict[tuple[int, int], int] = field(default_factory=dict)  # tokens, by the pages chosen
    counted: float = 0.0  # how far the chosen pages are, from 0 to 1
    arrived: float = 0.0  # when its upload was whole (monotonic seconds); 0 for what was here already
    first: int = 1
    last: int = 1

    @classmethod
    def of(cls, source: Selection) -> Attachment:
        """A document that is there already."""
        return cls(source.document.name, document=source.document, first=source.first_page, last=source.last_page)

    @property
    def tokens(self) -> int | None:
        """Of the chosen pages; None until they are counted."""
        return self.counts.get((self.first, self.last))

    @property
    def whole(self) -> bool:
        return self.document is not None and (self.first, self.last) == (1, len(self.document.pages))

    @property
    def pages(self) -> tuple[Page, ...]:
        """The chosen ones."""
        return self.document.pages[self.first - 1 : self.last] if self.document is not None else ()

    @property
    def source(self) -> Selection:
        """What to give to the service."""
        assert self.document is not None
        return Selection(self.document, self.first, self.last)

    def read(self, document_of: Callable[[], Document]) -> None:
        """Read its file, whichever shelf it is on by then; where that cannot be, `error` says why."""
        try:
            document = document_of()
            self.name, self.last = document.name, len(document.pages)
            self.document = document
        except Exception as error:
            self.error, status, _ = describe(error)
            if status >= 500:
                log.exception("A document could not be read")

    def choose(self, first: int, last: int) -> None:
        """Read only these pages. Numbers are kept in range; where they cross, the one that did not change gives way."""
        assert self.document is not None
        count = len(self.document.pages)
        first, last = (min(max(page, 1), count) for page in (first, last))
        if first > last:
            first, last = (first, first) if first != self.first else (last, last)
        self.first, self.last = first, last
