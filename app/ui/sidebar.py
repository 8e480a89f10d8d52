"""The panel beside the conversation: chats and the library, as HTML; every text from outside is escaped here."""

from __future__ import annotations

import time
from collections.abc import Callable, Set
from html import escape

from app.library import Shelved
from app.library.chats import Listed
from app.ui.frame import CROSS
from app.words import duration, plural, size

FRAME = f"""
<div class="oc-side-top">
  <button type="button" class="oc-quiet" data-do="fresh">New chat</button>
  <button type="button" class="oc-quiet oc-icon oc-side-close" data-do="side" aria-label="Close the panel">
    {CROSS}
  </button>
</div>
<input type="search" class="oc-search" data-search placeholder="Search chats" aria-label="Search chats"
  autocomplete="off">
"""

_PIN = (
    '<svg viewBox="0 0 20 20" aria-hidden="true"><path d="M7 3h6l-.7 5 2.7 3H5l2.7-3zM10 11v6" fill="none"'
    ' stroke="currentColor" stroke-width="1.5" stroke-linejoin="round" stroke-linecap="round"/></svg>'
)


def chats(entries: list[Listed], current: str, running: set[str], words: str, state: int = 0) -> str:
    """The list of chats; the one that is shown is marked, those that answer just now too.

    With another `state` it is drawn anew though nothing else differs: a title that the disk did not take goes.
    """
    if not entries:
        text = "No chat has these words." if words.strip() else "Your chats are kept here."
        return f'<h2>Chats</h2><p class="oc-none">{text}</p>'
    items = "".join(_chat(entry, entry.id == current, entry.id in running) for entry in entries)
    return f'<h2>Chats</h2><ul class="oc-list" data-drawn="{state}">{items}</ul>'


def _chat(entry: Listed, current: bool, running: bool) -> str:
    title = escape(entry.title)
    about = escape(", ".join(filter(None, (_ago(entry.updated), entry.about))))
    mark = ' aria-current="true"' if current else ""
    busy = '<i class="oc-live" role="img" aria-label="Answering"></i>' if running else ""
    return (
        f'<li data-id="{entry.id}" class="oc-item"><button type="button" class="oc-open" data-do="open"{mark}'
        f' title="{title}"><span>{busy}{title}</span><small>{about}</small></button>'
        f'<details class="oc-more"><summary aria-label="More about {title}">\u22ef</summary><div>'
        '<button type="button" data-do="rename">Rename</button>'
        '<button type="button" data-do="export" data-kind="md">Save as Markdown</button>'
        '<button type="button" data-do="export" data-kind="json">Save as JSON</button>'
        '<button type="button" data-do="delete">Delete</button></div></details></li>'
    )


def library(
    entries: list[Shelved],
    at_once: Set[str],
    bytes_of: Callable[[str], int],
    seconds_of: Callable[[int], float | None],
    held: int,
    quota: int,
    note: str = "",
) -> str:
    """The list of documents that were read, and the disk that they take; `note` is what went wrong there last.

    `at_once` has labels of those that a chat which begins with them need not read again; `bytes_of` tells what of one
    is on disk, behind whatever and at whatever settings; `seconds_of` how long so many tokens take to be read.
    """
    told = f'<p class="oc-none" role="status">{escape(note)}</p>' if note else ""
    if not entries:
        none = (
            "A document that a chat began with opens at once when another one begins with it."
            if quota
            else "Documents that were asked about are listed here."
        )
        return f'<h2>Library</h2><p class="oc-none">{none}</p>{told}'
    items = "".join(_document(entry, entry.label in at_once, bytes_of(entry.label), seconds_of) for entry in entries)
    disk = ""
    if quota:
        share = min(100.0, 100 * held / quota)
        disk = (
            f'<div class="oc-disk"><span>{size(held)} of {size(quota)} on disk, of all browsers</span>'
            f'<div class="oc-meter"><i style="width:{share:.1f}%"></i></div></div>'
        )
    return f'<h2>Library</h2><ul class="oc-list">{items}</ul>{disk}{told}'


def _document(entry: Shelved, ready: bool, held: int, seconds_of: Callable[[int], float | None]) -> str:
    name = escape(entry.name)
    why = ""
    facts = [plural(entry.tokens, "token") if entry.tokens else plural(entry.pages, "page")]
    if ready:
        facts.append(f"ready ({size(held)})" if held else "ready")
    elif entry.tokens and (seconds := seconds_of(entry.tokens)) is not None:
        facts.append(f"read anew in {duration(seconds)}")
    if held and not ready:
        facts.append(f"{size(held)} on disk")
        why = ". What is on disk was read behind something else, or at other settings"
    pinned = "true" if entry.pinned else "false"
    pin = "Let go of" if entry.pinned else "Keep"
    told = f"<span>{name}</span><small>{', '.join(facts)}</small>"
    return (
        f'<li data-id="{entry.label}" class="oc-item oc-doc"><button type="button" class="oc-open" data-do="use"'
        f' title="Add {name} to the next question; used {_ago(entry.used)}{why}">{told}</button>'
        f'<button type="button" class="oc-mini" data-do="pin" data-pinned="{pinned}" aria-pressed="{pinned}"'
        f' aria-label="{pin} {name} whatever the disk\'s quota" title="{pin} whatever the quota">{_PIN}</button>'
        f'<button type="button" class="oc-mini" data-do="forget" data-pinned="{pinned}"'
        f' aria-label="Remove {name} from the library" title="Remove">'
        f"{CROSS}</button></li>"
    )


def _ago(at: float) -> str:
    seconds = max(0.0, time.time() - at)
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            number = int(seconds // length)
            return f"{number} {unit}{'' if number == 1 else 's'} ago"
    return "just now"
