"""The page: where everything stands and which handler it calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gradio as gr
from fastapi import FastAPI

from app.ui import drawing, frame, sidebar, status, strip
from app.ui.handlers import Handlers
from app.ui.heads import heads_panel
from app.ui.page import Page
from app.ui.parts import IDLE, Parts
from app.ui.session import SECRET_CHARS, Loading, Sessions
from app.ui.theme import theme
from app.ui.uploads import Uploads

_HERE = Path(__file__).parent
_FORMULAS: list[dict[str, str | bool]] = [
    {"left": "$$", "right": "$$", "display": True},
    {"left": "\\[", "right": "\\]", "display": True},
    {"left": "\\(", "right": "\\)", "display": False},
]


def build_page(sessions: Sessions, loading: Loading, uploads: Uploads) -> gr.Blocks:
    """The Gradio page over the service of the sessions."""
    with Page(title="Octavo", analytics_enabled=False, fill_height=True) as page:
        tab, secret, arrival, pulse = (gr.Textbox(visible=False) for _ in range(4))
        header = gr.HTML(
            frame.header(uploads.max_bytes, drawing.QUIET_S),
            elem_id="oc-header",
            apply_default_css=False,
            js_on_load="\n".join((_HERE / part).read_text(encoding="utf-8") for part in ("page.js", "turns.js")),
        )
        with gr.Column(elem_id="oc-side"):
            gr.HTML(sidebar.FRAME, elem_id="oc-side-frame", apply_default_css=False)
            chats = gr.HTML("<h2>Chats</h2>", elem_id="oc-chats", apply_default_css=False)
            library = gr.HTML("<h2>Library</h2>", elem_id="oc-library", apply_default_css=False)
        turns = gr.HTML("", elem_id="oc-turns", apply_default_css=False)
        # What stands there is not known before the first word of the server: until then there is none.
        welcome = gr.HTML("", elem_id="oc-welcome", apply_default_css=False)
        chat = gr.Chatbot(
            elem_id="oc-chat",
            label="Conversation",
            show_label=False,
            visible=False,
            scale=1,
            buttons=["copy"],
            allow_tags=False,
            latex_delimiters=_FORMULAS,
            group_consecutive_messages=True,  # an answer is several
            autoscroll=False,  # see turns.js
        )
        with gr.Column(elem_id="oc-dock") as dock:
            line = gr.HTML(strip.unknown(), elem_id="oc-strip", apply_default_css=False)
            with gr.Column(elem_id="oc-composer"):
                shelf = gr.HTML("", elem_id="oc-shelf", apply_default_css=False)
                with gr.Row(elem_id="oc-ask"):
                    gr.HTML(frame.ADD, elem_id="oc-add", apply_default_css=False)
                    question = gr.Textbox(
                        elem_id="oc-question",
                        label="Question",
                        show_label=False,
                        placeholder="Ask a question",
                        lines=1,
                        max_lines=8,
                        **IDLE,
                        container=False,
                        autofocus=True,
                    )
            foot = gr.HTML(status.status(None), elem_id="oc-status", apply_default_css=False)
        source = gr.HTML("", elem_id="oc-sources", apply_default_css=False)
        options = gr.HTML("", elem_id="oc-forms", apply_default_css=False)
        session = gr.State()
        with dock:
            heads_panel(sessions.service, loading, session, [shelf, turns])
        shown = (welcome, chat, turns, line, shelf, question, foot, chats, library, source, options, pulse)
        parts = Parts(session, tab, *shown)
        _connect(page, header, secret, arrival, Handlers(sessions, loading, uploads, parts), parts)
    return page.queue(default_concurrency_limit=None, api_open=False)


def _connect(
    page: gr.Blocks, header: gr.HTML, secret: gr.Textbox, arrival: gr.Textbox, handlers: Handlers, parts: Parts
) -> None:
    """Events of the header's script carry what other parts of the page report."""
    session = parts.session

    def on(**more: Any) -> dict[str, Any]:
        quiet = {"show_progress": "hidden", "concurrency_limit": None, "api_visibility": "private"}
        return quiet | {"outputs": parts.all} | more

    # The tab finds its place again by one secret, and by its chat where that is forgotten; chats and library belong to
    # another secret, which all tabs share. A tab that is loaded again is itself; one with the secret of a tab that is
    # still open is a copy of that.
    known = (
        "() => [octavo.tab.getItem('octavo') || '', octavo.secret,"
        " performance.getEntriesByType('navigation')[0]?.type || '']"
    )
    page.load(handlers.opened, [parts.tab, secret, arrival], js=known, **on())
    parts.tab.change(None, [parts.tab], None, js="kept => { octavo.tab.setItem('octavo', kept); }")
    parts.pulse.change(None, [parts.pulse], None, js="() => { window.octavoPulse = Date.now(); }")
    page.unload(handlers.left)
    parts.question.submit(handlers.asked, [session, parts.question], **on(trigger_mode="multiple"))
    parts.question.stop(handlers.stopped, [session], **on(queue=False, trigger_mode="multiple"))
    header.fresh(handlers.cleared, [session], **on())
    header.added(handlers.added, [session], **on(trigger_mode="multiple"))
    header.removed(handlers.removed, [session], **on(trigger_mode="multiple"))
    header.paged(handlers.paged, [session], **on(trigger_mode="always_last"))
    header.suggested(handlers.suggested, [session], **on())
    header.acted(handlers.acted, [session], **on(trigger_mode="multiple"))


def mount_page(app: FastAPI, sessions: Sessions, loading: Loading, uploads: Uploads) -> FastAPI:
    """The app with the page at its root."""
    storage = (_HERE / "storage.js").read_text(encoding="utf-8").replace("SECRET_CHARS", str(SECRET_CHARS))
    return gr.mount_gradio_app(
        app,
        build_page(sessions, loading, uploads),
        path="/",
        footer_links=[],
        run_history=False,
        show_error=True,
        max_file_size="1kb",  # files come by way of Uploads; the library's own upload route is not used
        ssr_mode=False,
        mcp_server=False,
        pwa=False,
        favicon_path=str(_HERE / "favicon.svg"),
        theme=theme(),
        head=f"<script>{storage}</script>",
        css_paths=_HERE / "style.css",
    )
