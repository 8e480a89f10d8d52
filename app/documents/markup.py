"""XML inside of archives, as Word, OpenDocument and EPUB files have it."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator

from lxml import etree


def parse(archive: zipfile.ZipFile, member: str) -> etree._Element:
    """The root of a member; nothing else is loaded. Raises KeyError, XMLSyntaxError and zipfile's errors."""
    return etree.fromstring(archive.read(member), etree.XMLParser(resolve_entities=False, no_network=True))


def outermost(parent: etree._Element, *tags: str) -> Iterator[etree._Element]:
    """Elements of these kinds below `parent`, but none within another: who reads one reads what is in it."""
    for child in parent:
        if child.tag in tags:
            yield child
        else:
            yield from outermost(child, *tags)
