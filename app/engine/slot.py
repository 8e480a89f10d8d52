"""Runs the model over one request: prefill chunk by chunk, then a token a step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Sequence
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
import torch

from app.engine.sampler import Sampler, check_token
from app.engine.snapshots import LEAST_TOKENS
from app.engine.types import Mark, SamplingParams
from models.cache.duo import DuoCache
from models.cache.sequence import SequenceCache
from models.evidence import Looked, Watch, weigh

if TYPE_CHECKING:
    from app.engine.runner import Runner

CHECKPOINT_S = 20.0  # a long prefill is saved this often, so that a crash costs no more of it
EARLY = 128  # a prompt that is asked again reads at most this many tokens, and its question as far as it is watched
WATCHED = 128  # tokens at a question's end: what a longer one asks mostly stands there


class Slot:
    """One request's sequence while it runs."""

    def __init__(self, runner: Runner, prompt: np.ndarray, cache: SequenceCache, marks: Sequence[Mark] = ()) -> None:
        self._runner = runner
        self._prompt = prompt
        self._cache = cache
        self._documents = [mark for mark in marks if mark.label]
        self._marks = [mark for mark in marks if cache.length < mark.position < len(prompt)]
        self._saved_at = time.monotonic()
        self.cached = cache.length
        self._ids: list[int] = prompt[: cache.length].tolist()
        self._early: tuple[list[int], SequenceCache] | None = None
        self._running: deque[tuple[int, torch.cuda.Event]] = deque()  # lengths that the device is on its way to
        self._settled = cache.length
        self._watch: Watch | None = None
        self._watched = len(prompt) - 1  # from this token on
        self._over = False  # the cache is somebody else's

    @property
    def length(self) -> int:
        """Committed tokens."""
        return self._cache.length

    def prefill(self, chunk_ids: Sequence[int]) -> None:
        """Reads a chunk of the prompt.

        Where a document ends, a copy is kept for other chats and on disk. Where the prompt ends, a copy is kept from
        just before, so that the same prompt can be asked again and its question is watched again.
        """
        while self._marks and self._marks[0].position <= self.length + len(chunk_ids):
            mark = self._marks.pop(0)
            upto = mark.position - self.length
            self._read(chunk_ids[:upto])
            chunk_ids = chunk_ids[upto:]
            self._runner.prefixes.keep(self._prompt[: self.length], self._cache.fork(), mark.chat_id)
            if mark.label:
                self._save((mark.label,), wait=True)
            if not chunk_ids:
                return
        early = self._watched // EARLY * EARLY - self.length
        if 0 <= early < len(chunk_ids):
            if early:
                self._read(chunk_ids[:early])
                chunk_ids = chunk_ids[early:]
            if self.length > self.cached:
                self._early = list(self._ids), self._cache.fork()
        self._read(chunk_ids)
        if time.monotonic() - self._saved_at > CHECKPOINT_S and self.length <= self._watched:
            self._save()

    def settle(self, least: int) -> int:
        """Waits until the device has read the first `least` tokens; how many it has read."""
        while self._running and (self._running[0][0] <= least or self._running[0][1].query()):
            self._settled, event = self._running.popleft()
            event.synchronize()
        return self._settled if self._running else self.length

    def answer(self, sampling: SamplingParams, room: int | None) -> Generator[int]:
        """The answer's tokens, `room` at most; a token is in the cache once the next one was asked for."""
        sampler, runner, cache = Sampler(sampling), self._runner, self._cache
        if runner.graph is not None:
            reserve = lambda length: runner.make_room(lambda: cache.reserve(length))  # noqa: E731
            yield from runner.graph.answer(cache, self._ids, self._logits, sampler, room, reserve)
            return
        for number in count(1) if room is None else range(1, room + 1):
            token = int(sampler.sample(self._logits))
            check_token(token, number)
            yield token
            self._read((token,))

    def watch(self, frame: int, question: int) -> None:
        """Keeps what tells where question and answer look; the question is the prompt's tokens from `question` on.

        What frames it, from `frame` on, tells where every question looks.
        """
        if self._runner.evidence_heads and isinstance(self._cache, DuoCache):
            self._watch = Watch(self._runner.evidence_heads, question=question)
            self._watched = max(frame, len(self._prompt) - WATCHED)

    def looked(self) -> Looked | None:
        """Where in the prompt question and answer looked so far; None without `watch`, or before all of it is read."""
        if self._watch is None or not isinstance(self._cache, DuoCache) or self.length < len(self._prompt):
            return None
        return weigh(self._cache, self._watch, len(self._prompt))

    def _read(self, ids: Sequence[int]) -> None:
        """Reads tokens; `_logits`, fp32 [vocabulary], are then those behind the last one."""
        runner = self._runner
        runner.make_room(lambda: self._cache.reserve(self.length + len(ids)))
        watched = self.length + len(ids) - self._watched
        if self._watch is not None and watched > 0 and isinstance(self._cache, DuoCache):
            self._watch.rows, self._cache.watch = watched, self._watch
        try:
            hidden = runner.decoder.forward(torch.tensor(ids, dtype=torch.int64), self._cache)
            self._logits = runner.decoder.logits(hidden[-1:])[0]
            if self._logits.is_cuda and len(ids) > 1:
                event = torch.cuda.Event(blocking=True)
                event.record()
                self._running.append((self.length, event))
        except torch.OutOfMemoryError:
            # What was kept for later holds memory of its own: without it a request of a fitting size works again.
            while runner.prefixes.drop_oldest():
                pass
            raise
        self._ids += ids

    def _save(self, labels: Sequence[str] = (), wait: bool = False) -> None:
        """Have the committed tokens written to disk, where enough of them are not there yet."""
        self._saved_at = time.monotonic()
        if (snapshots := self._runner.snapshots) is None or not isinstance(self._cache, DuoCache):
            return
        ids = np.asarray(self._ids, dtype=np.int64)
        if labels or len(ids) - snapshots.length(ids) >= LEAST_TOKENS:
            begun = 1 + sum(mark.position < len(ids) for mark in self._documents)  # one may be read in part
            holds = [mark.label for mark in self._documents[:begun]]
            snapshots.save(ids, self._cache.fork(), labels, wait, holds)

    def publish(self, chat_id: str) -> None:
        """Keeps the committed tokens for the chat's next turn; the slot must not be used after it.

        Of a prompt that was stopped amid its question those before it, so that all of it is watched the next time.
        """
        if self._watched < self.length < len(self._prompt):
            if self._early is None:  # where it started from is kept already
                self.discard()
                return
            self._cache.release()
            (self._ids, self._cache), self._early = self._early, None
        self._save()
        if isinstance(self._cache, DuoCache):
            self._cache.watch = None
            self._cache.trim()
        early, self._early = self._early, None
        if early is not None:
            self._runner.prefixes.keep(*early, chat_id)
        self._over = True
        self._runner.prefixes.keep(self._ids, self._cache, chat_id)

    def discard(self) -> None:
        """Gives back what `publish` did not take over; the slot must not be used after it."""
        early, self._early = self._early, None
        if early is not None:
            early[1].release()
        if not self._over:
            self._over = True
            self._cache.release()
