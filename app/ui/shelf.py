"""The documents that wait for the next question, as HTML; every text from outside is escaped here."""

from __future__ import annotations

from html import escape

from app.places import parts_of
from app.ui.attachment import Attachment
from app.ui.frame import CROSS
from app.words import plural


def cards(attachments: list[Attachment]) -> str:
    """The documents that wait for the next question, a card each."""
    if not attachments:
        return ""
    cards = "".join(_card(attachment, movable=at > 0) for at, attachment in enumerate(attachments))
    return f'<ul class="oc-shelf" aria-label="Documents for the next question">{cards}</ul>'


def _card(attachment: Attachment, movable: bool) -> str:
    name = escape(attachment.name)
    document = attachment.document
    if attachment.error:
        kind, facts = "oc-bad", f'<span role="alert">{escape(attachment.error)}</span>'
    elif document is None:
        kind, facts = "oc-busy", "<span>Reading the file</span>"
    else:
        kind = ""
        pages = len(document.pages)
        share = f", {attachment.counted:.0%}" if attachment.counted else ""
        tokens = f"counting tokens{share}" if attachment.tokens is None else plural(attachment.tokens, "token")
        files = f"<span>{plural(len(document.files), 'file')}</span>" if document.files else ""
        parts = parts_of(document)
        facts = f"{files}<span>{plural(pages, parts)}</span><span>{tokens}</span>"
        if pages > 1:
            facts += _page_choice(attachment, pages, parts)
        facts += "".join(f'<span class="oc-warn">{escape(warning)}</span>' for warning in document.warnings)
    remove = f'<button type="button" class="oc-remove" data-do="remove" aria-label="Remove {name}">{CROSS}</button>'
    earlier = (
        f'<button type="button" class="oc-remove oc-earlier" data-do="earlier" aria-label="Read {name} earlier"'
        ' title="Read earlier"><svg viewBox="0 0 20 20" aria-hidden="true"><path d="M10 16V4M5 9l5-5 5 5" fill="none"'
        ' stroke="currentColor" stroke-width="1.6" stroke-linecap="round" stroke-linejoin="round"/></svg></button>'
    )
    buttons = ("" if kind == "oc-busy" else remove) + (earlier if movable and document is not None else "")
    return (
        f'<li class="oc-card {kind}" data-id="{attachment.id}"><div class="oc-name" title="{name}">{name}</div>'
        f'<div class="oc-facts">{facts}</div>{buttons}</li>'
    )


def _page_choice(attachment: Attachment, pages: int, parts: str) -> str:
    def field(which: str, value: int) -> str:
        label = f"{'First' if which == 'first' else 'Last'} {parts} to read of {escape(attachment.name)}"
        return (
            f'<input type="number" inputmode="numeric" min="1" max="{pages}" value="{value}" data-page="{which}"'
            f' aria-label="{label}">'
        )

    first, last = field("first", attachment.first), field("last", attachment.last)
    return f'<span class="oc-pages">read {parts}s {first} to {last}</span>'
