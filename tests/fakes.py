"""A model and a tokenizer of a few lines: bytes are tokens, answers are scripts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

import torch

from app.engine.sampler import Sampler, check_token
from app.engine.types import Memory, SamplingParams
from models.evidence import Question

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
START, END = 256, 257
T = TypeVar("T")


def result_of(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs it in a thread of its own: where a browser is open, a loop runs in this one already."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


class FakeTokenizer:
    """UTF-8 bytes are ids 0-255, so that one character may take four tokens; 256 and 257 are ChatML's two."""

    def __init__(self, chat_template: str | None = CHATML) -> None:
        self.chat_template = chat_template
        self.template_variables: dict[str, str] = {"eos_token": "<|im_end|>"}
        self.special_ids = {"<|im_start|>": START, "<|im_end|>": END}
        self.eos_ids = frozenset({END})
        self.vocab_size = 258
        self.bos_id: int | None = None
        self.add_bos = False
        self.space_after_special = False
        self.strip_leading_space = False
        self.encoded: list[str] = []

    def encode_text(
        self,
        text: str,
        *,
        start: bool = True,
        progress: Callable[[float], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> list[int]:
        self.encoded.append(text)
        if progress is not None:
            progress(1.0)
        return list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def decode(self, ids: Sequence[int]) -> str:
        """Everything, with the names of the control tokens: for tests to read prompts."""
        names = {START: "<|im_start|>", END: "<|im_end|>"}
        return b"".join(names[i].encode() if i in names else bytes([i]) for i in ids).decode()


@dataclass
class FakeSlot:
    runner: FakeRunner
    ids: list[int]
    script: list[int]
    cached: int
    closed: bool = False
    watched: bool = False

    @property
    def length(self) -> int:
        return len(self.ids)

    def prefill(self, chunk_ids: Sequence[int]) -> None:
        assert not self.closed
        assert 0 < len(chunk_ids) <= self.runner.chunk
        self.runner.hook("prefill", self)
        self.ids.extend(chunk_ids)
        self.runner.read += len(chunk_ids)

    def settle(self, least: int) -> int:
        return least if self.runner.behind else self.length

    def answer(self, sampling: SamplingParams, room: int | None) -> Generator[int]:
        sampler = Sampler(sampling)
        for number in count(1) if room is None else range(1, room + 1):
            token = int(sampler.sample(self.runner.logits(self.script[0])))
            check_token(token, number)
            yield token
            assert not self.closed
            assert token == self.script.pop(0)
            self.runner.hook("decode", self)
            self.ids.append(token)
            assert self.runner.capacity is None or self.length <= self.runner.capacity

    def watch(self, frame: int, question: int) -> None:
        self.watched = True

    def looked(self) -> None:
        assert self.watched and not self.closed

    def publish(self, chat_id: str) -> None:
        self._close()
        self.runner.kept[chat_id] = tuple(self.ids)

    def discard(self) -> None:
        self._close()

    def _close(self) -> None:
        assert not self.closed
        self.closed = True
        self.runner.open_slots -= 1


@dataclass
class FakeRunner:
    """Answers with `answer(prompt ids)` and END, then with END for ever. `hook(step, slot)` may wait or raise."""

    answer: Callable[[Sequence[int]], str] = lambda prompt: "Yes."
    capacity: int | None = 1000
    chunk: int = 16
    hook: Callable[[str, FakeSlot], None] = lambda step, slot: None
    kept: dict[str, tuple[int, ...]] = field(default_factory=dict)
    open_slots: int = 0
    starts: int = 0
    behind: bool = False  # as a device that has read no more than what is waited for
    read: int = 0
    released: bool = False
    snapshots: None = None

    def find_evidence_heads(self, prompt: list[int], questions: list[Question]) -> None:
        assert not self.starts

    def start(self, prompt_ids: Sequence[int], marks: Any = (), tell: Any = None) -> FakeSlot:
        assert not self.released
        prompt = tuple(prompt_ids)
        fitting = [ids for ids in self.kept.values() if len(ids) < len(prompt) and prompt[: len(ids)] == ids]
        known = max(fitting, key=len, default=())
        self.starts += 1
        self.open_slots += 1
        script = [*self.answer(prompt).encode(), *[END] * 10_000]
        return FakeSlot(self, list(known), script, len(known))

    def logits(self, best: int) -> torch.Tensor:
        logits = torch.zeros(258)
        logits[best] = 20.0
        return logits

    def known(self, prompt_ids: Sequence[int]) -> tuple[int, int]:
        return 0, 0

    def close(self) -> None:
        pass

    def release(self) -> None:
        assert not self.open_slots
        self.kept.clear()
        self.released = True

    def memory(self) -> Memory:
        return Memory(weights_bytes=1000, retrieval_kv_bytes=10, streaming_kv_bytes=1, peak_bytes=2000)

    def describe(self) -> dict[str, Any]:
        return {"weights": "fake", "kv": "fake", "sink": 4, "recent": 100, "chunk": self.chunk, "backends": {}}
