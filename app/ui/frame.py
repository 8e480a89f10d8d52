"""What stands around the conversation: the header, and the page before the first question."""

from __future__ import annotations

from html import escape

_WELCOME = """
<div class="oc-welcome">
  <h1>Ask a long document.</h1>
  <p class="oc-lead">Add one or more files, ask a question, and read the answer as it is written.
    PRIVATE</p>
NOTE
  <button type="button" class="oc-primary" data-do="add">Add documents</button>
  <p class="oc-kinds">PDF, Word, OpenDocument, RTF, EPUB, HTML, Markdown, text, CSV, JSON, notebooks, source code;
    folders, zip and tar archives of them. Drop them anywhere, or paste a long text.</p>
  <ul class="oc-examples" aria-label="Example questions">
    <li><button type="button" data-example>Summarise the main points in five sentences.</button></li>
    <li><button type="button" data-example>Which people, places and dates are named?</button></li>
    <li><button type="button" data-example>What is decided, and on what grounds?</button></li>
  </ul>
</div>
"""

_HEADER = """
<div class="oc-left">
  <button type="button" class="oc-quiet oc-icon" data-do="side" aria-label="Chats and library" aria-controls="oc-side">
    <svg viewBox="0 0 20 20" aria-hidden="true"><path d="M3.5 5.5h13M3.5 10h13M3.5 14.5h8" stroke="currentColor"
      stroke-width="1.6" stroke-linecap="round"/></svg>
  </button>
  <div class="oc-brand">Octavo</div>
</div>
<nav aria-label="Page" data-max-bytes="MAX_BYTES" data-quiet-s="QUIET_S">
  <button type="button" class="oc-quiet" data-do="fresh">New chat</button>
  <button type="button" class="oc-quiet oc-icon" data-do="theme" aria-label="Switch between light and dark">
    <svg viewBox="0 0 20 20" aria-hidden="true"><circle cx="10" cy="10" r="7" fill="none" stroke="currentColor"
      stroke-width="1.5"/><path d="M10 3a7 7 0 0 1 0 14z" fill="currentColor"/></svg>
  </button>
</nav>
"""

CROSS = (
    '<svg viewBox="0 0 20 20" aria-hidden="true"><path d="M5 5l10 10M15 5L5 15" stroke="currentColor"'
    ' stroke-width="1.6" stroke-linecap="round"/></svg>'
)

ADD = """
<button type="button" class="oc-quiet oc-icon" data-do="add" aria-label="Add documents" title="Add documents">
  <svg viewBox="0 0 20 20" aria-hidden="true"><path d="M10 4v12M4 10h12" stroke="currentColor" stroke-width="1.6"
    stroke-linecap="round"/></svg>
</button>
"""


def header(max_bytes: int, quiet_s: float) -> str:
    """Name and buttons of the page; its script reads there how large a file may be, and how long silence may last."""
    return _HEADER.replace("MAX_BYTES", str(max_bytes)).replace("QUIET_S", f"{quiet_s:g}")


def welcome(note: str = "", own: bool = True) -> str:
    """The page before the first question; `note` is what people should know of the model that answers.

    `own`: the model runs here, so that nothing is sent elsewhere.
    """
    private = "Nothing leaves this machine." if own else ""
    told = f'  <p class="oc-model" role="note">{escape(note)}</p>' if note else ""
    return _WELCOME.replace("PRIVATE", private).replace("NOTE\n", told + "\n" if told else "")
