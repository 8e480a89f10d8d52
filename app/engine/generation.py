"""One request on its way, and its consumer's side: an iterator over events that can be cancelled."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from app.engine.types import Done, Event, Failed, GenerationRequest
from app.errors import OctavoError


@dataclass(eq=False)
class Job:
    """A request on its way; the worker and the consumer's `Generation` share it."""

    request: GenerationRequest
    on_done: Callable[[Done], None] | None
    events: queue.SimpleQueue[Event] = field(default_factory=queue.SimpleQueue)
    finished: threading.Event = field(default_factory=threading.Event)
    cancelled: bool = False
    place: int = 0


@dataclass(eq=False)
class Work:
    """What the worker does between two requests."""

    do: Callable[[], None]
    error: BaseException | None = None
    finished: threading.Event = field(default_factory=threading.Event)


class Generation:
    """One answer: iterate over its events, the last of which is `Done` or `Failed`.

    Leaving the loop early, closing the iterator or dropping the object cancels the request.
    """

    def __init__(self, job: Job, cancel: Callable[[Job], None]) -> None:
        self._job = job
        self._cancel = cancel
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
        self._cancel(self._job)

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
