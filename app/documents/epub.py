"""Electronic books (EPUB): the chapters in reading order, as the text that a reader shows."""

from __future__ import annotations

import posixpath
from dataclasses import replace
from urllib.parse import unquote, urlsplit

from lxml import etree

from app.documents import html
from app.documents.archive import Archive
from app.documents.document import Extract, Limits
from app.documents.markup import parse
from app.errors import BadDocument
from app.words import plural

_CONTAINER = "META-INF/container.xml"
_ENCRYPTION = "META-INF/encryption.xml"
# What only hides fonts; a book with these alone is not protected.
_FONT_METHODS = ("http://www.idpf.org/2008/embedding", "http://ns.adobe.com/pdf/enc#RC")
_NAMED = 5  # missing chapters that are told by name
_TEXT = ("application/xhtml+xml", "text/html", "application/x-dtbook+xml")


def read(archive: Archive, name: str, limits: Limits) -> Extract:
    """Pages of the chapters; the title comes first."""
    archive = replace(archive, kind="EPUB", advice="Get it anew, or convert it to PDF.")
    members = set(archive.names)
    if _ENCRYPTION in members and _protected(parse(archive, _ENCRYPTION)):
        raise BadDocument(f"{name} is a book protected by DRM, which only its seller's program opens.")
    packages = [item.get("full-path") for item in parse(archive, _CONTAINER).iter("{*}rootfile")]
    if not packages or packages[0] not in members:
        raise archive.damaged("it names no contents")
    package = parse(archive, packages[0])
    listed = _spine(package, posixpath.dirname(packages[0]))
    # Each file once: parts of one that the book lists apart are all in it.
    chapters = [chapter for chapter in dict.fromkeys(listed) if chapter in members]
    missing = _missing([chapter for chapter in listed if chapter not in members], len(listed))
    pages: list[str] = []
    chars = 0
    for chapter in chapters:
        limits.check_time(name)
        for page in _chapter(archive.read(chapter), name, limits):
            chars += len(page)
            limits.check_chars(name, chars)
            pages.append(page)
    title = package.findtext(".//{http://purl.org/dc/elements/1.1/}title")
    if title and title.strip() and pages:
        pages[0] = f"{' '.join(title.split())}\n\n{pages[0]}"
    if missing and not pages:
        raise archive.damaged(missing)
    return Extract("epub", pages, (f"{missing}. No answer knows them.",) if missing else ())


def _missing(chapters: list[str], of: int) -> str:
    """How many chapters are missing, the first of them by name; "" for none."""
    if not chapters:
        return ""
    more = f" and {len(chapters) - _NAMED:,} more" if len(chapters) > _NAMED else ""
    return f"{plural(len(chapters), 'chapter')} of {of:,} missing in the book: {', '.join(chapters[:_NAMED])}{more}"


def _chapter(data: bytes, name: str, limits: Limits) -> list[str]:
    try:
        return html.read(data, name, limits, title=False).pages
    except BadDocument:  # an empty one, such as a cover
        return []


def _protected(encryption: etree._Element) -> bool:
    methods = [method.get("Algorithm") for method in encryption.iter("{*}EncryptionMethod")]
    return any(method not in _FONT_METHODS for method in methods)


def _spine(package: etree._Element, folder: str) -> list[str]:
    """Members of the archive in reading order; some may be missing in it."""
    items = {item.get("id"): item for item in package.iter("{*}item")}
    found = []
    for reference in package.iter("{*}itemref"):
        item = items.get(reference.get("idref"))
        if item is None:  # named by its id: the book tells no more of it
            found.append(reference.get("idref") or "a chapter without a name")
        elif item.get("media-type") in _TEXT:
            found.append(posixpath.normpath(posixpath.join(folder, _path(item.get("href") or ""))))
    return found


def _path(href: str) -> str:
    try:
        return unquote(urlsplit(href).path)
    except ValueError:  # a link that leads nowhere
        return ""
