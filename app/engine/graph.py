"""Decoding on a GPU: one captured graph a token, and the host one step behind."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from itertools import count

import torch
from torch import Tensor

from app.engine.sampler import Sampler, check_token
from kernels.attention_decode import KV4_STEP
from models.cache.duo import DuoCache
from models.cache.live import LiveCache
from models.cache.pool import BlockPool
from models.decoder import Decoder


class DecodeGraph:
    """The whole step from a token to the next one's logits as one CUDA graph, whatever the length.

    Sampling follows it on the device, and the step behind a token starts before the host has seen the token.
    """

    def __init__(self, decoder: Decoder, pool: BlockPool, watched: Iterable[tuple[int, int]] = ()) -> None:
        self._decoder = decoder
        self._live = LiveCache(pool, watched)
        self._token = torch.zeros(1, dtype=torch.int64, device=pool.device)
        self._forward()  # compiles, and makes what is made once
        self._graph = torch.cuda.CUDAGraph()
        # What other threads do on the device meanwhile (a chat on its way to disk) does not spoil the capture.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._logits = self._forward()
        self.late = 0  # steps that the device had to wait for

    @staticmethod
    def serves(pool: BlockPool) -> bool:
        """Whether a step can be captured: a packed cache, on a GPU that the fused kernels serve."""
        if pool.device.type != "cuda" or pool.shape.bits != 4:
            return False
        traits = {"head_dim": pool.shape.head_dim, "group": pool.shape.group}
        return KV4_STEP.choose(pool.device, **traits).backend.name == "fragment"

    def _forward(self) -> Tensor:
        return self._decoder.logits(self._decoder.forward(self._token, self._live))[0]

    def replay(self, token: Tensor) -> Tensor:
        """Reads one token (int64 [1]) of the sequence that was taken; fp32 logits [vocabulary] for the next."""
        self._token.copy_(token.clamp_min(0))  # what could not be sampled ends the answer, one step late
        self._graph.replay()
        return self._logits

    def answer(
        self,
        cache: DuoCache,
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
        self._live.take(cache)
        try:
            shown = _Arriving(sampler.sample(logits), {})
            for number in count(1):
                following = None
                if number != room:
                    reserve(len(ids) + 1)
                    self._live.list_blocks(cache.reserved)
                    self.late += number > 1 and shown.here
                    chosen = sampler.sample(self.replay(shown.token))
                    following = _Arriving(chosen, self._live.queries() if cache.watch is not None else {})
                token = shown.wait()
                check_token(token, number)
                yield token
                if following is None:
                    return
                ids.append(token)
                if cache.watch is not None:
                    cache.watch.add_chosen(following.queries)
                shown = following
        finally:
            self._live.give(cache, len(ids))


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
