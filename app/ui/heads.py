"""The part of the page about heads: their picture, what another ratio would cost, and the self-test."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from html import escape
from typing import Any

import gradio as gr

from app.errors import describe
from app.evaluation.selftest import Seen
from app.head_costs import SettingCost
from app.service import ChatService, Selection
from app.ui.session import Session
from app.ui.views import size

_FACTS = 8
_NOT_OURS = "Which heads the other server's model has is not told; this needs Octavo's own engine."
_NO_PATTERN = "This model has no head pattern in use: every head is treated alike."


def heads_panel(service: ChatService, session: gr.State) -> None:
    """A closed panel; what it shows is made when it is opened."""
    with gr.Accordion("Heads and self-test", open=False, elem_id="oc-heads") as panel:
        ratio = gr.Slider(0, 1, value=0.5, step=0.05, label="Retrieval ratio: what would it cost?", visible=False)
        preview = gr.Markdown("", elem_id="oc-heads-preview")
        costs = gr.HTML("", elem_id="oc-costs", apply_default_css=False)
        test = gr.Button("Does the model see all of this document?", size="sm", elem_id="oc-self-test")
        chart = gr.HTML("", elem_id="oc-depths", apply_default_css=False)
        picture = gr.HTML("", elem_id="oc-heads-picture", apply_default_css=False)

    def context() -> int:
        return int(service.status()["context_capacity"])

    def opened() -> tuple[str, gr.Slider, str, str]:
        if not service.ready:
            return "", gr.Slider(visible=False), "The model is still loading.", ""
        if (heads := service.heads) is None:
            return "", gr.Slider(visible=False), _NO_PATTERN if service.settings.engine == "own" else _NOT_OURS, ""
        png = base64.b64encode(heads.picture(context())).decode()
        image = f'<img alt="Scores of all heads, and what each ratio costs" src="data:image/png;base64,{png}">'
        now = heads.settings.retrieval_ratio
        others = heads.other_settings(context(), int(service.status()["settings"]["chunk"]))
        return image, gr.Slider(value=now, visible=True), previewed(now), cost_table(others, context())

    def previewed(wanted: float) -> str:
        if (heads := service.heads) is None:
            return _NO_PATTERN
        said = heads.preview(wanted, context())
        same = abs(wanted - heads.settings.retrieval_ratio) < 1e-9
        return f"{said} In force now." if same else f"{said} Start with `--retrieval-ratio {wanted:g}` to use it."

    async def tested(session: Session | None) -> AsyncIterator[str]:
        sources = _sources(session) if session is not None else []
        if not sources:
            yield "Add a document first."
            return
        yield "Reading the document with facts planted in it …"
        seen: list[Seen] = []
        try:
            rest = service.self_test(max(sources, key=lambda source: len(source.text)), _FACTS)
            while (one := await asyncio.to_thread(next, rest, None)) is not None:
                seen.append(one)
                yield depth_chart(seen)
        except Exception as error:
            yield escape(describe(error)[0])

    quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
    panel.expand(opened, None, [picture, ratio, preview, costs], **quiet)
    ratio.input(previewed, [ratio], [preview], trigger_mode="always_last", **quiet)
    test.click(tested, [session], [chart], concurrency_limit=1, **quiet)


def cost_table(costs: list[SettingCost], context: int) -> str:
    """Rows of a setting, the memory that it takes, and the cache of one token."""
    rows = "".join(
        f"<tr><td><code>{escape(one.flags)}</code>{' (in force)' if one.in_force else ''}</td>"
        f"<td>{size(one.total_bytes)}</td><td>{one.bytes_per_token:,} bytes</td></tr>"
        for one in costs
    )
    return (
        f"<p>What other settings take, to start with; each by itself, for {context:,} tokens.</p>"
        f"<table><tr><th>Setting</th><th>Memory</th><th>A token</th></tr>{rows}</table>"
    )


def depth_chart(seen: list[Seen]) -> str:
    """Rows of depth, whether the fact there was found, and what was answered."""
    rows = "".join(
        f'<tr class="{"oc-found" if one.found else "oc-lost"}"><td>{one.depth:.0%}</td>'
        f"<td>{'found' if one.found else 'missed'}</td><td>{escape(one.answer)}</td></tr>"
        for one in seen
    )
    found = sum(one.found for one in seen)
    rest = f"; {_FACTS - len(seen)} still to ask" if len(seen) < _FACTS else ""
    return (
        f"<p>{found} of {len(seen)} planted facts found in {seen[0].tokens:,} tokens{rest}.</p>"
        f"<table><tr><th>Depth</th><th></th><th>Answer</th></tr>{rows}</table>"
    )


def _sources(session: Session) -> list[Selection]:
    """Documents on the shelf, else those that the chat has read."""
    conversation = session.conversation
    waiting = [attachment.source for attachment in conversation.readable]
    return waiting or [source for turn in conversation.chat.turns for source in turn.sources if source.document.pages]
