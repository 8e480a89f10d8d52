"""A place in a document that was looked at or quoted, as HTML; every text from outside is escaped here."""

from __future__ import annotations

from html import escape

from app.documents import Document, is_code
from app.evidence import Passage, Quote
from app.places import parts_of
from app.ui.frame import CROSS
from app.ui.parts import fresh

CODE = ' class="oc-code"'


def view(document: Document, place: Passage | Quote, turn_id: str, card: str, page: int | None = None) -> str:
    """A page of a document, that of a passage or quote unless another is asked for, with the place marked on it.

    `card` names the place among those of the turn, as the page's script has it.
    """
    own = document.place(place.begin(document) if isinstance(place, Passage) else place.start).page
    number = min(max(page or own, 1), len(document.pages))
    shown = document.pages[number - 1]
    low = high = place.end
    if isinstance(place, Passage) and place.key_end:
        begins = document.text.find(place.excerpt, place.start, place.end)
        low, high = begins + place.key_start, begins + place.key_end
    cuts = (place.start, low, high, place.end)
    start, low, high, end = (min(max(at, shown.start), shown.end) for at in cuts)
    spans = (shown.start, start), (start, low), (low, high), (high, end), (end, shown.end)
    before, left, middle, right, after = (escape(document.text[one:other]) for one, other in spans)
    middle = f"<b>{middle}</b>" if middle else ""
    marked = f'<mark tabindex="-1">{left}{middle}{right}</mark>' if start < end else ""
    title = place.name if number == own else document.place(shown.start).file
    if document.files and number != own:  # a heading stands in front of each file
        title = document.place(max(shown.start, shown.end - 1)).file
    return _dialog(
        title or document.name,
        f"{_turn('Page before', turn_id, card, number - 1, number > 1)}"
        f"<span>{parts_of(document).capitalize()} {number:,} of {len(document.pages):,}</span>"
        f"{_turn('Page after', turn_id, card, number + 1, number < len(document.pages))}",
        f"<pre{CODE if is_code(title or '') else ''}>{before}{marked}{after}</pre>",
    )


def gone(place: Passage | Quote) -> str:
    """What is left of a document that is no longer in the library: the passage or quote itself."""
    note = "<p>The document is no longer in the library; this is the passage as it was.</p>"
    words = place.excerpt if isinstance(place, Passage) else place.text
    code = is_code(place.name or "")
    page = "" if code else f"<span>Page {place.page or 1:,}</span>"
    return _dialog(place.name or "", page, f"{note}<pre{CODE if code else ''}>{escape(words)}</pre>")


def _turn(label: str, turn_id: str, card: str, page: int, there: bool) -> str:
    arrow = "M12 5l-5 5 5 5" if label == "Page before" else "M8 5l5 5-5 5"
    return (
        f'<button type="button" class="oc-tool" data-do="source" data-turn="{escape(turn_id)}"'
        f' data-value="{card}:{page}" aria-label="{label}"{"" if there else " disabled"}>'
        f'<svg viewBox="0 0 20 20" aria-hidden="true"><path d="{arrow}" fill="none" stroke="currentColor"'
        ' stroke-width="1.5" stroke-linejoin="round" stroke-linecap="round"/></svg></button>'
    )


def _dialog(title: str, pages: str, body: str) -> str:
    return (
        f'<div id="oc-source" popover="manual" role="dialog" data-fresh="{fresh()}"'
        f' aria-label="Source: {escape(title)}">'
        f'<div class="oc-source-top"><h2 title="{escape(title)}">{escape(title)}</h2>{pages}'
        '<button type="button" class="oc-tool" popovertarget="oc-source" popovertargetaction="hide" aria-label="Close">'
        f"{CROSS}</button></div>{body}</div>"
    )
