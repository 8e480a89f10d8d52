"""The part of the page that plants facts in a document and shows where the model sees them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from html import escape
from typing import Any

import gradio as gr

from app.engine.types import Opening, Progress, Queued
from app.errors import UsageError, describe
from app.evaluation.examiner import Stopped
from app.evaluation.selftest import Seen, SelfTest
from app.service import ChatService, Selection
from app.ui.session import Loading, Session
from app.words import duration

_POLL_S = 0.2
_FACTS = 8
_NONE = "Add a document first."
_WHAT = (
    "<p><b>Does the model find what stands anywhere in a document?</b> One made-up pass code at a time is hidden in it,"
    " from the beginning to the end, and asked for. That shows how far the model sees, not how well it understands."
    " Each is a question of its own, so that others can ask in between.</p>"
)


class _Run:
    """A self-test that is made ready, then under way in a thread of its own, whatever the page does."""

    def __init__(self) -> None:
        self.stopped = False
        self.seen: list[Seen] = []
        self.error: Exception | None = None
        self._test: SelfTest | None = None

    def begin(self, test: SelfTest) -> None:
        """Raises Stopped where it was stopped before it began."""
        self._test = test
        if self.stopped:
            raise Stopped("Stopped.")
        self._thread = threading.Thread(target=self._work, args=(test,), name="self-test", daemon=True)
        self._thread.start()

    def _work(self, test: SelfTest) -> None:
        try:
            for one in test:
                self.seen.append(one)
        except Exception as error:
            self.error = error

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """At once while it is made ready, else at the next chunk or token; any number of times."""
        self.stopped = True
        if self._test is not None:
            self._test.examiner.stop()


def self_test_form(service: ChatService, loading: Loading, session: gr.State, changed: Sequence[Any]) -> None:
    """Chooses a document and the number of facts; `changed` are parts that change, or open, when documents do."""
    runs: dict[str, _Run] = {}  # by tab
    gr.HTML(_WHAT, elem_id="oc-self-test-about", apply_default_css=False)
    none = gr.HTML("", elem_id="oc-self-test-none", apply_default_css=False)
    with gr.Row(elem_id="oc-self-test-row"):
        # Checked in `tested`: the library would hold the choice against a list that is already an older one.
        name = gr.Dropdown([], label="Document", elem_id="oc-self-test-document", allow_custom_value=True)
        count = gr.Dropdown([4, 8, 16, 32], value=_FACTS, label="Facts", elem_id="oc-self-test-count")
        start = gr.Button("Test", size="sm", variant="primary", elem_id="oc-self-test")
        stop = gr.Button("Stop", size="sm", elem_id="oc-self-test-stop", visible=False)
    chart = gr.HTML("", elem_id="oc-depths", apply_default_css=False)

    def listed(session: Session | None) -> tuple[gr.Dropdown, str]:
        names = list(_sources(session)) if session is not None else []
        chosen = session.tested.get(session.conversation.chat.id) if session is not None else None
        value = chosen if chosen in names else names[0] if names else None
        return gr.Dropdown(names, value=value), "" if names else f"<p>{_NONE}</p>"

    def chose(session: Session | None, chosen: str | None) -> None:
        if session is not None and chosen is not None:
            session.tested = {session.conversation.chat.id: chosen}

    async def tested(session: Session | None, chosen: str | None, facts: int) -> AsyncIterator[dict[Any, Any]]:
        sources = await asyncio.to_thread(_sources, session) if session is not None else {}
        if session is None or not sources:
            yield {chart: f"<p>{_NONE}</p>"}
            return
        if session.token in runs:
            yield {chart: gr.skip()}  # without a word every part would be emptied
            return
        if chosen and chosen not in sources:
            yield {chart: f"<p>{escape(chosen)} is no longer here: choose another document.</p>"}
            return
        title = chosen or next(iter(sources))
        page = session.page
        run = runs[session.token] = _Run()
        try:
            yield {start: gr.Button(visible=False), stop: gr.Button(visible=True), chart: "<p>Preparing …</p>"}
            while loading.anew and not run.stopped and session.page == page:
                yield {chart: "<p>Begins once the model has been opened anew.</p>"}
                await asyncio.sleep(_POLL_S)
            if run.stopped or session.page != page:
                raise Stopped("Stopped.")
            document = await asyncio.to_thread(_opened, session, sources[title])
            test = await asyncio.to_thread(service.self_test, document, int(facts))
            run.begin(test)
            shown = ""
            while run.running and session.page == page:  # a page that is closed asks no further
                if (now := depth_chart(test, title, list(run.seen), _where(test, run.seen))) != shown:
                    shown = now
                    yield {chart: now}
                await asyncio.sleep(_POLL_S)
            if run.error is not None and not isinstance(run.error, Stopped):
                raise run.error
            ended = "" if run.error is None else f"Stopped after {len(run.seen)} of {test.count}."
            yield {chart: depth_chart(test, title, run.seen, ended)}
        except Exception as error:
            yield {chart: f'<p class="oc-lost">{escape(describe(error)[0])}</p>'}
        finally:
            run.stop()
            runs.pop(session.token, None)
        yield {start: gr.Button(visible=True), stop: gr.Button(visible=False)}

    def stopped(session: Session | None) -> None:
        if session is not None and (run := runs.get(session.token)) is not None:
            run.stop()

    quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private", "concurrency_limit": None}
    triggers = [part.expand if isinstance(part, gr.Accordion) else part.change for part in changed]
    gr.on(triggers, listed, [session], [name, none], **quiet)
    name.input(chose, [session, name], None, **quiet)
    start.click(tested, [session, name, count], [start, stop, chart], **quiet)
    stop.click(stopped, [session], None, queue=False, **quiet)


def _where(test: SelfTest, seen: Sequence[Seen]) -> str:
    """What goes on just now."""
    which = f"Fact {min(len(seen) + 1, test.count)} of {test.count}: "
    match test.examiner.at:
        case Queued(place):
            return f"{which}waiting, place {place} in line."
        case Opening(done, total):
            return f"{which}opening what was read, {done:,} of {total:,} tokens."
        case Progress(done, total) as progress:
            left = f", {duration(progress.seconds_left)} left" if progress.seconds_left >= 1 else ""
            return f"{which}reading, {done:,} of {total:,} tokens{left}."
    return f"{which}asking."


def depth_chart(test: SelfTest, title: str, seen: list[Seen], where: str) -> str:
    """A summary in words, and a row a fact: its depth, whether it was found, what was answered."""
    said = [f"<p>{where}</p>"] if where else []
    found = sum(one.found for one in seen)
    if seen:
        said.append(
            f"<p><b>{found} of {len(seen)} planted facts found</b> in {escape(title)}. {_meaning(test, seen)}</p>"
        )
    if test.tokens < test.of:
        said.append(
            f"<p>Only the first {test.tokens:,} of its {test.of:,} tokens fit into the context and are tested.</p>"
        )
    rows = "".join(
        f'<tr class="{"oc-found" if one.found else "oc-lost"}"><td>{_place(one.depth)}</td>'
        f"<td>{'found' if one.found else 'missed'}</td><td>{escape(one.answer)}</td></tr>"
        for one in seen
    )
    head = "<tr><th>Place</th><th></th><th>What the model answered</th></tr>" if seen else ""
    return f"{''.join(said)}<table>{head}{rows}</table>"


def _place(depth: float) -> str:
    return {0.0: "the beginning", 1.0: "the end"}.get(depth, f"at {depth:.0%}")


def _meaning(test: SelfTest, seen: list[Seen]) -> str:
    if len(seen) < test.count:
        return ""
    if all(one.found for one in seen):
        return (
            "At these settings what stands anywhere in this document can be found. A plain question may fail all the"
            " same: this tells how far the model sees, not what it makes of it."
        )
    if test.examiner.settings.get("mode") == "endless":
        return (
            "What stands where a fact was missed is forgotten, or was overlooked: endless mode keeps the newest words"
            " only. Keep more of them and test again, or start Octavo without it."
        )
    return (
        "What stands where a fact was missed may be overlooked. Try more heads that keep everything, or more bits, and"
        " test again: what is missed with all heads full too is beyond the model itself."
    )


def _opened(session: Session, source: Selection | str) -> Selection:
    """A document that was chosen, read from the library where only its label is known."""
    if isinstance(source, Selection):
        return source
    document = session.owner.open(source)
    if document is None:
        raise UsageError("The text of this document is gone. Add the file again.")
    return Selection.whole(document)


def _sources(session: Session) -> dict[str, Selection | str]:
    """Documents on the shelf, those that the chat was asked about, and the library's by their labels.

    By names that differ, and that stay while a question is answered.
    """
    conversation = session.conversation
    found = [attachment.source for attachment in conversation.readable]
    keys = {source.key for source in found}
    for turn in conversation.chat.path(conversation.chat.head):
        for source in turn.sources:
            if source.document.pages and source.key not in keys:
                keys.add(source.key)
                found.append(source)
    here = {source.label for source in found}
    titled: list[tuple[str, Selection | str]] = [(source.title, source) for source in found]
    with suppress(OSError):  # a list that the disk does not give is told where it is shown
        titled += [(f"{e.name} (library)", e.label) for e in session.owner.documents() if e.label not in here]
    named: dict[str, Selection | str] = {}
    for base, one in titled:
        title, number = base, 2
        while title in named:
            title, number = f"{base} - {number}", number + 1
        named[title] = one
    return named
