"""Word documents (DOCX): paragraphs, headings, lists, tables and notes, read from the XML itself.

python-docx leaves out tracked insertions, content controls and notes; the walk below is as short and keeps them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from lxml import etree

from app.documents.archive import Archive
from app.documents.document import Extract, Limits, Meter, paginate
from app.documents.markup import outermost, parse

_W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
# What a person does not see: deleted and moved-away text, and the second copy of each text box.
_UNSEEN = (
    _W + "del",
    _W + "moveFrom",
    "{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback",
)
_PLAIN = {_W + "tab": "\t", _W + "cr": "\n", _W + "noBreakHyphen": "-"}
_NOTES = {"footnote": "word/footnotes.xml", "endnote": "word/endnotes.xml"}


def read(archive: Archive, name: str, limits: Limits) -> Extract:
    """Text by page where the file says where its pages ended, else by length."""
    archive = replace(archive, kind="DOCX file", advice="Open it and save it again.")
    root = _parse(archive, "word/document.xml")
    levels = _heading_levels(archive)
    # Word notes where pages ended when it last saved; a break set by hand is noted there a second time.
    rendered = root.find(f".//{_W}lastRenderedPageBreak") is not None
    body = root.find(_W + "body")
    meter = Meter(limits, name)
    blocks = [] if body is None else list(_blocks(body, levels, rendered, meter))
    for kind, member in _NOTES.items():
        if member in archive.names:
            blocks += _notes(_parse(archive, member), kind, meter)
    text = "\n\n".join(block for block in blocks if block.strip(" \t\n")) + "\n"
    limits.check_chars(name, len(text))
    return Extract("docx", list(paginate(text)))


def _parse(archive: Archive, member: str) -> etree._Element:
    root = parse(archive, member)
    etree.strip_elements(root, *_UNSEEN, with_tail=False)
    return root


def _heading_levels(archive: Archive) -> dict[str, int]:
    """Style id -> heading level from 1; ids are in the language of the Word that wrote them, names are not."""
    if "word/styles.xml" not in archive.names:
        return {}
    levels = {}
    for style in _parse(archive, "word/styles.xml").iter(_W + "style"):
        label = style.find(_W + "name")
        heading = re.fullmatch(r"heading ([1-6])", (label.get(_W + "val") or "").lower()) if label is not None else None
        if heading:
            levels[style.get(_W + "styleId")] = int(heading.group(1))
    return levels


def _blocks(parent: etree._Element, levels: dict[str, int], rendered: bool, meter: Meter) -> Iterator[str]:
    for child in parent:
        if child.tag == _W + "p":
            if len(child):
                yield _marker(child, levels) + _inline(child, rendered, meter)
            else:
                meter("")  # an empty line takes time too
        elif child.tag == _W + "tbl":
            yield "\n".join(
                " | ".join(
                    " ".join(_inline(p, rendered, meter) for p in outermost(cell, _W + "p"))
                    for cell in row.findall(_W + "tc")
                )
                for row in child.findall(_W + "tr")
            )
        elif child.tag != _W + "sectPr":  # content controls, insertions, custom XML
            yield from _blocks(child, levels, rendered, meter)


def _marker(paragraph: etree._Element, levels: dict[str, int]) -> str:
    properties = next(paragraph.iterchildren(_W + "pPr"), None)
    if properties is None:
        return ""
    style = properties.find(_W + "pStyle")
    level = levels.get(style.get(_W + "val")) if style is not None else None
    if level:
        return "#" * level + " "
    return "- " if properties.find(_W + "numPr") is not None else ""


def _inline(paragraph: etree._Element, rendered: bool, meter: Meter) -> str:
    parts = [meter("")]  # a paragraph without text takes time too
    for node in paragraph.iter():
        if node.tag == _W + "t":
            parts.append(meter(node.text or ""))
        elif node.tag == _W + "br":
            by_hand = node.get(_W + "type") == "page"
            parts.append("\n" if not by_hand else "" if rendered else "\f")
        elif node.tag == _W + "lastRenderedPageBreak":
            parts.append("\f")
        elif node.tag in (_W + "footnoteReference", _W + "endnoteReference"):
            parts.append(meter(f"[{node.tag[len(_W) : -9]} {node.get(_W + 'id')}]"))
        elif node.tag == _W + "p" and node is not paragraph:  # a text box
            parts.append("\n")
        elif node.tag in _PLAIN:
            parts.append(_PLAIN[node.tag])
    return "".join(parts)


def _notes(root: etree._Element, kind: str, meter: Meter) -> Iterator[str]:
    for note in outermost(root, _W + kind):
        if note.get(_W + "type") in (None, "normal"):  # the others are separator lines
            text = " ".join(_inline(p, True, meter) for p in outermost(note, _W + "p"))
            yield f"[{kind} {note.get(_W + 'id')}] {text.strip()}"
