"""OpenDocument texts (ODT): headings, paragraphs, lists, tables and notes, read from the XML itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lxml import etree

from app.documents.archive import Archive
from app.documents.document import Extract, Limits, Meter, paginate
from app.documents.markup import outermost, parse
from app.errors import BadDocument

_OFFICE = "{urn:oasis:names:tc:opendocument:xmlns:office:1.0}"
_TEXT = "{urn:oasis:names:tc:opendocument:xmlns:text:1.0}"
_TABLE = "{urn:oasis:names:tc:opendocument:xmlns:table:1.0}"
# What a person does not see in the text: deletions that are tracked, comments, and fields' forms.
_UNSEEN = (_TEXT + "tracked-changes", _OFFICE + "annotation", _OFFICE + "forms", _TEXT + "sequence-decls")
_PLAIN = {_TEXT + "tab": "\t", _TEXT + "line-break": "\n", _TEXT + "soft-page-break": "\f"}
_PARAGRAPHS = (_TEXT + "p", _TEXT + "h")


def read(archive: Archive, name: str, limits: Limits) -> Extract:
    """Text by page where the file says where its pages ended, else by length."""
    archive = replace(archive, kind="ODT file", advice="Open it and save it again.")
    members = archive.names
    if "META-INF/manifest.xml" in members and _encrypted(parse(archive, "META-INF/manifest.xml")):
        raise BadDocument(f"{name} is protected by a password. Save it without one.")
    root = parse(archive, "content.xml")
    etree.strip_elements(root, *_UNSEEN, with_tail=False)
    body = root.find(f"{_OFFICE}body/{_OFFICE}text")
    notes: list[str] = []
    blocks = [] if body is None else list(_blocks(body, notes, Meter(limits, name)))
    text = "\n\n".join(block for block in (*blocks, *notes) if block.strip(" \t\n")) + "\n"
    limits.check_chars(name, len(text))
    return Extract("odt", list(paginate(text)))


def _encrypted(manifest: etree._Element) -> bool:
    return next(manifest.iter("{*}encryption-data"), None) is not None


def _blocks(parent: etree._Element, notes: list[str], meter: Meter, marker: str = "") -> Iterator[str]:
    for child in parent:
        if child.tag == _TEXT + "h":
            yield "#" * min(6, _number(child, "outline-level")) + " " + _inline(child, notes, meter)
        elif child.tag == _TEXT + "p":
            yield marker + _inline(child, notes, meter)
        elif child.tag == _TEXT + "list-item":
            yield from _blocks(child, notes, meter, "- ")
        elif child.tag == _TABLE + "table":
            yield "\n".join(
                " | ".join(
                    " ".join(_inline(p, notes, meter) for p in outermost(cell, *_PARAGRAPHS)) for cell in _cells(row)
                )
                for row in child.iter(_TABLE + "table-row")
                if next(row.iterancestors(_TABLE + "table")) is child  # a table within a cell is told there
            )
        elif child.tag == _TEXT + "soft-page-break":
            yield "\f"
        else:  # sections, lists, indexes
            yield from _blocks(child, notes, meter, marker)


def _cells(row: etree._Element) -> list[etree._Element]:
    return [cell for cell in row if cell.tag == _TABLE + "table-cell"]


def _number(node: etree._Element, attribute: str) -> int:
    """An attribute of the text's own kind as a number; 1 where it is none, or a longer one than is meant seriously."""
    value = node.get(_TEXT + attribute) or ""
    return int(value) if value.isdecimal() and len(value) < 5 else 1


def _inline(paragraph: etree._Element, notes: list[str], meter: Meter) -> str:
    """A paragraph's text; what its notes say goes behind the whole."""
    parts = [meter(paragraph.text or "")]
    for node in paragraph:
        if node.tag == _TEXT + "note":
            mark = (node.findtext(_TEXT + "note-citation") or "").strip()
            body = node.find(_TEXT + "note-body")
            said = " ".join(_inline(p, notes, meter) for p in outermost(body, *_PARAGRAPHS)) if body is not None else ""
            parts.append(f"[note {mark}]")
            notes.append(f"[note {mark}] {said.strip()}")
        elif node.tag == _TEXT + "s":
            parts.append(meter(" " * min(1000, _number(node, "c"))))
        elif node.tag in _PLAIN:
            parts.append(_PLAIN[node.tag])
        else:
            if node.tag in _PARAGRAPHS:  # of a text box
                parts.append("\n")
            parts.append(_inline(node, notes, meter))
        parts.append(meter(node.tail or ""))
    return "".join(parts)
