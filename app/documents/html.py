"""HTML: the text that a browser would show, with a line for each block."""

from __future__ import annotations

import re

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
    parser = etree.HTMLParser(encoding="utf-8", no_network=True, remove_comments=True, remove_pis=True, huge_tree=True)
    # NUL would end libxml2's reading.
    root = etree.fromstring(decoded.text.replace("\x00", "").encode("utf-8"), parser)
    if root is None:
        raise BadDocument(f"{name} is an HTML file without any content.")
    named = root.findtext(".//title") if title else None
    body = _squeeze("".join(_visible(root, Meter(limits, name))))
    text = f"{' '.join(named.split())}\n\n{body}" if named and named.strip() else body
    return Extract("html", list(paginate(text)), warnings_of(decoded))


def _visible(root: etree._Element, meter: Meter) -> list[str]:
    parts: list[str] = []
    hidden = pre = 0
    for event, element in etree.iterwalk(root, events=("start", "end")):
        tag = element.tag
        if event == "start":
            hidden += tag in _HIDDEN
            pre += tag == "pre"
            if not hidden:
                parts.append(_before(tag))
                if element.text:
                    parts.append(meter(element.text) if pre else meter(re.sub(r"\s+", " ", element.text)))
            continue
        hidden -= tag in _HIDDEN
        pre -= tag == "pre"
        if not hidden:
            if tag in _BLOCK and tag != "br":
                parts.append("\n")
            if element.tail:
                parts.append(meter(element.tail) if pre else meter(re.sub(r"\s+", " ", element.tail)))
    return parts


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
