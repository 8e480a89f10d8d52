"""The place in a document that an answer rests on, as HTML; every text from outside is escaped here."""

from __future__ import annotations

from html import escape

from app.documents import Document
from app.evidence import Passage


def view(document: Document, passage: Passage, turn_id: str, index: int, page: int | None = None) -> str:
    """A page of a document, that of the passage unless another is asked for, with the passage marked on it."""
    number = min(max(page or passage.page, 1), len(document.pages))
    shown = document.pages[number - 1]
    start, end = (min(max(at, shown.start), shown.end) for at in (passage.start, passage.end))
    before, marked, after = (
        escape(document.text[low:high]) for low, high in ((shown.start, start), (start, end), (end, shown.end))
    )
    middle = f'<mark tabindex="-1">{marked}</mark>' if marked else ""
    return _dialog(
        f"{passage.name}" if number == passage.page else document.name,
        f"{_turn('Page before', turn_id, index, number - 1, number > 1)}"
        f"<span>Page {number:,} of {len(document.pages):,}</span>"
        f"{_turn('Page after', turn_id, index, number + 1, number < len(document.pages))}",
        f"<pre>{before}{middle}{after}</pre>",
    )


def gone(passage: Passage) -> str:
    """What is left of a document that is no longer in the library: the passage itself."""
    note = "<p>The document is no longer in the library; this is the passage as it was.</p>"
    return _dialog(passage.name, f"<span>Page {passage.page:,}</span>", f"{note}<pre>{escape(passage.excerpt)}</pre>")


def _turn(label: str, turn_id: str, index: int, page: int, there: bool) -> str:
    arrow = "M12 5l-5 5 5 5" if label == "Page before" else "M8 5l5 5-5 5"
    return (
        f'<button type="button" class="oc-tool" data-do="source" data-turn="{escape(turn_id)}"'
        f' data-value="{index}:{page}" aria-label="{label}"{"" if there else " disabled"}>'
        f'<svg viewBox="0 0 20 20" aria-hidden="true"><path d="{arrow}" fill="none" stroke="currentColor"'
        ' stroke-width="1.5" stroke-linejoin="round" stroke-linecap="round"/></svg></button>'
    )


def _dialog(title: str, pages: str, body: str) -> str:
    return (
        f'<div id="oc-source" popover role="dialog" aria-label="Source: {escape(title)}" data-fresh>'
        f'<div class="oc-source-top"><h2 title="{escape(title)}">{escape(title)}</h2>{pages}'
        '<button type="button" class="oc-tool" popovertarget="oc-source" popovertargetaction="hide" aria-label="Close">'
        '<svg viewBox="0 0 20 20" aria-hidden="true"><path d="M5 5l10 10M15 5L5 15" stroke="currentColor"'
        f' stroke-width="1.6" stroke-linecap="round"/></svg></button></div>{body}</div>'
    )
