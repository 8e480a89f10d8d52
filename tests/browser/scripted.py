"""A model that reads at a set pace and answers by script, under the real service, engine and tokenizer."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import numpy as np
import torch

from app.config import Settings
from app.embedded import embedded_model_path
from app.engine.types import Memory, SamplingParams
from app.head_costs import Heads
from app.model import OpenModel, choose_pattern, find_model
from app.tokenizer import Tokenizer
from models.checkpoint import open_checkpoint
from models.evidence import Looked, Question

ANSWER = """The code word is **{word}**. It stands on the last page:

> Remember: the code word is {word}.

| where | what |
|---|---|
| last page | the code word |

```python
print("{word}")
```

<script>document.title = "taken"</script><img src="https://example.org/pixel.png" onerror="document.title = 'taken'">

That is all that the text says about it."""


@dataclass
class Script:
    """A scripted model: seconds to load, for a chunk, for a token; `steps` counts device work, `chunks` reads."""

    load_s: float = 0.0
    chunk_s: float = 0.05
    token_s: float = 0.01
    chunk: int = 256
    capacity: int | None = 8192
    sink: int = 4
    recent: int = 2044  # both where `capacity` is None
    answer: str = ANSWER
    note: str = ""  # what people should know of it
    patterned: bool = False  # with the embedded model's head pattern
    fail_load: Exception | None = None
    fail_decode: Exception | None = None
    go: threading.Event = field(default_factory=threading.Event)  # cleared, the model stops where it is
    steps: int = 0
    chunks: int = 0
    tokenizer: Tokenizer = field(default_factory=lambda: Tokenizer(embedded_model_path()))

    def __post_init__(self) -> None:
        self.go.set()

    def open(self, settings: Settings, progress: Callable[[str, float], None]) -> OpenModel:
        """In place of app.model.open_model."""
        for step in range(1, 11):
            progress("Reading the weights", step / 10)
            time.sleep(self.load_s / 10)
        if self.fail_load is not None:
            raise self.fail_load
        runner = ScriptedRunner(self)
        return OpenModel(
            name="Scripted",
            runner=runner,
            tokenizer=self.tokenizer,
            eos_ids=frozenset(self.tokenizer.eos_ids),
            bytes_for=lambda context: 134_000_000 + 5440 * context,
            note=self.note,
            pattern_note="No head pattern: every head keeps everything.",
            heads=_heads(settings) if self.patterned else None,
        )


def _heads(settings: Settings) -> Heads:
    pattern, _ = choose_pattern(find_model(replace(settings, model="embedded")), settings)
    return Heads(open_checkpoint(embedded_model_path()).config, pattern, settings, torch.device("cpu"))


class ScriptedRunner:
    """Answers with the script's text and the last code word that the prompt names."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.kept: dict[str, list[int]] = {}
        self.snapshots = None

    @property
    def capacity(self) -> int | None:
        return self.script.capacity

    @property
    def chunk(self) -> int:
        return self.script.chunk

    def start(self, prompt_ids: Sequence[int], marks: Any = (), tell: Any = None) -> ScriptedSlot:
        pairs = (zip(kept, prompt_ids, strict=False) for kept in self.kept.values())
        same = max((sum(1 for _ in takewhile(lambda ids: ids[0] == ids[1], both)) for both in pairs), default=0)
        return ScriptedSlot(self, list(prompt_ids), min(same, len(prompt_ids) - 1))

    def find_evidence_heads(self, prompt: list[int], questions: list[Question]) -> None:
        pass

    def known(self, prompt_ids: Sequence[int]) -> tuple[int, int]:
        return 0, 0

    def close(self) -> None:
        pass

    def release(self) -> None:
        self.kept.clear()

    def memory(self) -> Memory:
        return Memory(134_000_000, 5440 * sum(map(len, self.kept.values())), 2_000_000, 160_000_000)

    def describe(self) -> dict[str, Any]:
        script = self.script
        kept = {} if script.capacity is not None else {"mode": "endless", "sink": script.sink, "recent": script.recent}
        return {
            "weights": "w8a8",
            "kv": "kv4",
            "chunk": script.chunk,
            **kept,
            "backends": {"attention": "torch", "linear": "torch"},
        }


class ScriptedSlot:
    """One request: takes its time, and counts."""

    def __init__(self, runner: ScriptedRunner, prompt: list[int], cached: int) -> None:
        self.runner = runner
        self.cached = cached
        self.prompt = prompt
        self.ids = prompt[:cached]
        script = runner.script
        words = re.findall(r"code word is (\w+)", script.tokenizer.decode(prompt))
        text = script.answer.replace("{word}", words[-1] if words else "unknown")
        self.tokens = [*script.tokenizer.encode_text(text), *sorted(script.tokenizer.eos_ids)[:1]]

    @property
    def length(self) -> int:
        return len(self.ids)

    def prefill(self, chunk_ids: Sequence[int]) -> None:
        self._work(self.runner.script.chunk_s, chunk_ids)
        self.runner.script.chunks += 1

    def answer(self, sampling: SamplingParams, room: int | None) -> Generator[int]:
        for token in self.tokens[:room]:
            if self.runner.script.fail_decode is not None:
                raise self.runner.script.fail_decode
            yield token
            self._work(self.runner.script.token_s, [token])

    def settle(self, least: int) -> int:
        return self.length

    def watch(self, frame: int, question: int) -> None:
        pass

    def looked(self) -> Looked:
        """All of it at the last code word of the prompt."""
        pieces = list(map(self.runner.script.tokenizer.raw_bytes, self.prompt))
        ends = np.cumsum(list(map(len, pieces)))
        start = b"".join(pieces).rfind(b"code word is")
        inside = (ends > start) & (ends <= start + 20)
        return Looked(np.flatnonzero(inside), np.full(int(inside.sum()), 0.1))

    def publish(self, chat_id: str) -> None:
        self.runner.kept[chat_id] = self.ids

    def discard(self) -> None:
        self.ids = []

    def _work(self, seconds: float, ids: Sequence[int]) -> None:
        time.sleep(seconds)
        self.runner.script.go.wait()
        self.runner.script.steps += 1
        self.ids += ids
