"""OpenDocument texts (ODT): headings, paragraphs, lists, tables and notes, read from the XML itself."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator

from lxml import etree

from app.documents.document import Extract, Limits, paginate
from app.errors import BadDocument

_OFFICE = "{urn:oasis:names:tc:opendocument:xmlns:office:1.0}"
_TEXT = "{urn:oasis:names:tc:opendocument:xmlns:text:1.0}"
_TABLE = "{urn:oasis:names:tc:opendocument:xmlns:table:1.0}"
# What a person does not see in the text: deletions that are tracked, comments, and fields' forms.
_UNSEEN = (_TEXT + "tracked-changes", _OFFICE + "annotation", _OFFICE + "forms", _TEXT + "sequence-decls")
_PLAIN = {_TEXT + "tab": "\t", _TEXT + "line-break": "\n", _TEXT + "soft-page-break": "\f"}
_PARAGRAPHS = (_TEXT + "p", _TEXT + "h")


def read(archive: zipfile.ZipFile, name: str, limits: Limits) -> Extract:
    """Text by page where the file says where its pages ended, else by length."""
    try:
        members = archive.namelist()
        if "META-INF/manifest.xml" in members and _encrypted(_parse(archive, "META-INF/manifest.xml")):
            raise BadDocument(f"{name} is protected by a password. Save it without one.")
        root = _parse(archive, "content.xml")
        etree.strip_elements(root, *_UNSEEN, with_tail=False)
        body = root.find(f"{_OFFICE}body/{_OFFICE}text")
        notes: list[str] = []
        blocks = [] if body is None else list(_blocks(body, notes))
    except (KeyError, zipfile.BadZipFile, zlib.error, EOFError, etree.XMLSyntaxError) as error:
        raise BadDocument(f"{name} is a damaged ODT file: {error}. Open it and save it again.") from error
    except (RuntimeError, NotImplementedError) as error:  # zipfile's words for a password or a rare compression
        raise BadDocument(f"{name} cannot be unpacked: {error}. Save it again without a password.") from error
    text = "\n\n".join(block for block in (*blocks, *notes) if block.strip(" \t\n")) + "\n"
    limits.check_chars(name, len(text))
    return Extract("odt", list(paginate(text)))


def _parse(archive: zipfile.ZipFile, member: str) -> etree._Element:
    return etree.fromstring(archive.read(member), etree.XMLParser(resolve_entities=False, no_network=True))


def _encrypted(manifest: etree._Element) -> bool:
    return next(manifest.iter("{*}encryption-data"), None) is not None


def _blocks(parent: etree._Element, notes: list[str], marker: str = "") -> Iterator[str]:
    for child in parent:
        if child.tag == _TEXT + "h":
            level = child.get(_TEXT + "outline-level") or "1"
            yield "#" * min(6, int(level) if level.isdecimal() else 1) + " " + _inline(child, notes)
        elif child.tag == _TEXT + "p":
            yield marker + _inline(child, notes)
        elif child.tag == _TEXT + "list-item":
            yield from _blocks(child, notes, "- ")
        elif child.tag == _TABLE + "table":
            yield "\n".join(
                " | ".join(" ".join(_inline(p, notes) for p in cell.iter(*_PARAGRAPHS)) for cell in _cells(row))
                for row in child.iter(_TABLE + "table-row")
                if next(row.iterancestors(_TABLE + "table")) is child  # a table within a cell is told there
            )
        elif child.tag == _TEXT + "soft-page-break":
            yield "\f"
        else:  # sections, lists, indexes
            yield from _blocks(child, notes, marker)


def _cells(row: etree._Element) -> list[etree._Element]:
    return [cell for cell in row if cell.tag == _TABLE + "table-cell"]


def _inline(paragraph: etree._Element, notes: list[str]) -> str:
    """A paragraph's text; what its notes say goes behind the whole."""
    parts = [paragraph.text or ""]
    for node in paragraph:
        if node.tag == _TEXT + "note":
            mark = (node.findtext(_TEXT + "note-citation") or "").strip()
            body = node.find(_TEXT + "note-body")
            said = " ".join(_inline(p, notes) for p in body.iter(*_PARAGRAPHS)) if body is not None else ""
            parts.append(f"[note {mark}]")
            notes.append(f"[note {mark}] {said.strip()}")
        elif node.tag == _TEXT + "s":
            count = node.get(_TEXT + "c") or "1"
            parts.append(" " * min(1000, int(count) if count.isdecimal() else 1))
        elif node.tag in _PLAIN:
            parts.append(_PLAIN[node.tag])
        elif isinstance(node.tag, str):  # no comment or processing instruction
            if node.tag in _PARAGRAPHS:  # of a text box
                parts.append("\n")
            parts.append(_inline(node, notes))
        parts.append(node.tail or "")
    return "".join(parts)
