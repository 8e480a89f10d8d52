"""XML inside of archives, as Word, OpenDocument and EPUB files have it."""

from __future__ import annotations

from collections.abc import Iterator

from lxml import etree

from app.documents.archive import Archive
from app.errors import BadDocument

_DEEPEST, _LONGEST = 256, 10_000_000  # libxml2's own limits; it tells of them in words that are for its callers


def parse(archive: Archive, member: str) -> etree._Element:
    """The root of a member; nothing else is loaded. Raises BadDocument."""
    data = archive.read(member)
    parser = etree.XMLParser(resolve_entities=False, no_network=True, remove_comments=True, remove_pis=True)
    try:
        root = etree.fromstring(data, parser)
    except etree.XMLSyntaxError as error:
        why = " ".join(error.msg.split())
        if "Excessive depth" in why:
            raise BadDocument(
                f"{archive.name}: {member} nests its elements deeper than {_DEEPEST}, the limit. Take tables out of"
                " tables, and save it again."
            ) from error
        if "amplification" in why:
            raise BadDocument(
                f"{archive.name}: {member} defines entities that grow far beyond the file, as a program may write to do"
                " harm and none does for a text. Open it, and save it again."
            ) from error
        if "XML_PARSE_HUGE" in why or "too big" in why:
            raise BadDocument(
                f"{archive.name}: {member} holds one text, name or value of more than {_LONGEST:,} characters, the"
                " limit. Split it into paragraphs, and save it again."
            ) from error
        raise archive.damaged(f"{member}: {why}") from error
    # As comments would, entities split a text, of which `.text` is the first part alone.
    etree.strip_elements(root, etree.Entity, with_tail=False)
    return root


def outermost(parent: etree._Element, *tags: str) -> Iterator[etree._Element]:
    """Elements of these kinds below `parent`, but none within another: who reads one reads what is in it."""
    for child in parent:
        if child.tag in tags:
            yield child
        else:
            yield from outermost(child, *tags)
