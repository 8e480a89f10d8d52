"""A question and its answer as it comes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from app.chat import Chat, Selection, Turn
from app.engine.generation import Generation
from app.engine.types import Done, Event, Failed, Opening, Progress, Queued, SamplingParams, Token
from app.errors import describe
from app.service import ChatService
from app.ui.pieces import Pieces

log = logging.getLogger("octavo.ui")

KEEP_S = 5.0  # a growing answer is written to disk this often: a program that is killed loses no more of it

Phase = Literal["starting", "loading", "queued", "opening", "reading", "answering", "done"]


class Answer:
    """The answer to one turn, and where it stands.

    A thread of its own takes the engine's events, so that a page that is slow or gone never holds the engine. The page
    looks at `version` as often as it likes and shows the newest state. `sources` are the documents to read for it; with
    `resumed` it goes on where it was cut, and `text` begins with what is there.
    """

    def __init__(
        self,
        turn: Turn,
        sources: Sequence[Selection],
        sampling: SamplingParams | None = None,
        resumed: bool = False,
    ) -> None:
        self.turn_id = turn.id
        self.sources = tuple(sources)
        self._turn = turn
        self._sampling = sampling
        self._resumed = resumed
        self._model = turn.model
        self.phase: Phase = "starting"
        self.place = 0
        self.opening: Opening | None = None
        self.progress: Progress | None = None
        self.progress_at = 0.0
        self.text = turn.answer if resumed else ""
        self.pieces = Pieces()  # of the text, as it is shown
        self.tokens = 0
        self.began_at = 0.0
        self.done: Done | None = None
        self.error: Exception | None = None
        self.version = 0
        self._stop = threading.Event()
        self.finished = threading.Event()
        self._generation: Generation | None = None
        self._lock = threading.Lock()

    @property
    def ms_per_token(self) -> float:
        """Of the answer so far; 0 before its second token."""
        return (time.monotonic() - self.began_at) * 1000 / (self.tokens - 1) if self.tokens > 1 else 0.0

    @property
    def seconds_left(self) -> float:
        """Of reading, counted down since the last chunk; 0 when nothing is known."""
        if self.progress is None:
            return 0.0
        return max(0.0, self.progress.seconds_left - (time.monotonic() - self.progress_at))

    @property
    def share_read(self) -> float:
        """From 0 to 1; moves on between chunks as the estimate has it."""
        if self.progress is None or self.progress.total == 0:
            return 0.0
        done, total, left = self.progress.done, self.progress.total, self.progress.seconds_left
        if left > 0:
            done += int((total - done) * min(0.95, 1 - self.seconds_left / left))
        return done / total

    @property
    def stopping(self) -> bool:
        """Whether it was asked to stop."""
        return self._stop.is_set()

    def start(
        self,
        service: ChatService,
        chat: Chat,
        after: Answer | None,
        keep: Callable[[], None],
        ended: Callable[[Answer], None],
    ) -> None:
        """Begin in the background, once `after` has ended and the model is there.

        `keep` is called now and then, to save the words that came so far; `ended` is called last.
        """
        self._keep, self._ended = keep, ended
        threading.Thread(target=self._run, args=(service, chat, after), name="answer", daemon=True).start()

    def stop(self) -> None:
        """Stop at the next chunk or token; does nothing when it has ended."""
        with self._lock:
            if self.finished.is_set():
                return
            self._stop.set()
            self.version += 1
            if self._generation is not None:
                self._generation.cancel()

    def _run(self, service: ChatService, chat: Chat, after: Answer | None) -> None:
        try:
            if after is not None:
                after.finished.wait()
            while not service.ready:
                if service.load_error is not None:
                    raise service.load_error
                self._enter("loading")
                if self._stop.wait(0.1):
                    return
            if self._stop.is_set():
                return
            self._enter("starting")
            self._model = str(service.status()["model"])
            if self._resumed:
                generation = service.resume(chat, self.turn_id, self._sampling)
            else:
                generation = service.ask(chat, self._turn.question, self.sources, self._sampling, self._turn)
            with self._lock:
                self._generation = generation
                if self._stop.is_set():
                    generation.cancel()
            kept_at = 0.0
            for event in generation:
                self._take(event)
                if isinstance(event, Token) and time.monotonic() - (kept_at or self.began_at) >= KEEP_S:
                    self._keep()
                    kept_at = time.monotonic()
        except Exception as error:
            self.error = error
        finally:
            if self.error is not None and describe(self.error)[1] >= 500:
                log.error("An answer failed", exc_info=self.error)
            try:
                self._note_end(chat)
                self._ended(self)
            finally:
                with self._lock:
                    self.finished.set()
                    self.phase = "done"
                    self.version += 1

    def _note_end(self, chat: Chat) -> None:
        """What the chat says of a turn that has ended: which model answered, and why where there is not a word."""
        turn = chat.update(self.turn_id, model=self._model)
        if self.error is not None:
            more = len(self.text) > len(turn.answer)  # what came of it stays to be read; ids are made anew from it
            said: dict[str, Any] = {"answer": self.text, "answer_ids": ()} if more else {}
            reason = turn.finish_reason if turn.answered else "failed"
            chat.update(turn.id, finish_reason=reason, error=describe(self.error)[0], **said)
        elif not turn.answered:
            chat.update(turn.id, finish_reason="cancelled")

    def _enter(self, phase: Phase) -> None:
        if self.phase != phase:
            self.phase = phase
            self.version += 1

    def _take(self, event: Event) -> None:
        match event:
            case Queued(place):
                self.phase, self.place = "queued", place
            case Opening():
                self.phase, self.opening = "opening", event
            case Progress():
                self.phase, self.progress, self.progress_at = "reading", event, time.monotonic()
            case Token(text):
                if not self.tokens:
                    self.began_at = time.monotonic()
                self.phase = "answering"
                self.tokens += 1
                self.text += text
            case Done():
                self.done = event
                self.text = self._turn.answer * self._resumed + event.text
            case Failed():
                self.error = event.error
        self.version += 1
