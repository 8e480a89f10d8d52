"""The endless cache of the answer that is being written: its length lives on the device.

As with `LiveCache`, nothing about a step depends on the host, so that one captured graph serves every length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention_window import WINDOW_STEP
from models.cache.endless import EndlessCache
from models.cache.shape import CacheShape
from models.rope import EndlessRope


class LiveEndless(EndlessCache):
    """One sequence at a time, in buffers that never move: `take` a cache, then token by token, and `give` it back."""

    def __init__(self, shape: CacheShape, rope: EndlessRope, device: torch.device) -> None:
        super().__init__(shape, rope, device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)  # tokens in front of the next one

    @staticmethod
    def serves(shape: CacheShape, device: torch.device) -> bool:
        """Whether a step can be captured: on a GPU that the window's kernel serves."""
        traits = {"head_dim": shape.head_dim, "group": shape.group, "dtype": shape.exact_dtype}
        return device.type == "cuda" and WINDOW_STEP.choose(device, **traits).backend.name == "triton_split"

    def take(self, cache: EndlessCache) -> None:
        """Continues behind what `cache` holds, which must not be used until `give`."""
        self.keys.copy_(cache.keys)
        self.values.copy_(cache.values)
        self.position.fill_(cache.length)

    def give(self, cache: EndlessCache, length: int) -> None:
        """Gives the sequence back with `length` tokens: all of them, or all but the last one.

        The last one can be taken back: the token whose slot it took is in nobody's sight from its own place on.
        """
        cache.keys.copy_(self.keys)
        cache.values.copy_(self.values)
        cache.length = length

    def catch_up(self, cache: EndlessCache) -> None:
        """Nothing to tell the device before a step: there are no blocks."""

    def queries(self) -> dict[int, Tensor]:
        """No head is watched: none has the whole history to look at."""
        return {}

    def begin(self, n: int) -> Tensor:
        """Makes ready for one token; its position, int64 [1] on the device."""
        assert n == 1
        at, sink, slots = self.position, self.shape.sink, self._slots
        slot = torch.where(at < sink, at, sink + (at - sink) % self.shape.recent)
        self._clock = torch.cat(((at + 1).clamp_max(slots), slot))
        self._back = self.rope.back((at - (slots - 1)).clamp_min(0), self.device) if sink else None
        return at

    def commit(self) -> None:
        """The next token comes behind this one."""
        self.position.add_(1)
