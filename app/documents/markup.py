"""XML inside of archives, as Word, OpenDocument and EPUB files have it."""

from __future__ import annotations

from collections.abc import Iterator

from lxml import etree

from app.documents.archive import Archive


def parse(archive: Archive, member: str) -> etree._Element:
    """The root of a member; nothing else is loaded. Raises BadDocument."""
    data = archive.read(member)
    parser = etree.XMLParser(resolve_entities=False, no_network=True, remove_comments=True, remove_pis=True)
    try:
        root = etree.fromstring(data, parser)
    except etree.XMLSyntaxError as error:
        raise archive.damaged(f"{member}: {' '.join(error.msg.split())}") from error
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
