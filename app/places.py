"""How a place in a document is told: its file, its page where it has pages of its own, its line."""

from __future__ import annotations

from pathlib import PurePosixPath

from app.documents import Document
from app.evidence import Passage, Quote

# What people read in paragraphs. Every other kind of file is read line by line, with its spaces.
_PROSE = {".txt", ".text", ".md", ".markdown", ".rst", ".log", ".html", ".htm", ".xhtml", ".rtf", ".ipynb"}
_PROSE |= {".pdf", ".docx", ".odt", ".epub"}


def is_code(name: str) -> bool:
    """Whether a file of this name is shown as it stands: source code, data, settings."""
    suffix = PurePosixPath(name).suffix.lower()
    return bool(suffix) and suffix not in _PROSE


def told(place: Passage | Quote, document: Document | None) -> str:
    """Such as "book.pdf, page 4, line 3"; `document` is the place's, None where its text is gone.

    Source code has no pages, and of a file in a folder or archive it is the file's own page that counts.
    """
    page = place.page
    if document is not None:
        page = _own_page(place, document)
    return f"{place.name}{f', page {page:,}' if page else ''}{f', line {place.line:,}' if place.line else ''}"


def _own_page(place: Passage | Quote, document: Document) -> int | None:
    file = next((file for file in document.files if file.start <= place.start < file.end), None)
    if is_code(place.name or "") or (document.files and file is None):  # the list of an archive's files
        return None
    return (place.page or 1) - (document.place(file.start).page - 1 if file is not None else 0)
