"""The line above the question box: what goes on, and what the next question would take; as HTML."""

from __future__ import annotations

from html import escape

from app.errors import describe
from app.places import parts_of
from app.service import PlanView
from app.ui.answer import Answer
from app.ui.attachment import Attachment
from app.words import duration, plural


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


def unknown() -> str:
    """Before the page has heard how things stand."""
    return strip("unknown", "")


def loading(stage: str, share: float) -> str:
    """The model is on its way; `share` from 0 to 1."""
    return strip("loading", "Loading the model", escape(stage), share or -1)


def anew(stage: str, share: float, asked: bool) -> str:
    """The model is opened anew with other settings; `share` from 0 to 1, `asked`: a question waits for it."""
    then = "; your question comes next" if asked else ""
    return strip("loading", "Opening the model anew", escape(stage) + then, share or -1)


def error(error: BaseException, what: str = "") -> str:
    """What went wrong, after `what` could not be done."""
    return strip("error", escape(what + describe(error)[0]))


def idle(asked: bool, unsaved: str = "") -> str:
    """Nothing waits to be read; `unsaved` is why the disk does not hold the chat, or what was lost of it."""
    if unsaved:
        return strip("error", f'<span class="oc-unsaved">{escape(unsaved)}</span>')
    return strip("idle", "Ask on, or add another document." if asked else "No document yet.")


def editing() -> str:
    """The next question takes the place of an earlier one."""
    cancel = '<button type="button" class="oc-quiet" data-do="unedit">Cancel edit</button>'
    return strip("edit", "Editing a question. What follows it stays, on a branch of its own.", action=cancel)


def waiting(attachment: Attachment) -> str:
    """A question came before its document was there."""
    return strip("wait", f"{escape(attachment.name)} is still being read. Ask again in a moment.")


def counting() -> str:
    """What the next question would take is not known yet: a long document's tokens take a while to be counted."""
    return strip("wait", "Counting tokens", share=-1)


def plan(view: PlanView, suggestion: tuple[Attachment, int, int] | None) -> str:
    """The plan before anything runs; `suggestion` is a page range that fits when the whole does not."""
    if not view.fits:
        action = ""
        if suggestion is not None:
            attachment, first, last = suggestion
            what = f"{parts_of(attachment.source.document)}s {first} to {last} of {escape(attachment.name)}"
            action = f'<button type="button" class="oc-quiet" data-do="suggest">Read {what}</button>'
        return strip("toolong", escape(view.message), action=action)
    seconds = view.seconds_estimate
    time = f"about {duration(seconds)} to read" if seconds is not None else ""
    if view.stored_tokens:
        time = time.removesuffix(" to read")
    unread = view.prompt_tokens - view.stored_tokens
    new = f"{plural(unread, 'token')} to read" if view.stored_tokens > 0 else ""
    kept = "the rest is read already" if view.stored_tokens else ""
    detail = ", ".join(filter(None, (new, time, kept)))
    if view.capacity is None:
        return strip("plan", escape(view.message), time)
    return strip("plan", f"Fits: {view.prompt_tokens:,} of {view.capacity:,} tokens", detail)


def running(answer: Answer) -> str:
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
