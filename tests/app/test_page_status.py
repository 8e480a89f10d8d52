"""The line at the foot and the table behind it tell the same memory by the same name."""

from __future__ import annotations

import re
from html import unescape
from types import SimpleNamespace
from typing import Any

from app.engine.types import Progress, SamplingParams
from app.service import MemoryBegins
from app.ui.drawing import Drawing
from app.ui.status import status


def facts(**memory: int) -> dict[str, Any]:
    held = {"weights_bytes": 0, "retrieval_kv_bytes": 0, "streaming_kv_bytes": 0, "peak_bytes": 3_000_000_000} | memory
    told = {"model": "m", "note": "", "pattern": "", "context_used": 5, "context_capacity": 10, "memory_begins": None}
    return told | {"settings": {}, "memory": held, "ms_per_token": 0, "prefill_tokens_per_s": 0}


def test_line_and_table_agree_about_the_memory_held() -> None:
    shown = status(facts(weights_bytes=1_000_000_000, retrieval_kv_bytes=400_000_000, streaming_kv_bytes=100_000_000))
    foot, table = shown.split('id="oc-engine"')
    assert "<span>1.5 GB of weights and cache</span>" in foot
    rows = {name: unescape(value) for name, value in re.findall("<tr><th scope=row>(.*?)</th><td>(.*?)</td>", table)}
    assert rows["Weights and cache"] == "1.5 GB (cache of the newest question)"
    assert rows["Peak memory"] == "3.0 GB (of the whole program, so far)"


def test_memory_that_is_not_known_is_not_told() -> None:
    shown = status(facts())
    assert "weights and cache" not in shown.lower() and "Peak" not in shown


def test_an_answer_in_progress_counts() -> None:
    progress = Progress(4096, 7000, 0, 900.0, 3.0)
    running = SimpleNamespace(progress=progress, tokens=0)
    chat = SimpleNamespace(sampling=SamplingParams())
    conversation = SimpleNamespace(chat=chat, running=running, memory_begins=None)
    told = facts() | {"context_capacity": 8192}
    drawing: Any = SimpleNamespace(service=SimpleNamespace(ready=True, status=lambda chat: dict(told)))
    session: Any = SimpleNamespace(conversation=conversation)
    assert "4,096 of 8,192 tokens used" in Drawing.status(drawing, session)
    told |= {"context_capacity": None, "settings": {"recent": 2044}}
    running.progress, running.tokens = Progress(7000, 7000, 0, 900.0, 0.0), 367
    conversation.memory_begins = MemoryBegins(5319, 4, 0, False, "")
    assert "7,367 tokens, endless: 5,319 forgotten" in Drawing.status(drawing, session)
