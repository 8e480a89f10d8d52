"""Plain text in any usual encoding, judged over the whole file."""

from __future__ import annotations

import codecs
import re
import unicodedata
from dataclasses import dataclass, replace

from app.documents.document import Extract, Limits, paginate, unify_line_ends
from app.documents.encodings import guess_encoding
from app.errors import BadDocument
from app.words import plural

_BOMS = (  # UTF-32's mark begins with UTF-16's, so it goes first
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_CONTROL_BYTES = bytes(set(range(32)) - set(b"\b\t\n\v\f\r\x1b")) + b"\x7f"
_SHOWN_AS = "\ufffd"
_EIGHT_BIT = re.compile("ascii|iso8859|cp|koi8|mac|tis|shift_jis|euc|gb|big5|hz|iso2022")
_WIDENED = {
    "ascii": "cp1252",
    "iso8859-1": "cp1252",
    "shift_jis": "cp932",
    "gb2312": "gb18030",
    "gbk": "gb18030",
    "euc_kr": "cp949",
}


@dataclass(frozen=True)
class Decoded:
    """A text, its encoding, how many bytes are no characters in it (shown as U+FFFD), and whether it was guessed."""

    text: str
    encoding: str
    undecodable: int = 0
    guessed: bool = False


def read(data: bytes, name: str, limits: Limits) -> Extract:
    """Plain text, Markdown, tables, source code: decoded and cut to pages."""
    decoded = decode(data, name)
    limits.check_chars(name, len(decoded.text))
    return Extract("text", list(paginate(unify_line_ends(decoded.text))), warnings_of(decoded))


def warnings_of(decoded: Decoded) -> tuple[str, ...]:
    """What a person should know about how a text was decoded."""
    warnings = []
    if decoded.guessed:
        warnings.append(f"Read as {decoded.encoding}. If letters look wrong, save the file as UTF-8.")
    if decoded.undecodable:
        bad = plural(decoded.undecodable, "byte")
        warnings.append(f"{bad} could not be decoded as {decoded.encoding}, shown as {_SHOWN_AS}.")
    return tuple(warnings)


def decode(data: bytes, name: str, declared: str | None = None) -> Decoded:
    """Decode bytes by their mark, as UTF-8, as `declared` (an HTML page's own word), or as the likeliest of the others.

    Raises BadDocument for bytes that are no text.
    """
    for mark, encoding in _BOMS:
        if data.startswith(mark):
            return _lossy(data, encoding)
    as_utf8 = _lossy(data, "utf-8")
    controls = len(data) - len(data.translate(None, _CONTROL_BYTES))
    # UTF-16 without a mark: Latin letters bring zeros, which UTF-8 would take for characters; others break UTF-8.
    if controls * 100 > len(data) and (as_utf8.undecodable or data.count(0) * 10 > len(data)):
        utf16 = _unmarked_utf16(data, not as_utf8.undecodable)
        if utf16:
            return _lossy(data, utf16)
    # Eight stray control bytes are a text's dirt; one byte in 25 makes it a binary (random bytes have one in ten).
    if controls > max(8, len(data) // 25):
        raise BadDocument(f"{name} is a binary file, not text. Upload text, PDF, DOCX, ODT, EPUB, RTF or HTML.")
    if not as_utf8.undecodable:
        return as_utf8
    characters = len(as_utf8.text) - sum(map(as_utf8.text.count, map(chr, range(128)))) - as_utf8.undecodable
    if characters >= as_utf8.undecodable:
        return as_utf8
    known = _known(declared)
    decoded = replace(_lossy(data, known or guess_encoding(data)), guessed=known is None)
    if decoded.undecodable * 10 > len(data):
        raise BadDocument(
            f"{name} is no text in any known encoding: {plural(decoded.undecodable, 'byte')} of {len(data):,}"
            f" could not be decoded, even as {decoded.encoding}. Save it as UTF-8."
        )
    return decoded


def _known(label: str | None) -> str | None:
    """Python's name for an encoding that a page declares, widened as browsers do; None if it is no 8-bit text's."""
    try:
        name = codecs.lookup(label).name if label else ""
    except LookupError:
        return None
    return _WIDENED.get(name, name) if _EIGHT_BIT.match(name) else None


def _unmarked_utf16(data: bytes, is_utf8: bool) -> str | None:
    """The byte order in which the bytes are UTF-16 of assigned, printable characters, if there is one.

    Bytes that are UTF-8 as well can only be UTF-16 of an alphabet: Chinese or Japanese would break UTF-8, while two
    letters of ASCII side by side look like one Chinese character.
    """
    if len(data) % 2 and len(data) < 64:  # a cut-off last unit is believed of a longer file only
        return None
    found: tuple[int, str] | None = None
    for encoding in ("utf-16-le", "utf-16-be"):
        try:
            sample = data[: len(data) & ~1].decode(encoding)[:4096]
        except UnicodeDecodeError:
            continue
        if is_utf8 and sum(c >= "\u3000" for c in sample) * 4 > len(sample):
            continue
        odd = sum(unicodedata.category(c) in ("Cc", "Cn", "Co") and c not in "\t\n\r\f" for c in sample)
        if odd * 50 <= len(sample) and (found is None or odd < found[0]):
            found = odd, encoding
    return found[1] if found else None


def _lossy(data: bytes, encoding: str) -> Decoded:
    if encoding.startswith(("utf-16", "utf-32")):
        text = data.decode(encoding, errors="replace")
        return Decoded(text, encoding, text.count(_SHOWN_AS))
    try:
        text = data.decode(encoding, errors="surrogateescape")
    except UnicodeDecodeError:  # a multi-byte codec may call an ASCII byte wrong, which cannot be escaped
        text = data.decode(encoding, errors="replace")
        return Decoded(text, encoding, text.count(_SHOWN_AS))
    # Python's cp932 turns bytes without a meaning into private characters.
    text, undecodable = re.subn(
        "[\udc80-\udcff\uf8f0-\uf8f3]" if encoding == "cp932" else "[\udc80-\udcff]", _SHOWN_AS, text
    )
    return Decoded(text, encoding.removesuffix("-sig"), undecodable)
