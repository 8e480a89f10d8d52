"""HTML: the text that a browser would show, with a line for each block."""

from __future__ import annotations

import re
from typing import Any

from lxml import etree

from app.documents.document import Extract, Limits, Meter, paginate
from app.documents.text import decode, warnings_of
from app.errors import BadDocument

_HIDDEN = frozenset("script style template noscript head svg math iframe object select".split())
_BLOCK = frozenset(
    "address article aside blockquote body br caption dd details div dl dt fieldset figcaption figure footer form"
    " h1 h2 h3 h4 h5 h6 header hr html li main nav ol p pre section summary table tr ul".split()
)
_CHARSET = re.compile(rb"""<meta[^>]{0,200}charset\s*=\s*["']?\s*([\w.:-]{1,40})""", re.IGNORECASE)
_OPENING = re.compile(
    rb"\A\s*(?:<!--.{0,2000}?-->\s*|<\?xml[^>]*>\s*)*<(?:!doctype\s+html|html|head)\b", re.IGNORECASE | re.DOTALL
)


def looks_like_html(data: bytes) -> bool:
    """Whether a file opens as an HTML page does."""
    return _OPENING.match(data[:4096].removeprefix(b"\xef\xbb\xbf")) is not None


def read(data: bytes, name: str, limits: Limits, title: bool = True) -> Extract:
    """The page's title, if wanted, and visible text; headings, list items and table rows on lines of their own."""
    declared = _CHARSET.search(data[:4096])
    decoded = decode(data, name, declared.group(1).decode("ascii") if declared else None)
    limits.check_chars(name, len(decoded.text))
    page = _Page(Meter(limits, name))
    # Without a tree: libxml2 builds none deeper than 2,048 elements, and drops the rest of such a page.
    parser = etree.HTMLParser(target=page, encoding="utf-8", no_network=True, huge_tree=True)
    # NUL would end libxml2's reading.
    etree.fromstring(decoded.text.replace("\x00", "").encode("utf-8"), parser)
    if page.empty:
        raise BadDocument(f"{name} is an HTML file without any content.")
    body = _squeeze("".join(page.parts))
    named = " ".join(page.title.split()) if title else ""
    text = f"{named}\n\n{body}" if named else body
    return Extract("html", list(paginate(text)), warnings_of(decoded))


class _Page:
    """A parser's target: what is seen of a page, in `parts`, and its first title."""

    def __init__(self, meter: Meter) -> None:
        self.parts: list[str] = []
        self.title = ""
        self.empty = True
        self._meter = meter
        self._hidden = self._pre = 0
        self._tag = ""  # the last one that began; "" behind its end
        self._titled = False
        self._run: list[str] = []  # of one text, which comes in pieces

    def start(self, tag: str, _: Any) -> None:
        self._end_run()
        self.empty = False
        self._hidden += tag in _HIDDEN
        self._pre += tag == "pre"
        self._tag = tag
        if not self._hidden:
            self.parts.append(_before(tag))

    def end(self, tag: str) -> None:
        self._end_run()
        self._titled |= tag == "title"
        self._hidden -= tag in _HIDDEN
        self._pre -= tag == "pre"
        self._tag = ""
        if not self._hidden and tag in _BLOCK and tag != "br":
            self.parts.append("\n")

    def data(self, text: str) -> None:
        self._run.append(text)

    def close(self) -> None:
        self._end_run()

    def _end_run(self) -> None:
        text = "".join(self._run)
        self._run.clear()
        if self._tag == "title" and not self._titled:
            self.title += text
        if text and not self._hidden:
            self.parts.append(self._meter(text if self._pre else re.sub(r"\s+", " ", text)))


def _before(tag: str) -> str:
    if tag in ("h1", "h2", "h3", "h4", "h5", "h6"):
        return "\n\n" + "#" * int(tag[1]) + " "
    if tag == "li":
        return "\n- "
    if tag in ("p", "pre", "table"):
        return "\n\n"
    if tag in ("td", "th"):
        return "\t"
    return "\n" if tag in _BLOCK else ""


def _squeeze(text: str) -> str:
    """Drop the lone spaces and tabs that markup leaves at both ends of lines, and runs of empty lines."""
    lines = (line.rstrip() for line in text.split("\n"))
    kept = "\n".join(line[1:] if line[:1] in (" ", "\t") and not line[1:2].isspace() else line for line in lines)
    return re.sub(r"\n{3,}", "\n\n", kept).strip("\n") + "\n"
