"""What the page shows, as HTML and chat messages; every text from outside is escaped here."""

from __future__ import annotations

import json
from functools import lru_cache
from html import escape
from typing import Any

from app.chat import Selection, Turn
from app.errors import describe
from app.evidence import Passage
from app.service import MemoryBegins, PlanView
from app.ui.answer import Answer
from app.ui.attachment import Attachment
from app.ui.conversation import Conversation
from app.ui.markdown import Pieces, plain

_LEAD_CHARS = 60  # of a passage that its card shows before the words that matter

WELCOME = """
<div class="oc-welcome">
  <h1>Ask a long document.</h1>
  <p class="oc-lead">Add one or more files, ask a question, and read the answer as it is written.
    Nothing leaves this machine.</p>
  <button type="button" class="oc-primary" data-do="add">Add documents</button>
  <p class="oc-kinds">PDF, Word, OpenDocument, RTF, EPUB, HTML, Markdown, text, notebooks, source code; folders, zip and
    tar archives of them. Drop them anywhere, or paste a long text.</p>
  <ul class="oc-examples" aria-label="Example questions">
    <li><button type="button" data-example>Summarise this document in five sentences.</button></li>
    <li><button type="button" data-example>Which people, places and dates does it name?</button></li>
    <li><button type="button" data-example>What does it decide, and on what grounds?</button></li>
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
<nav aria-label="Page" data-max-bytes="MAX_BYTES">
  <button type="button" class="oc-quiet" data-do="fresh">New chat</button>
  <button type="button" class="oc-quiet oc-icon" data-do="theme" aria-label="Switch between light and dark">
    <svg viewBox="0 0 20 20" aria-hidden="true"><circle cx="10" cy="10" r="7" fill="none" stroke="currentColor"
      stroke-width="1.5"/><path d="M10 3a7 7 0 0 1 0 14z" fill="currentColor"/></svg>
  </button>
</nav>
"""

ADD = """
<button type="button" class="oc-quiet oc-icon" data-do="add" aria-label="Add documents" title="Add documents">
  <svg viewBox="0 0 20 20" aria-hidden="true"><path d="M10 4v12M4 10h12" stroke="currentColor" stroke-width="1.6"
    stroke-linecap="round"/></svg>
</button>
"""


def header(max_bytes: int) -> str:
    """Name and buttons of the page; its script reads the size limit of one file there."""
    return _HEADER.replace("MAX_BYTES", str(max_bytes))


