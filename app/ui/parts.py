"""The parts of the page that handlers change, and what its script sends them."""

from __future__ import annotations

from dataclasses import dataclass
from secrets import token_hex
from typing import Any

import gradio as gr

from app.documents.document import without_halves

# Properties of the question box: which button it shows.
IDLE: dict[str, Any] = {"submit_btn": "Ask", "stop_btn": False}
BUSY: dict[str, Any] = {"submit_btn": False, "stop_btn": "Stop"}

Changes = dict[Any, Any]


@dataclass(frozen=True)
class Parts:
    """The components that handlers change."""

    session: gr.State
    tab: gr.Textbox
    welcome: gr.HTML
    chat: gr.Chatbot
    turns: gr.HTML
    strip: gr.HTML
    shelf: gr.HTML
    question: gr.Textbox
    status: gr.HTML
    chats: gr.HTML
    library: gr.HTML
    source: gr.HTML
    options: gr.HTML
    pulse: gr.Textbox

    @property
    def all(self) -> list[Any]:
        return list(vars(self).values())


def fresh() -> str:
    """A mark that makes HTML differ from what was there: the same again would not be drawn, and so not be opened."""
    return token_hex(4)


def field(event: gr.EventData, name: str) -> Any:
    """What the script sent under a name; None where it sent nothing."""
    value = event._data.get(name) if isinstance(event._data, dict) else None
    return without_halves(value) if isinstance(value, str) else value


def files(event: gr.EventData) -> list[tuple[object, object]]:
    """(upload id, name) of files that have arrived."""
    sent = field(event, "files")
    files = [file for file in sent if isinstance(file, dict)] if isinstance(sent, list) else []
    return [(file.get("id"), without_halves(str(file.get("name")))) for file in files]


def number(event: gr.EventData, name: str, otherwise: int) -> int:
    """A whole number that the script sent, `otherwise` where it is none."""
    try:
        return int(field(event, name))
    except (TypeError, ValueError):
        return otherwise
