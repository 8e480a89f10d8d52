"""The panel about what the model keeps: settings of the cache, what others would cost, and the heads' picture."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from html import escape
from typing import Any, get_args

import gradio as gr

from app.config import Kv, Settings
from app.errors import OctavoError, UsageError, describe
from app.head_costs import Heads
from app.service import ChatService
from app.ui import strip
from app.ui.heads_map import heads_map
from app.ui.selftest import self_test_form
from app.ui.session import Loading

_POLL_S = 0.2
_USE = "Use these settings"
_NOT_OURS = "<p>How the other server's model keeps its context is not told; this needs Octavo's own engine.</p>"
_LOADING = "<p>The model is still loading.</p>"
_KV = {"kv4": "4 bits", "kv8": "8 bits", "bf16": "16 bits"}
_ENDLESS = (
    "<p>Every head keeps the beginning and the newest words only: that is endless mode, whose memory never grows. The"
    " more tokens are kept, the further back the model sees: the self-test below shows it.</p>"
)
_ALL = (
    "<p>Every head of this model keeps everything that was read. More bits may see more of a long document: the"
    " self-test below shows it.</p>"
)
_SOME = (
    "<p>Some heads of the model keep everything that was read; the others keep the beginning and the newest words only,"
    " which saves memory and time. More full heads and more bits may see more of a long document: the self-test below"
    " shows it.</p>"
)
_EVERYBODY = (
    "The change is for everybody who uses this Octavo, until it is started anew. Answers in front are finished first,"
    " then the model is opened anew, and questions asked meanwhile wait. Chats stay; a document is read again when it"
    " is next asked about, or comes from disk where these settings were used before."
)
# Errors name settings as the command line does; here each has a field.
_LABELS = {
    "--retrieval-ratio": "Share of heads that keep everything",
    "--kv": "Precision of what they keep",
    "--sink-tokens": "First tokens that all heads keep",
    "--recent": "Newest tokens that all heads keep",
    "--chunk": "Tokens read at a time",
}
_FIELDS = ("retrieval_ratio", "kv", "sink", "recent", "chunk")


def heads_panel(service: ChatService, loading: Loading, session: gr.State, changed: Sequence[gr.HTML]) -> None:
    """A closed panel; what it shows is made when it is opened. `changed` change when the chat's documents do.

    `loading` is told, for every page, how far a change of settings is.
    """
    with gr.Accordion("Heads, memory and self-test", open=False, elem_id="oc-heads") as panel:
        about = gr.HTML("", elem_id="oc-heads-about", apply_default_css=False)
        ratio = gr.Slider(
            0, 1, 0.5, step=0.05, label=_LABELS["--retrieval-ratio"], visible=False, elem_id="oc-heads-ratio"
        )
        kv = gr.Radio(
            [(_KV[name], name) for name in get_args(Kv)],
            label=_LABELS["--kv"],
            visible=False,
            elem_id="oc-heads-kv",
        )
        with gr.Row(visible=False, elem_id="oc-heads-numbers") as row:
            sink = gr.Number(label=_LABELS["--sink-tokens"], precision=0, visible=False)
            recent = gr.Number(
                label=_LABELS["--recent"],
                precision=0,
                visible=False,
                elem_id="oc-heads-recent",
            )
            chunk = gr.Number(label=_LABELS["--chunk"], precision=0, visible=False)
        preview = gr.HTML("", elem_id="oc-costs", apply_default_css=False)
        use = gr.Button(_USE, size="sm", variant="primary", elem_id="oc-use", interactive=False, visible=False)
        note = gr.HTML("", elem_id="oc-use-note", apply_default_css=False)
        picture = gr.HTML("", elem_id="oc-heads-picture", apply_default_css=False)
        self_test_form(service, loading, session, [*changed, panel])
    fields = dict(zip(_FIELDS, (ratio, kv, sink, recent, chunk), strict=True))

    def opened() -> dict[Any, Any]:
        if service.settings.engine != "own":
            return {about: _NOT_OURS}
        if not service.ready or (heads := service.heads) is None:
            return {about: _LOADING}
        chunk_now = int(service.status()["settings"]["chunk"])
        first, newest = heads.window
        now = heads.settings
        values = dict(zip(_FIELDS, (now.retrieval_ratio, now.kv, first, newest, chunk_now), strict=True))
        shown: dict[Any, Any] = {
            fields[name]: type(fields[name])(value=value, visible=name in service.changeable)
            for name, value in values.items()
        }
        return shown | {
            about: what_is_kept(heads),
            row: gr.Row(visible=True),
            preview: comparison(heads, now, _context(service), chunk_now),
            use: gr.Button(_USE, visible=True, interactive=False),
            note: "",
            picture: heads_map(heads),
        }

    def previewed(*values: Any) -> dict[Any, Any]:
        if (heads := service.heads) is None:
            return {preview: _LOADING}
        try:
            chosen = replace(heads.settings, **_chosen(service, heads, values))
            chunk_now = int(service.status()["settings"]["chunk"])
            table = comparison(heads, chosen, _context(service), chunk_now)
        except (OctavoError, TypeError) as error:
            said = _worded(error) if isinstance(error, OctavoError) else "Give a number in every field."
            return {preview: f'<p class="oc-lost">{escape(said)}</p>', use: gr.Button(interactive=False)}
        same = chosen == heads.settings
        return {preview: table, use: gr.Button(interactive=not same), note: "" if same else f"<p>{_EVERYBODY}</p>"}

    def changed_to(chosen: dict[str, Any]) -> None:
        loading.anew.append(chosen)  # for as long as it takes, whether or not the page that asked for it is gone
        try:
            service.change(chosen, loading)
        finally:
            loading.anew.pop()

    async def used(*values: Any) -> AsyncIterator[dict[Any, Any]]:
        yield {
            use: gr.Button("Opening the model anew", interactive=False),
            note: strip.strip("busy", "Waiting", share=-1),
        }
        try:
            if (heads := service.heads) is None:
                raise UsageError("The model is still loading.")
            chosen = _chosen(service, heads, values)
            wanted = replace(heads.settings, **chosen)
            chunk_now = int(service.status()["settings"]["chunk"])
            yield {preview: comparison(heads, wanted, _context(service), chunk_now, "Next")}
            work = asyncio.create_task(asyncio.to_thread(changed_to, chosen))
            shown = ""
            while not work.done():
                said, share = loading.stage, loading.share
                text = strip.strip("busy", escape(said), f"{share:.0%}" if share else "", share or -1)
                if text != shown:
                    shown = text
                    yield {note: text}
                await asyncio.sleep(_POLL_S)
            work.result()
        except Exception as error:
            kept = " The settings before are in force." if service.ready else ""
            said = f'<p class="oc-lost">{escape(_worded(error))}{kept}</p>'
        else:
            said = '<p class="oc-found">These settings are in force now.</p>'
        yield await asyncio.to_thread(opened) | {note: said}

    quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private", "concurrency_limit": None}
    everything = [about, row, *fields.values(), preview, use, note, picture]
    panel.expand(opened, None, everything, **quiet)
    inputs = [field.input for field in (ratio, kv, sink, recent, chunk)]
    gr.on(inputs, previewed, list(fields.values()), [preview, use, note], trigger_mode="always_last", **quiet)
    use.click(used, list(fields.values()), everything, **quiet)


def _worded(error: Exception) -> str:
    """What was wrong, with the names that the fields have."""
    said = describe(error)[0]
    for flag, label in _LABELS.items():
        said = re.sub(rf"{flag}(?![\w-])", f"\u201c{label}\u201d", said)
    return said


def what_is_kept(heads: Heads) -> str:
    """What the model's heads keep, in words."""
    if heads.settings.mode == "endless":
        return _ENDLESS
    return _SOME if heads.pattern is not None else _ALL


