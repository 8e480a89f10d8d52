"""One answer: its prompt read into a slot chunk by chunk, then its tokens taken until something ends it."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Protocol

from app.engine.detokenize import Detokenizer
from app.engine.generation import Job
from app.engine.sampler import LoopDetector
from app.engine.stats import CostModel, Totals
from app.engine.types import FinishReason, Progress, SamplingParams, Timings, Token, Usage
from app.errors import ContextTooLong
from models.evidence import Looked

_SLOW_S = 2.0  # a chunk beside which the host's own milliseconds are nothing


class Slot(Protocol):
    """One request's place in the cache: `cached` tokens were reused, `length` tokens are committed."""

    @property
    def cached(self) -> int: ...
    @property
    def length(self) -> int: ...
    def prefill(self, chunk_ids: Sequence[int]) -> None: ...
    def settle(self, least: int) -> int: ...
    def answer(self, sampling: SamplingParams, room: int | None) -> Generator[int]: ...
    def watch(self, frame: int, question: int) -> None: ...
    def looked(self) -> Looked | None: ...
    def publish(self, chat_id: str) -> None: ...
    def discard(self) -> None: ...


def answer_room(prompt_tokens: int, capacity: int | None, wanted: int | None) -> int | None:
    """Tokens the answer may have, at most `wanted`; raises ContextTooLong when the prompt leaves none.

    None is without end: the context cannot fill, and no limit was asked for.
    """
    if capacity is None:
        return wanted
    if prompt_tokens >= capacity:
        raise ContextTooLong(prompt_tokens + 1, capacity)
    room = capacity - prompt_tokens
    return room if wanted is None else min(wanted, room)


class Answer:
    """The reading of one prompt and the writing of its answer."""

    def __init__(self, job: Job, slot: Slot, room: int | None, detokenizer: Detokenizer, endless: bool) -> None:
        self.ids: list[int] = []
        self.parts: list[str] = []
        self._job = job
        self._slot = slot
        self._room = room
        self._endless = endless
        self._detokenizer = detokenizer
        self._read = self._steps = 0
        self._read_s = self._write_s = 0.0

    def read(self, chunk: int, cost: CostModel) -> bool:
        """Prefill chunk by chunk; False when it was cancelled."""
        prompt, slot = self._job.request.prompt_ids, self._slot
        total, cached = len(prompt), slot.cached
        self._job.events.put(Progress(cached, total, cached, 0.0, cost.seconds(cached, total) or 0.0))
        done, before, seconds = cached, time.perf_counter(), 0.0
        # Chunks end where those of a run without a cache end, so that both round alike.
        for end in [*range(cached + chunk - cached % chunk, total, chunk), total]:
            if self._job.cancelled:
                return False
            start = slot.length
            slot.prefill(prompt[start:end])
            # The device may still read this chunk while the host makes the next one ready. Where chunks are slow that
            # gains nothing, and Stop would take two of them.
            now = slot.settle(end if seconds > _SLOW_S or end == total else start)
            if now > done:
                seconds = time.perf_counter() - before
                before += seconds
                cost.observe(done, now, seconds)
                self._read, self._read_s = now - cached, self._read_s + seconds
                rate = (now - done) / max(seconds, 1e-9)
                self._job.events.put(Progress(now, total, cached, rate, cost.seconds(now, total) or 0.0))
                done = now
        return True

    def write(self) -> FinishReason:
        """Take tokens until something ends the answer; says what did."""
        request, detokenizer = self._job.request, self._detokenizer
        # In an endless context an answer ends by itself, by Stop or at a limit that was asked for, and not otherwise.
        loop = None if self._endless else LoopDetector()
        before = time.perf_counter()
        with closing(self._slot.answer(request.sampling, self._room)) as tokens:
            for token in tokens:
                if self.ids:
                    self._steps += 1
                    self._write_s += time.perf_counter() - before
                before = time.perf_counter()
                if self._job.cancelled:
                    break
                self.ids.append(token)
                if token in request.stop_ids:
                    self._send(detokenizer.flush(), token)
                    return "stop"
                text = detokenizer.push(token)
                reason: FinishReason | None = None
                if detokenizer.stopped:
                    reason = "stop"
                elif self._room is not None and len(self.ids) >= self._room:
                    reason = "length"
                elif loop is not None and loop.push(token):
                    reason = "loop"
                if reason is not None:
                    self._send(text + detokenizer.flush(), token)
                    return reason
                self._send(text, token, even_empty=True)
        if self.ids:
            self._send(detokenizer.flush(), self.ids[-1])
        return "cancelled"

    def timings(self, previous: Timings) -> Timings:
        """What was measured; figures that this answer did not measure come from `previous`."""
        return Timings(
            self._read_s,
            self._read / self._read_s if self._read_s else previous.prefill_tokens_per_s,
            self._write_s / self._steps * 1000 if self._steps else previous.decode_ms_per_token,
        )

    def add_to(self, totals: Totals, usage: Usage) -> None:
        """Count what was read and written."""
        totals.prompt_tokens += usage.prompt_tokens
        totals.cached_tokens += usage.cached_tokens
        totals.completion_tokens += usage.completion_tokens
        totals.prefill_s += self._read_s
        totals.decode_s += self._write_s

    def _send(self, text: str, token: int, even_empty: bool = False) -> None:
        if text or even_empty:
            self.parts.append(text)
            self._job.events.put(Token(text, token))