def duration(seconds: float) -> str:
    """Such as "4 s", "3 min" or "1 h 05 min"."""
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def size(amount: float) -> str:
    """Bytes in the unit that fits."""
    for unit in ("B", "kB", "MB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}"
        amount /= 1000
    return f"{amount:.1f} GB"


def plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def shelf(attachments: list[Attachment]) -> str:
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
        tokens = "counting tokens" if attachment.tokens is None else plural(attachment.tokens, "token")
        facts = f"<span>{plural(pages, 'page')}</span><span>{tokens}</span>"
        if pages > 1:
            facts += _page_choice(attachment, pages)
        facts += "".join(f'<span class="oc-warn">{escape(warning)}</span>' for warning in document.warnings)
    remove = (
        f'<button type="button" class="oc-remove" data-do="remove" aria-label="Remove {name}">'
        '<svg viewBox="0 0 20 20" aria-hidden="true"><path d="M5 5l10 10M15 5L5 15" stroke="currentColor"'
        ' stroke-width="1.6" stroke-linecap="round"/></svg></button>'
    )
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


def _page_choice(attachment: Attachment, pages: int) -> str:
    def field(which: str, value: int) -> str:
        label = f"{'First' if which == 'first' else 'Last'} page to read of {escape(attachment.name)}"
        return (
            f'<input type="number" inputmode="numeric" min="1" max="{pages}" value="{value}" data-page="{which}"'
            f' aria-label="{label}">'
        )

    first, last = field("first", attachment.first), field("last", attachment.last)
    return f'<span class="oc-pages">read pages {first} to {last}</span>'


def strip(kind: str, text: str, detail: str = "", share: float | None = None, action: str = "") -> str:
    """The one line above the question box: always there, so that nothing jumps.

    `share` from 0 to 1 draws a bar, below 0 one without an end; `text`, `detail` and `action` are HTML.
    """
    bar = ""
    if share is not None:
        known = share >= 0
        value = f' aria-valuenow="{share * 100:.0f}"' if known else ""
        width = f"{share * 100:.1f}%" if known else "30%"
        bar = (
            '<div class="oc-bar" role="progressbar" aria-label="Progress"'
            f' aria-valuemin="0" aria-valuemax="100"{value}>'
            f'<i class="{"" if known else "oc-endless"}" style="width:{width}"></i></div>'
        )
    role = ' role="alert"' if kind == "error" else ""
    content = f"<p{role}>{text}</p><span>{detail}</span>{action}{bar}"
    return f'<div class="oc-strip oc-{kind}" data-state="{kind}">{content}</div>'


def loading_strip(stage: str, share: float) -> str:
    """The model is on its way; `share` from 0 to 1."""
    return strip("loading", "Loading the model", escape(stage), share or -1)


def error_strip(error: BaseException, what: str = "") -> str:
    """What went wrong, after `what` could not be done."""
    return strip("error", escape(what + describe(error)[0]))


def idle_strip(asked: bool) -> str:
    """Nothing waits to be read."""
    return strip("idle", "Ask on, or add another document." if asked else "No document yet.")


def edit_strip() -> str:
    """The next question takes the place of an earlier one."""
    cancel = '<button type="button" class="oc-quiet" data-do="unedit">Keep the old one</button>'
    return strip("edit", "Editing a question. What follows it stays, on a branch of its own.", action=cancel)


def wait_strip(attachment: Attachment) -> str:
    """A question came before its document was there."""
    return strip("wait", f"{escape(attachment.name)} is still being read. Ask again in a moment.")


def plan_strip(plan: PlanView, suggestion: tuple[int, int] | None) -> str:
    """The plan before anything runs; `suggestion` is a page range that fits when the whole does not."""
    if not plan.fits:
        action = ""
        if suggestion is not None:
            first, last = suggestion
            action = f'<button type="button" class="oc-quiet" data-do="suggest">Read pages {first} to {last}</button>'
        return strip("toolong", escape(plan.message), action=action)
    seconds = plan.seconds_estimate
    time = f"about {duration(seconds)} to read" if seconds is not None else ""
    if plan.stored_tokens:
        time = time.removesuffix(" to read")
    unread = plan.prompt_tokens - plan.stored_tokens
    new = f"{plural(unread, 'token')} to read" if plan.stored_tokens > 0 else ""
    kept = "the rest is read already" if plan.stored_tokens else ""
    detail = ", ".join(filter(None, (new, time, kept)))
    if plan.capacity is None:
        return strip("plan", f"To read: {plural(plan.prompt_tokens, 'token')}", time)
    return strip("plan", f"Fits: {plan.prompt_tokens:,} of {plan.capacity:,} tokens", detail)


def running_strip(answer: Answer) -> str:
    """Where an answer in progress stands."""
    if answer.stopping:
        return strip("stopping", "Stopping", share=-1)
    if answer.phase == "loading":
        return strip("loading", "Loading the model", "Your question comes next", -1)
    if answer.phase == "queued":
        ahead = "next in line" if answer.place <= 1 else f"number {answer.place} in line"
        return strip("queued", f"Waiting, {ahead}", share=-1)
    if answer.phase == "opening" and (opening := answer.opening) is not None:
        text = f"Opening what was read: {opening.done:,} of {opening.total:,} tokens"
        return strip("opening", text, "from the library", opening.done / opening.total)
    if answer.phase == "reading" and (progress := answer.progress) is not None:
        if progress.done >= progress.total:
            return strip("answering", "Answering", share=1)
        rate = f"{progress.tokens_per_s:,.0f} tokens/s" if progress.tokens_per_s else ""
        left = f"{duration(answer.seconds_left)} left" if answer.seconds_left else ""
        text = f"Reading {f'{progress.done:,} of ' if progress.done else ''}{progress.total:,} tokens"
        return strip("reading", text, ", ".join(filter(None, (rate, left))), answer.share_read)
    if answer.phase == "answering":
        pace = f", {answer.ms_per_token:.0f} ms per token" if answer.tokens > 1 else ""
        return strip("answering", "Answering", f"{plural(answer.tokens, 'token')}{pace}")
    return strip("starting", "Preparing", share=-1)


def status(facts: dict[str, Any] | None, settings: str = "") -> str:
    """The quiet line at the foot, and behind its button all that the engine tells; None while there is no model.

    `settings` names how the chat's answers are written.
    """
    if facts is None:
        return '<div class="oc-foot"></div>'
    memory = facts["memory"]
    held = memory["weights_bytes"] + memory["retrieval_kv_bytes"] + memory["streaming_kv_bytes"]
    line = [_context(facts)]
    if held:  # another server's memory is not known
        line.append(f"{size(held)} of memory")
    if facts["ms_per_token"]:
        line.append(f"{facts['ms_per_token']:.{0 if facts['ms_per_token'] >= 10 else 1}f} ms per token")
    shown = "".join(f"<span>{escape(item)}</span>" for item in line)
    note = escape(facts["note"])
    shown += f'<span class="oc-notes" title="{note}">{note}</span>' if note else ""
    return (
        f'<div class="oc-foot">{shown}'
        f'<button type="button" class="oc-link" data-do="options">Settings: {escape(settings)}</button>'
        '<button type="button" class="oc-link" popovertarget="oc-engine">Details</button></div>'
        f'<div id="oc-engine" popover role="dialog" aria-label="What the engine does">{_engine_table(facts)}</div>'
    )


def _context(facts: dict[str, Any]) -> str:
    """How much of the context is used; of an endless one, how much is remembered."""
    used, capacity = facts["context_used"], facts["context_capacity"]
    if capacity is not None:
        return f"{used:,} of {capacity:,} tokens used"
    begins, settings = facts["memory_begins"], facts["settings"]
    if "recent" not in settings:
        return f"{used:,} tokens used, of how many is not known"
    if not begins:
        return f"{used:,} tokens, endless: the last {settings['recent']:,} are remembered"
    return f"{used:,} tokens, endless: {begins['forgotten']:,} forgotten"


def _engine_table(facts: dict[str, Any]) -> str:
    memory, settings = facts["memory"], dict(facts["settings"])
    kernels = settings.pop("backends", {})
    rows = {
        "Model": facts["model"],
        "Note": facts["note"],
        "Heads": facts["pattern"],
        "Context": _context(facts),
        **(_memory_rows(memory, settings) if memory["weights_bytes"] else {}),
        "Reading": f"{facts['prefill_tokens_per_s']:,.0f} tokens/s" if facts["prefill_tokens_per_s"] else "",
        "Writing": f"{facts['ms_per_token']:.1f} ms per token",
        **{_name(key): str(value) for key, value in settings.items()},
        **{f"Kernel: {_name(key).lower()}": str(value) for key, value in kernels.items()},
    }
    body = "".join(
        f"<tr><th scope=row>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows.items() if value
    )
    return f"<h2>What the engine does</h2><table>{body}</table>"


def _memory_rows(memory: dict[str, int], settings: dict[str, Any]) -> dict[str, str]:
    return {
        "Weights": f"{size(memory['weights_bytes'])} ({settings.pop('weights', '')})",
        "Cache of retrieval heads": f"{size(memory['retrieval_kv_bytes'])} ({settings.pop('kv', '')})",
        "Cache of streaming heads": size(memory["streaming_kv_bytes"]),
        "Peak memory": size(memory["peak_bytes"]),
    }


def _name(key: str) -> str:
    return key.replace("_", " ").capitalize()


def messages(conversation: Conversation, first: int) -> list[Any]:
    """The turns from number `first` on for the chat component: questions as typed, answers as Markdown in pieces."""
    shown: list[Any] = []
    begins, number = conversation.memory_begins, 0
    for at, turn in enumerate(conversation.chat.path(conversation.chat.head)):
        live = conversation.live(turn)
        takes_part = turn.answered or live is not None
        here = begins is not None and number == begins.turn and takes_part
        number += takes_part
        if at < first:
            continue
        question, text = _files(turn) + plain(turn.question), _answer_text(turn, live)
        if here and begins is not None:
            if begins.in_answer:
                text[0] = _memory_line(begins, "this answer") + text[0]
            else:
                question = _memory_line(begins, "what was read here") + question
        shown += [_message("user", [question]), _message("assistant", text)]
    return shown


def turns(conversation: Conversation, first: int) -> str:
    """What the page's script needs for the buttons at questions and answers from number `first` on, in their order."""
    chat, facts = conversation.chat, []
    for turn in chat.path(chat.head)[first:]:
        ids = [other.id for other in chat.siblings(turn.id)]
        at = ids.index(turn.id)
        facts.append(
            {
                "id": turn.id,
                "at": at + 1,
                "of": len(ids),
                "before": ids[at - 1] if at else "",
                "after": ids[at + 1] if at + 1 < len(ids) else "",
                "live": conversation.live(turn) is not None,
                "passages": [_card_facts(passage) for passage in turn.passages],
                "quotes": [{"text": q.text, "name": q.name, "page": q.page, "line": q.line} for q in turn.quotes],
                "resume": turn.answered and turn.finish_reason in ("cancelled", "length", "loop"),
            }
        )
    return f'<div data-turns="{escape(json.dumps(facts))}" data-first="{first}" data-chat="{chat.id}"></div>'


def _card_facts(passage: Passage) -> dict[str, Any]:
    """A passage for its card: the words that were looked at most, with a few before them, and what follows."""
    text, low = passage.excerpt, passage.key_start
    high = passage.key_end or len(text)
    before = text[:low]
    if len(before) > _LEAD_CHARS:
        before = "\u2026 " + before[-_LEAD_CHARS:].split(" ", 1)[-1]
    said = {"before": before, "key": text[low:high], "after": text[high:]}
    return {"name": passage.name, "page": passage.page, "line": passage.line, "strength": passage.strength, **said}


def _memory_line(begins: MemoryBegins, where: str) -> str:
    """The line where an endless chat's memory begins."""
    words = f", at \u201c{escape(begins.words)}\u201d" if begins.words else ""
    kept = f" All before it is forgotten, but for the first {plural(begins.sink, 'token')}." if begins.sink else ""
    kept = kept or " All before it is forgotten."
    return f'<div class="oc-memory" role="note">Memory begins in {where}{words}.{kept}</div>\n\n'


def _message(role: str, pieces: list[str]) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": piece} for piece in pieces]}


def _files(turn: Turn) -> str:
    if not turn.sources:
        return ""
    chips = "".join(f'<span class="oc-file">{escape(_label(source))}</span>' for source in turn.sources)
    return f'<div class="oc-files">{chips}</div>\n\n'


def _label(source: Selection) -> str:
    whole = (source.first_page, source.last_page) == (1, len(source.document.pages))
    name = source.document.name
    return name if whole else f"{name}, pages {source.first_page}-{source.last_page}"


def _answer_text(turn: Turn, live: Answer | None) -> list[str]:
    if live is not None:
        waiting = '<span class="oc-dots" role="img" aria-label="Working"><i></i><i></i><i></i></span>'
        return live.pieces.of(live.text) if live.text else [waiting]
    note, pieces = _note(turn), list(_settled(turn.answer))
    if note is not None:
        fence = "\n```" if pieces[-1].count("```") % 2 else ""  # else the note becomes part of the code
        pieces[-1] += f'{fence}\n\n<div class="{note[0]}">{escape(note[1])}</div>'
    return pieces


@lru_cache(maxsize=1024)
def _settled(answer: str) -> tuple[str, ...]:
    """Answers that are whole: a long chat is drawn ten times a second while its newest answer is written."""
    return tuple(Pieces().of(answer))


def _note(turn: Turn) -> tuple[str, str] | None:
    """(class, text) of what is to be said below an answer that did not end by itself."""
    if turn.error:
        return "oc-failed", turn.error
    return {
        "cancelled": ("oc-note", "Stopped."),
        "length": ("oc-note", "Cut here: the answer reached the limit of tokens."),
        "loop": ("oc-note", "Stopped here: the answer began to repeat itself."),
        "interrupted": ("oc-note", "Interrupted: the program ended here. What was read is kept; try again to go on."),
        "failed": ("oc-failed", "No answer."),
    }.get(turn.finish_reason)
