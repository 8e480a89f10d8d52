"""One worker thread owns the device; requests wait in line and come back as events."""

from __future__ import annotations

import gc
import logging
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Protocol

import torch

from app.engine.detokenize import Detokenizer
from app.engine.sampler import LoopDetector, check_sampling
from app.engine.stats import CostModel, Totals
from app.engine.types import (
    Done,
    Event,
    Failed,
    FinishReason,
    GenerationRequest,
    Mark,
    Memory,
    Opening,
    Progress,
    Queued,
    SamplingParams,
    Timings,
    Token,
    Usage,
)
from app.errors import ContextTooLong, OctavoError
from models.evidence import Looked, Question

log = logging.getLogger(__name__)

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
    def watch(self) -> None: ...
    def looked(self) -> Looked | None: ...
    def publish(self, chat_id: str) -> None: ...
    def discard(self) -> None: ...


class Runner(Protocol):
    """What the engine drives; only its worker thread calls `start` and the slots.

    A prefill may return before the device has read its chunk: `settle(least)` waits until the device has read
    `least` tokens and tells how many it has. A started slot always leaves at least the prompt's last token to
    prefill, which gives the first logits. Its answer gives `room` tokens at most; a token is in the cache once the
    next one was asked for.
    """

    @property
    def capacity(self) -> int | None: ...
    @property
    def chunk(self) -> int: ...
    def start(
        self, prompt_ids: Sequence[int], chat_id: str | None, marks: Sequence[Mark], tell: Callable[[int], None]
    ) -> Slot: ...
    def known(self, prompt_ids: Sequence[int]) -> tuple[int, int]: ...
    def find_evidence_heads(self, prompt: list[int], questions: list[Question]) -> None: ...
    def memory(self) -> Memory: ...
    def close(self) -> None: ...


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


@dataclass(eq=False)
class Job:
    """A request on its way; the worker and the consumer's `Generation` share it."""

    request: GenerationRequest
    on_done: Callable[[Done], None] | None
    events: queue.SimpleQueue[Event] = field(default_factory=queue.SimpleQueue)
    finished: threading.Event = field(default_factory=threading.Event)
    cancelled: bool = False
    place: int = 0


class Generation:
    """One answer: iterate over its events, the last of which is `Done` or `Failed`.

    Leaving the loop early, closing the iterator or dropping the object cancels the request.
    """

    def __init__(self, engine: Engine, job: Job) -> None:
        self._engine = engine
        self._job = job
        self._ended = False

    @property
    def cancelled(self) -> bool:
        """Whether someone asked for the end; the request may still need until its next chunk or token."""
        return self._job.cancelled

    @property
    def finished(self) -> threading.Event:
        """Set once the device has let go of the request."""
        return self._job.finished

    def cancel(self) -> None:
        """End the request: at once in the queue, else at its next chunk or token. Any thread, any number of times."""
        self._engine._cancel(self._job)

    def next_event(self, timeout: float | None = None) -> Event | None:
        """The next event; None after `timeout` seconds without one, or when the last event was already taken."""
        if self._ended:
            return None
        try:
            event = self._job.events.get(timeout=timeout)
        except queue.Empty:
            return None
        self._ended = isinstance(event, Done | Failed)
        return event

    def result(self) -> Done:
        """Wait for the end; raises what the request failed with."""
        for event in self:
            if isinstance(event, Done):
                return event
            if isinstance(event, Failed):
                raise event.error
        raise OctavoError("The events of this answer were already read.")

    def __iter__(self) -> Iterator[Event]:
        try:
            while (event := self.next_event()) is not None:
                yield event
        finally:
            self.cancel()

    def __del__(self) -> None:
        # No lock here: this may run anywhere. The worker drops the job when it meets it.
        self._job.cancelled = True


