"""Rich Text Format (RTF), as WordPad, TextEdit and older word processors save it."""

from __future__ import annotations

import codecs
import re

from striprtf.striprtf import rtf_to_text

from app.documents.document import Extract, Limits, paginate
from app.errors import BadDocument
from app.words import plural

_CODEPAGE = re.compile(rb"\\ansicpg(\d{1,5})")
_PAGE = re.compile(r"(\\\\)|\\page(?![a-z])[ ]?")  # a backslash in the text is two of them


def read(data: bytes, name: str, limits: Limits) -> Extract:
    """The text, by the pages that were broken by hand, else by length."""
    found = _CODEPAGE.search(data[:4096])
    encoding = f"cp{found[1].decode()}" if found else "cp1252"
    try:
        codecs.lookup(encoding)
    except LookupError:
        encoding = "cp1252"
    source = data.decode(encoding, "replace")
    try:
        text = rtf_to_text(_PAGE.sub(lambda found: found[1] or r"\'0c", source), encoding, "replace")
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
        raise BadDocument(f"{name} is a damaged RTF file: its codes make no sense. Open and save it again.") from error
    # Characters outside of the first plane come as two halves each.
    text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    limits.check_chars(name, len(text))
    warnings = []
    if wrong := text.count("\ufffd"):
        warnings.append(f"{plural(wrong, 'character')} could not be decoded as {encoding}, shown as \ufffd.")
    if not source.rstrip("\0 \r\n\t").endswith("}"):
        warnings.append("The file is cut short: its end is missing.")
    return Extract("rtf", list(paginate(text)), tuple(warnings))