def _context(service: ChatService) -> int:
    """Tokens that costs are told for: the context, or all that is kept where it has no end."""
    capacity = service.status()["context_capacity"]
    return sum(service.heads.window) if capacity is None and service.heads is not None else int(capacity)


def _chosen(service: ChatService, heads: Heads, values: Sequence[Any]) -> dict[str, Any]:
    """What the fields say, of what can be changed; what is as it is now stays as it was asked for (or automatic)."""
    given = dict(zip(_FIELDS, values, strict=True))
    first, newest = heads.window
    in_force = {"sink": first, "recent": newest, "chunk": service.status()["settings"]["chunk"]}
    chosen = {}
    for name, value in given.items():
        if name not in service.changeable:
            continue
        if value is None:
            raise TypeError(name)
        kept = name in in_force and value == in_force[name]
        chosen[name] = getattr(heads.settings, name) if kept else value
    if chosen.get("kv") not in (None, heads.settings.kv):
        chosen["kv_bits"] = None  # shares 4 and 8 bits among the heads of one format
    return chosen


def comparison(heads: Heads, chosen: Settings, context: int, chunk: int, then: str = "As chosen") -> str:
    """A table of what the settings in force take, and under `then` of what the chosen ones do where they are others."""
    same = chosen == heads.settings
    rows = "".join(
        f"<tr><td>{escape(what)}</td><td>{now}</td>{'' if same else f'<td>{after}</td>'}</tr>"
        for what, now, after in heads.compare(chosen, context, chunk)
        if heads.settings.mode != "endless" or "attention" not in what  # whose share of full heads there would be 100%
    )
    return f"<table><tr><th></th><th>In force</th>{'' if same else f'<th>{then}</th>'}</tr>{rows}</table>"
