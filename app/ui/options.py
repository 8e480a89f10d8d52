"""How a chat's answers are written: the form behind "Settings", and what it says back."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from app.chat import Chat
from app.documents.document import without_halves
from app.engine.types import SamplingParams
from app.errors import UsageError
from app.service import check_numbers
from app.ui.parts import fresh


@dataclass(frozen=True)
class Preset:
    """A named way of choosing words, and what to expect of it."""

    name: str
    what: str
    sampling: SamplingParams


PRESETS = (
    Preset(
        "Exact",
        "Always the likeliest word: the same question gets the same answer. Only \u201cAsk again\u201d varies it.",
        SamplingParams(),
    ),
    Preset("Balanced", "Some variety, no odd words.", SamplingParams(temperature=0.7, top_p=0.95)),
    Preset("Free", "Lively, and wrong more often.", SamplingParams(temperature=1.0, min_p=0.05)),
)
_OF_PRESET = ("temperature", "top_p", "top_k", "min_p")

# Name in SamplingParams, label, step, largest, what it does.
_NUMBERS = (
    ("temperature", "Temperature", "0.01", "100", "0 takes the likeliest word; higher numbers vary more."),
    ("top_p", "Top-p", "0.01", "1", "Chooses among the likeliest words that reach this share together; 1 is off."),
    ("top_k", "Top-k", "1", "", "Chooses among this many of the likeliest words; 0 is off."),
    ("min_p", "Min-p", "0.01", "1", "Leaves out words less likely than this share of the likeliest; 0 is off."),
    (
        "repetition_penalty",
        "Repetition penalty",
        "0.01",
        "100",
        "Above 1, words that the answer has used become less likely.",
    ),
    ("seed", "Seed", "1", "", "The same number gives the same answer; empty is another each time."),
    ("max_new_tokens", "Longest answer", "1", "", "In tokens; empty is as long as the context allows."),
)
_LEAST = {"repetition_penalty": "0.01", "max_new_tokens": "1"}  # of the others 0
_WHOLE = ("top_k", "seed", "max_new_tokens")


def name_of(sampling: SamplingParams) -> str:
    """The preset that a chat's answers are written with, "own" where none is like it."""
    return next((preset.name for preset in PRESETS if _of_preset(preset.sampling) == _of_preset(sampling)), "own")


def _of_preset(sampling: SamplingParams) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in _OF_PRESET}


def form(chat: Chat) -> str:
    """The settings of a chat, in a popover."""
    presets = "".join(_preset(preset, chat.sampling) for preset in PRESETS)
    numbers = "".join(_number(chat.sampling, *entry) for entry in _NUMBERS)
    fixed = bool(chat.tree)  # all branches begin with it, the one that is being answered too
    note = (
        "Fixed since the first question; a new chat can have another." if fixed else "Told to the model first of all."
    )
    return (
        f'<div id="oc-options" popover data-fresh="{fresh()}" aria-label="Settings of this chat"><form>'
        f'<h2>Settings of this chat</h2><div class="oc-presets" role="group" aria-label="Presets">{presets}</div>'
        f'<label class="oc-option"><span>System prompt</span><textarea name="system" rows="3"'
        f"{' disabled' if fixed else ''}>{escape(chat.system or '')}</textarea><small>{note}</small></label>"
        f"<details><summary>Every number</summary>{numbers}</details>"
        '<div class="oc-form-end"><button type="button" class="oc-quiet" popovertarget="oc-options"'
        ' popovertargetaction="hide">Cancel</button>'
        '<button type="submit" class="oc-primary">Save</button></div></form></div>'
    )


def _preset(preset: Preset, sampling: SamplingParams) -> str:
    values = _of_preset(preset.sampling)
    chosen = values == _of_preset(sampling)
    return (
        f'<button type="button" class="oc-preset" data-do="preset" aria-pressed="{"true" if chosen else "false"}"'
        f' data-values="{escape(json.dumps(values))}"><b>{preset.name}</b><span>{preset.what}</span></button>'
    )


def _number(sampling: SamplingParams, name: str, label: str, step: str, most: str, what: str) -> str:
    value = getattr(sampling, name)
    shown = "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return (
        f'<label class="oc-option oc-number"><span>{label}</span><input name="{name}" type="number" step="{step}"'
        f' min="{_LEAST.get(name, "0")}" max="{most}" value="{shown}"><small>{what}</small></label>'
    )


def take(chat: Chat, text: str) -> None:
    """Put what the form says into the chat; raises UsageError and changes nothing when a value is wrong."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise UsageError("The settings did not arrive whole. Open them again.")
    numbers = {name: _parsed(name, label, values.get(name, "")) for name, label, *_ in _NUMBERS}
    sampling = replace(SamplingParams(), **{name: number for name, number in numbers.items() if number is not None})
    check_numbers(sampling, {name: label for name, label, *_ in _NUMBERS}.__getitem__)
    chat.sampling = sampling
    if not chat.tree and "system" in values:
        chat.system = without_halves(str(values["system"])).strip() or None


def _parsed(name: str, label: str, text: Any) -> Any:
    """A number, None where the field is empty."""
    try:
        if str(text).strip() == "":
            return None
        return int(text) if name in _WHOLE else float(text)
    except (ValueError, TypeError, OverflowError):
        kind = "a whole number" if name in _WHOLE else "a number"
        raise UsageError(f"{label} is {str(text)[:40]!r}; it must be {kind}.") from None
