"""The quiet line at the foot, and what the engine does; as HTML."""

from __future__ import annotations

from html import escape
from typing import Any

from app.ui.frame import CROSS
from app.words import size


def status(facts: dict[str, Any] | None, settings: str = "") -> str:
    """The quiet line at the foot, and behind its button all that the engine tells; None while there is no model.

    `settings` names how the chat's answers are written.
    """
    if facts is None:
        return '<div class="oc-foot"></div>'
    memory = facts["memory"]
    line = [_context(facts)]
    if memory["weights_bytes"]:  # another server's memory is not known
        line.append(f"{_held(memory)} of weights and cache")
    if facts["ms_per_token"]:
        line.append(f"{facts['ms_per_token']:.{0 if facts['ms_per_token'] >= 10 else 1}f} ms per token")
    shown = "".join(f"<span>{escape(item)}</span>" for item in [*line, facts["note"]] if item)
    return (
        f'<div class="oc-foot"><div>{shown}</div>'
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
        "Context": _context(facts),
        **(_memory_rows(memory, settings) if memory["weights_bytes"] else {}),
        "Reading": f"{facts['prefill_tokens_per_s']:,.0f} tokens/s" if facts["prefill_tokens_per_s"] else "",
        "Writing": f"{facts['ms_per_token']:.1f} ms per token" if facts["ms_per_token"] else "",
        "Heads": facts["pattern"],
    }
    closely = {
        **{_name(key): str(value) for key, value in settings.items() if value},
        **{f"Kernel: {_name(key).lower()}": str(value) for key, value in kernels.items()},
    }
    close = (
        '<button type="button" class="oc-tool" popovertarget="oc-engine" popovertargetaction="hide" aria-label="Close">'
        f"{CROSS}</button>"
    )
    return (
        f'<div class="oc-dialog-top"><h2>What the engine does</h2>{close}</div>{_table(rows)}'
        f"<details><summary>Settings and kernels</summary>{_table(closely)}</details>"
    )


def _table(rows: dict[str, str]) -> str:
    body = "".join(
        f"<tr><th scope=row>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows.items() if value
    )
    return f"<table>{body}</table>"


def _memory_rows(memory: dict[str, int], settings: dict[str, Any]) -> dict[str, str]:
    return {
        "Weights": f"{size(memory['weights_bytes'])} ({settings.pop('weights', '')})",
        "Cache of retrieval heads": f"{size(memory['retrieval_kv_bytes'])} ({settings.pop('kv', '')})",
        "Cache of streaming heads": size(memory["streaming_kv_bytes"]),
        "Weights and cache": f"{_held(memory)} (cache of the newest question)",
        "Peak memory": f"{size(memory['peak_bytes'])} (of the whole program, so far)",
    }


def _held(memory: dict[str, int]) -> str:
    """What the line and the table tell alike: the weights, and the cache of the newest request."""
    return size(memory["weights_bytes"] + memory["retrieval_kv_bytes"] + memory["streaming_kv_bytes"])


def _name(key: str) -> str:
    return key.replace("_", " ").capitalize()
