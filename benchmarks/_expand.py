"""What a cache costs that is kept in 4 bits but expanded to bf16 buffers before attention, in every step."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks._report import Wrong
from models.cache.shape import CacheShape


@triton.jit
def _expand(codes, scales, out, tokens, heads, D: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Token-major nibbles [heads, tokens, D / 2] with (step, middle) a token -> bf16 [tokens, heads, D]."""
    head = tl.program_id(1)
    token = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    row = head.to(tl.int64) * tokens + token
    packed = tl.load(codes + row[:, None] * (D // 2) + tl.arange(0, D // 2)[None])
    step = tl.load(scales + row * 2).to(tl.float32)[:, None]
    middle = tl.load(scales + row * 2 + 1).to(tl.float32)[:, None]
    low = ((packed & 15).to(tl.float32) - 8) * step + middle
    high = ((packed >> 4).to(tl.float32) - 8) * step + middle
    to = out + (token[:, None] * heads + head) * D + tl.arange(0, D)[None]
    tl.store(to, tl.interleave(low, high).to(tl.bfloat16))


class ExpandedCache:
    """A full cache of `tokens` for the decoder's one-token steps; windows and appending are left out, in its favour."""

    heads_dtype = torch.float32

    def __init__(self, shape: CacheShape, tokens: int, device: torch.device, attend: Callable[..., Tensor]) -> None:
        self.shape = shape
        self._tokens = tokens
        self._attend = attend
        heads, d = sum(shape.retrieval_heads), shape.head_dim
        self._codes = torch.randint(256, (2, heads, tokens, d // 2), dtype=torch.uint8, device=device)
        self._scales = torch.rand(2, heads, tokens, 2, device=device, dtype=torch.float16).mul_(0.1)
        self._buffers = torch.empty(2, tokens * max(shape.retrieval_heads) * d, dtype=torch.bfloat16, device=device)
        self._position = torch.full((1,), tokens, dtype=torch.int64, device=device)

    def begin(self, n: int) -> Tensor:
        """The position of the one token."""
        return self._position

    def commit(self) -> None:
        """Nothing: every step is the same."""

    def _expanded(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [tokens, heads, d] of a layer's retrieval heads."""
        slots, d = self.shape.retrieval_slots[layer], self.shape.head_dim
        heads = self.shape.retrieval_heads[layer]
        out = self._buffers[:, : self._tokens * heads * d].view(2, self._tokens, heads, d)
        for which in (0, 1):
            part = self._codes[which, slots], self._scales[which, slots], out[which]
            _expand[(self._tokens // 64, heads)](*part, self._tokens, heads, D=d, TILE=64, num_warps=4)
        return out[0], out[1]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [1, heads, d] -> fp32 [1, heads * d]; streaming heads give back their queries."""
        kept = self.shape.retrieval_heads[layer] * self.shape.group
        if not kept:
            return q.reshape(1, -1)
        attended = self._attend(q[0, :kept].to(torch.bfloat16), *self._expanded(layer))
        return torch.cat((attended.float(), q[0, kept:])).reshape(1, -1)

    def check(self) -> None:
        """The expansion of some tokens of the first layer against plain arithmetic; raises Wrong."""
        layer = next(i for i, heads in enumerate(self.shape.retrieval_heads) if heads)
        slots = self.shape.retrieval_slots[layer]
        for which, got in enumerate(self._expanded(layer)):
            codes, scales = self._codes[which, slots, -99:], self._scales[which, slots, -99:].float()
            plain = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).float() - 8
            want = (plain * scales[..., :1] + scales[..., 1:]).transpose(0, 1)
            if not torch.allclose(got[-99:].float(), want, rtol=1e-2, atol=1e-3):
                raise Wrong("the expanded history is not what its codes say")
