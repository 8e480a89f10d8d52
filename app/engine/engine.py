"""One worker thread owns the device; requests wait in line and come back as events."""

from __future__ import annotations

import gc
import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from app.engine.answer import Answer, Slot, answer_room
from app.engine.detokenize import Detokenizer
from app.engine.generation import Generation, Job, Work
from app.engine.sampler import check_sampling
from app.engine.stats import CostModel, Totals
from app.engine.types import Done, Event, Failed, GenerationRequest, Mark, Memory, Opening, Queued, Timings, Usage
from app.errors import OctavoError
from models.evidence import Question

log = logging.getLogger(__name__)


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
    def start(self, prompt_ids: Sequence[int], marks: Sequence[Mark], tell: Callable[[int], None]) -> Slot: ...
    def known(self, prompt_ids: Sequence[int]) -> tuple[int, int]: ...
    def find_evidence_heads(self, prompt: list[int], questions: list[Question]) -> None: ...
    def memory(self) -> Memory: ...
    def close(self) -> None: ...


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
        self._queue: deque[Job | Work] = deque()
        self._running: Job | Work | None = None
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
        """Put a request in line. `on_done` is called in the worker before the `Done` event is sent.

        What `between` does is itself the worker: its requests run at once.
        """
        if not request.prompt_ids:
            raise ValueError("The prompt is empty.")
        check_sampling(request.sampling)
        job = Job(request, on_done)
        if threading.current_thread() is self._thread:
            self._finish(job, self._answer(job))
            return Generation(job, self._cancel)
        with self._changed:
            if self._closed:
                raise OctavoError("The engine is closed.")
            self._queue.append(job)
            if self._running is not None or len(self._queue) > 1:
                self._tell_places()
            self._changed.notify()
        return Generation(job, self._cancel)

    def settle(self, chat_id: str, seconds: float) -> None:
        """Wait until no request of a chat runs or waits, at most so long."""
        with self._changed:
            jobs = [job for job in (*self._queue, self._running) if isinstance(job, Job)]
        until = time.monotonic() + seconds
        for job in jobs:
            if job.request.chat_id == chat_id:
                job.finished.wait(max(0.0, until - time.monotonic()))

    def between(self, do: Callable[[], None]) -> None:
        """Have the worker do something when what was submitted before has ended, and wait until it has.

        What is submitted meanwhile waits in line. Raises what `do` raises.
        """
        work = Work(do)
        with self._changed:
            if self._closed:
                raise OctavoError("The engine is closed.")
            self._queue.append(work)
            self._changed.notify()
        work.finished.wait()
        if work.error is not None:
            raise work.error

    def close(self) -> None:
        """Cancel everything and wait until the device is idle."""
        with self._changed:
            self._closed = True
            jobs = [job for job in (*self._queue, self._running) if isinstance(job, Job)]
            for work in [work for work in self._queue if isinstance(work, Work)]:
                self._queue.remove(work)
                work.error = OctavoError("The engine is closed.")
                work.finished.set()
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
            if isinstance(job, Job) and job.place != place:
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
            if isinstance(job, Work):
                try:
                    job.do()
                except BaseException as error:
                    job.error = error
            else:
                event = self._answer(job)
            with self._changed:
                self._running = None
            if isinstance(job, Work):
                job.finished.set()
            else:
                self._finish(job, event)
                del event  # nothing of a request outlives it here while the worker waits
            del job

    def _answer(self, job: Job) -> Done | Failed:
        try:
            return self._cancelled(job) if job.cancelled else self._run(job)
        except BaseException as error:  # the worker must outlive whatever a request does
            return _failed(error)

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
            slot = self.runner.start(prompt, request.marks, tell)
        except _Stopped:
            return self._cancelled(job)
        try:
            endless = self.runner.capacity is None
            answer = Answer(job, slot, room, self._detok_factory(request.sampling.stop), endless)
            if request.question is not None:
                slot.watch(*request.question)
            reason = answer.write() if answer.read(self.runner.chunk, self.cost) else "cancelled"
            looked = slot.looked() if request.question is not None else None
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


def _discard(slot: Slot) -> None:
    try:
        slot.discard()
    except Exception:
        log.exception("A failed request's cache could not be freed.")


def _failed(error: BaseException) -> Failed:
    log.debug("A request failed.", exc_info=error)
    let_go(error)
    return Failed(error if isinstance(error, Exception) else RuntimeError(repr(error)))


def let_go(error: BaseException) -> None:
    """Have an error hold nothing: a traceback's frames keep every tensor of the failed step alive."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
