"""Decoding on a GPU: one captured graph a token, and the host one step behind."""

from __future__ import annotations

from collections.abc import Callable, Generator
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor

from app.engine.sampler import Sampler, check_token
from models.cache.duo import DuoCache
from models.cache.sequence import SequenceCache, StepCache
from models.decoder import Decoder


class Live(StepCache, Protocol):
    """A cache for one sequence at a time whose length lives on the device: `LiveCache` or `LiveEndless`."""

    position: Tensor

    def take(self, cache: Any) -> None: ...
    def give(self, cache: Any, length: int) -> None: ...
    def catch_up(self, cache: Any) -> None: ...
    def queries(self) -> dict[int, Tensor]: ...


class DecodeGraph:
    """The whole step from a token to the next one's logits as one CUDA graph, whatever the length.

    Sampling follows it on the device, and the step behind a token starts before the host has seen the token.
    """

    def __init__(self, decoder: Decoder, live: Live) -> None:
        self._decoder = decoder
        self.live = live
        self._token = torch.zeros(1, dtype=torch.int64, device=live.position.device)
        self._forward()  # compiles, and makes what is made once
        self._graph = torch.cuda.CUDAGraph()
        # What other threads do on the device meanwhile (a chat on its way to disk) does not spoil the capture.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._logits = self._forward()
        self.late = 0  # steps that the device had to wait for

    def _forward(self) -> Tensor:
        return self._decoder.logits(self._decoder.forward(self._token, self.live))[0]

    def replay(self, token: Tensor) -> Tensor:
        """Reads one token (int64 [1]) of the sequence that was taken; fp32 logits [vocabulary] for the next."""
        self._token.copy_(token.clamp_min(0))  # what could not be sampled ends the answer, one step late
        self._graph.replay()
        return self._logits

    def answer(
        self,
        cache: SequenceCache,
        ids: list[int],
        logits: Tensor,
        sampler: Sampler,
        room: int | None,
        reserve: Callable[[int], None],
    ) -> Generator[int]:
        """The answer behind `ids`, which `cache` holds, as `Slot.answer` gives it; tokens in the cache join `ids`.

        Where the consumer stops, the step behind the last token is under way and is taken back. `reserve` makes room
        in the cache for a length.
        """
        watch = cache.watch if isinstance(cache, DuoCache) else None
        self.live.take(cache)
        try:
            shown = _Arriving(sampler.sample(logits), {})
            for number in count(1):
                following = None
                if number != room:
                    reserve(len(ids) + 1)
                    self.live.catch_up(cache)
                    self.late += number > 1 and shown.here
                    chosen = sampler.sample(self.replay(shown.token))
                    following = _Arriving(chosen, self.live.queries() if watch is not None else {})
                token = shown.wait()
                check_token(token, number)
                yield token
                if following is None:
                    return
                ids.append(token)
                if watch is not None:
                    watch.add_chosen(following.queries)
                shown = following
        finally:
            self.live.give(cache, len(ids))


class _Arriving:
    """A token on its way to the host, with the watched queries of the step that made it."""

    def __init__(self, token: Tensor, queries: dict[int, Tensor]) -> None:
        self.token = token
        self.queries = queries
        self._host = torch.empty(1, dtype=torch.int64, pin_memory=True)
        self._host.copy_(token, non_blocking=True)
        self._event = torch.cuda.Event(blocking=True)
        self._event.record()

    @property
    def here(self) -> bool:
        """Whether the device has finished everything up to this token."""
        return bool(self._event.query())

    def wait(self) -> int:
        """The token, once it is known."""
        self._event.synchronize()
        return int(self._host)