class Engine:
    """Runs requests one after another; a failing one harms no other."""

    def __init__(
        self, runner: Runner, detok_factory: Callable[[Sequence[str]], Detokenizer], cost: CostModel | None = None
    ) -> None:
        self.runner = runner
        self.cost = cost or CostModel()
        self.timings = Timings()
        self.totals = Totals()
        self._detok_factory = detok_factory
        self._queue: deque[Job] = deque()
        self._running: Job | None = None
        self._closed = False
        self._changed = threading.Condition(threading.RLock())
        self._thread = threading.Thread(target=self._work, name="octavo-engine", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether a request runs or waits."""
        with self._changed:
            return self._running is not None or bool(self._queue)

    @property
    def waiting(self) -> int:
        """Requests in line behind the one that runs."""
        return len(self._queue)

    def submit(self, request: GenerationRequest, on_done: Callable[[Done], None] | None = None) -> Generation:
        """Put a request in line. `on_done` is called in the worker before the `Done` event is sent."""
        if not request.prompt_ids:
            raise ValueError("The prompt is empty.")
        check_sampling(request.sampling)
        job = Job(request, on_done)
        with self._changed:
            if self._closed:
                raise OctavoError("The engine is closed.")
            self._queue.append(job)
            if self._running is not None or len(self._queue) > 1:
                self._tell_places()
            self._changed.notify()
        return Generation(self, job)

    def settle(self, chat_id: str, seconds: float) -> None:
        """Wait until no request of a chat runs or waits, at most so long."""
        with self._changed:
            jobs = [job for job in (*self._queue, self._running) if job is not None and job.request.chat_id == chat_id]
        for job in jobs:
            job.finished.wait(seconds)

    def close(self) -> None:
        """Cancel everything and wait until the device is idle."""
        with self._changed:
            self._closed = True
            jobs = [*self._queue, *([self._running] if self._running else [])]
            self._changed.notify()
        for job in jobs:
            self._cancel(job)
        if threading.current_thread() is not self._thread:
            self._thread.join()
            self.runner.close()

    def _cancel(self, job: Job) -> None:
        with self._changed:
            job.cancelled = job.cancelled or not job.finished.is_set()
            if job not in self._queue:
                return
            self._queue.remove(job)
            self._tell_places()
        self._finish(job, self._cancelled(job))

    def _tell_places(self) -> None:
        for place, job in enumerate(list(self._queue), 1):
            if job.place != place:
                job.place = place
                job.events.put(Queued(place))

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait()
                if not self._queue:
                    return
                job = self._running = self._queue.popleft()
                self._tell_places()
            try:
                event: Event = self._cancelled(job) if job.cancelled else self._run(job)
            except BaseException as error:  # the worker must outlive whatever a request does
                event = _failed(error)
            with self._changed:
                self._running = None
            self._finish(job, event)
            del job, event  # nothing of a request outlives it here while the worker waits

    def _finish(self, job: Job, event: Event) -> None:
        if isinstance(event, Done) and job.on_done is not None:
            try:
                job.on_done(event)
            except Exception as error:
                event = _failed(error)
        self.totals.ended(event.finish_reason if isinstance(event, Done) else "failed")
        job.finished.set()  # first: whoever gets the last event may ask again at once
        job.events.put(event)

    def _cancelled(self, job: Job) -> Done:
        usage = Usage(prompt_tokens=len(job.request.prompt_ids))
        return Done("cancelled", "", (), usage, Timings(), self.runner.memory())

    def _run(self, job: Job) -> Done:
        request = job.request
        prompt = request.prompt_ids
        room = answer_room(len(prompt), self.runner.capacity, request.sampling.max_new_tokens)

        def tell(tokens: int) -> None:
            job.events.put(Opening(tokens, len(prompt)))
            if job.cancelled:
                raise _Stopped

        try:
            slot = self.runner.start(prompt, request.chat_id, request.marks, tell)
        except _Stopped:
            return self._cancelled(job)
        try:
            endless = self.runner.capacity is None
            answer = _Answer(job, slot, room, self._detok_factory(request.sampling.stop), endless)
            if request.evidence:
                slot.watch()
            reason = answer.write() if answer.read(self.runner.chunk, self.cost) else "cancelled"
            looked = slot.looked() if request.evidence else None
            if request.chat_id is not None and slot.length:
                slot.publish(request.chat_id)
            else:
                slot.discard()
        except BaseException:
            _discard(slot)
            raise
        self.timings = answer.timings(self.timings)
        usage = Usage(len(prompt), slot.cached, len(answer.ids))
        answer.add_to(self.totals, usage)
        return Done(
            reason,
            "".join(answer.parts),
            tuple(answer.ids),
            usage,
            answer.timings(Timings()),
            self.runner.memory(),
            looked,
        )


class _Stopped(Exception):
    """Cancelled while something was coming back from disk."""


class _Answer:
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


def _discard(slot: Slot) -> None:
    try:
        slot.discard()
    except Exception:
        log.exception("A failed request's cache could not be freed.")


def _failed(error: BaseException) -> Failed:
    """Failed, with nothing held: a traceback's frames keep every tensor of the failed step alive."""
    log.debug("A request failed.", exc_info=error)
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return Failed(error if isinstance(error, Exception) else RuntimeError(repr(error)))
