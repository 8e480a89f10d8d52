"""PDF through PDFium: the text of each page."""

from __future__ import annotations

import re
import threading

import pypdfium2 as pdfium

from app.documents.document import Extract, Limits
from app.errors import BadDocument
from app.words import plural

# PDFium may be called by one thread at a time.
_LOCK = threading.Lock()
_WRONG_PASSWORD = 4  # FPDF_ERR_PASSWORD
# PDFium marks a hyphen that breaks a word at a line's end with U+FFFE (older: U+0002).
_BROKEN_WORD = re.compile("[\x02\ufffe](?:\r?\n)?")


def read(data: bytes, name: str, limits: Limits) -> Extract:
    """Text by page. A scan, a password or a damaged file is refused with its reason."""
    with _LOCK:
        try:
            document = pdfium.PdfDocument(data)
        except pdfium.PdfiumError as error:
            if getattr(error, "err_code", None) == _WRONG_PASSWORD:
                raise BadDocument(
                    f"{name} is a PDF protected by a password. Save a copy without one and upload that."
                ) from error
            raise BadDocument(f"{name} is a damaged PDF. Open it in a viewer and save it again.") from error
        try:
            pages, bad = _read_pages(document, name, limits)
        finally:
            document.close()
    if not any(page.strip() for page in pages):
        raise BadDocument(
            f"{name} has {plural(len(pages), 'page')} and no text: it is a scan or made of pictures."
            " Run text recognition (OCR) on it first."
        )
    empty = [number for number, page in enumerate(pages, 1) if not page.strip() and number not in bad]
    warnings = []
    if empty:
        warnings.append(f"{plural(len(empty), 'page')} without text (pictures or scans): {_ranges(empty)}.")
    if bad:
        warnings.append(f"{plural(len(bad), 'page')} damaged and left empty: {_ranges(bad)}.")
    return Extract("pdf", pages, tuple(warnings))


def _read_pages(document: pdfium.PdfDocument, name: str, limits: Limits) -> tuple[list[str], list[int]]:
    pages: list[str] = []
    bad: list[int] = []
    chars = 0
    for index in range(len(document)):
        limits.check_time(name)
        try:
            page = document[index]
            textpage = page.get_textpage()
            text = textpage.get_text_range()
            textpage.close()
            page.close()
        except pdfium.PdfiumError:
            bad.append(index + 1)
            text = ""
        text = _BROKEN_WORD.sub(_mend, text).rstrip()
        chars += len(text)
        limits.check_chars(name, chars)
        pages.append(text + "\n\n")
    return pages, bad


def _mend(hyphen: re.Match[str]) -> str:
    """Nothing for a word broken at its syllables; a hyphen before a capital or digit, or in a word with others."""
    left = re.split(r"\s", hyphen.string[max(0, hyphen.start() - 40) : hyphen.start()])[-1]
    right = re.split(r"\s", hyphen.string[hyphen.end() : hyphen.end() + 40])[0]
    return "" if right[:1].islower() and "-" not in left + right else "-"


def _ranges(numbers: list[int]) -> str:
    """[1, 2, 3, 7] -> "1-3, 7", at most ten of them."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs[:10])
    return shown + (" and more" if len(runs) > 10 else "")
