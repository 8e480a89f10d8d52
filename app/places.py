"""How a place in a document is told: its file, its page where it has pages of its own, its line."""

from __future__ import annotations

from app.documents import Document, is_code
from app.evidence import Passage, Quote


def told(place: Passage | Quote, document: Document | None) -> str:
    """Such as "book.pdf, page 4, line 3"; `document` is the place's, None where its text is gone.

    Source code has no pages, and of a file in a folder or archive it is the file's own page that counts.
    """
    if not place.name:
        return "not in the documents"
    page, line = place.page, place.line
    if document is not None:
        begin = place.begin(document) if isinstance(place, Passage) else place.start
        page, line = _own_page(begin, document), document.place(begin).line
    elif is_code(place.name):
        page = None
    return f"{place.name}{f', page {page:,}' if page else ''}{f', line {line:,}' if line else ''}"


def excerpt(passage: Passage) -> str:
    """What is shown of a passage, in one line; an ellipsis says that more stands in front of it."""
    return ("\u2026 " if passage.shown else "") + " ".join(passage.excerpt[passage.shown :].split())


def parts_of(document: Document) -> str:
    """What the pages of a document are called: a folder, an archive or source code has parts."""
    return "part" if document.files or is_code(document.name) else "page"


def _own_page(at: int, document: Document) -> int | None:
    file = next((file for file in document.files if file.start <= at < file.end), None)
    if is_code(file.path if file else document.name) or (document.files and file is None):  # an archive's list of files
        return None
    return document.place(at).page - (document.place(file.start).page - 1 if file is not None else 0)
