"""The sizes of a model's cache: which heads keep what, in which formats."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch

from kernels import cpu
from kernels.attention_prefill import BLOCKS, WINDOW
from models.config import ModelConfig
from quant import kv4

# Tokens of a block, and first tokens that stay unpacked. A GPU's kernels take both as 128. On a CPU, where a model is
# small and so is a chat, what stays unpacked would be the larger part of a short one: a block is one packing panel.
_BLOCKS = {"cpu": (64, 32), "cuda": (128, 128)}

# --kv: bits of the packed history, dtype of everything that stays unpacked
_FORMATS = {
    "kv4": (4, torch.float16),
    "kv8": (8, torch.float16),
    "bf16": (16, torch.bfloat16),
    "fp16": (16, torch.float16),
    "fp32": (16, torch.float32),
}


def _on_cpu(bits: int, exact: torch.dtype, head_dim: int) -> torch.dtype:
    """What attention runs in: bf16 where torch or, for a packed history, the kernels in C are faster in it."""
    if exact == torch.float32:
        return exact
    device, dtype = torch.device("cpu"), torch.bfloat16
    kernels = (
        BLOCKS.choose(device, head_dim=kv4.width(head_dim, bits), packed=bits < 16, dtype=dtype),
        WINDOW.choose(device, head_dim=head_dim, exact=exact, dtype=dtype),
    )
    ours = all(chosen.backend.run is not None for chosen in kernels)
    return dtype if ours or cpu.fast_bf16() else torch.float32


@dataclass(frozen=True)
class CacheShape:
    """Heads a layer (retrieval, streaming), head size, window sizes in tokens, and how KV is stored.

    `bits` 4 or 8 packs the history of retrieval heads; 16 keeps it in `exact_dtype`. `compute_dtype` is what prefill
    attention runs in. `rotate` false packs keys as they are, to tell what rotation gains. Of a 4-bit cache's retrieval
    heads, `wide_heads` a layer are kept in 8 bits; they lie in front of the others. Retrieval heads keep their first
    `front` tokens as they are, and pack the others in blocks of `block`.
    """

    retrieval_heads: tuple[int, ...]
    streaming_heads: tuple[int, ...]
    group: int
    head_dim: int
    sink: int
    recent: int
    bits: int
    exact_dtype: torch.dtype
    compute_dtype: torch.dtype
    rotate: bool = True
    wide_heads: tuple[int, ...] = ()
    block: int = 128
    front: int = 128

    @classmethod
    def for_model(
        cls,
        config: ModelConfig,
        mask: np.ndarray,
        kv: str,
        sink: int,
        recent: int,
        device: torch.device,
        wide: np.ndarray | None = None,
    ) -> CacheShape:
        """For a bool mask [layers, kv_heads], True for a retrieval head; kv is "kv4", "kv8", "bf16", "fp16" or "fp32".

        wide: bool of the same shape, those of a 4-bit cache's retrieval heads that keep 8 bits.
        """
        bits, exact = _FORMATS[kv]
        compute = exact if device.type != "cpu" else _on_cpu(bits, exact, config.head_dim)
        kept = tuple(int(n) for n in mask.sum(1))
        dropped = tuple(config.num_kv_heads - n for n in kept)
        group = config.num_heads // config.num_kv_heads
        block, front = _BLOCKS[device.type]
        shape = cls(kept, dropped, group, config.head_dim, sink, recent, bits, exact, compute, block=block, front=front)
        if wide is None or not wide.any():
            return shape
        assert bits == 4 and not (wide & ~mask).any()
        return replace(shape, wide_heads=tuple(int(n) for n in wide.sum(1)))

    @cached_property
    def parts(self) -> tuple[CacheShape, ...]:
        """The kinds of retrieval heads, each as if it were alone, in the order in which their heads lie in a layer."""
        if not any(self.wide_heads):
            return (self,)
        narrow = tuple(kept - wide for kept, wide in zip(self.retrieval_heads, self.wide_heads, strict=True))
        wide = replace(self, retrieval_heads=self.wide_heads, wide_heads=(), bits=8)
        return (wide, replace(self, retrieval_heads=narrow, wide_heads=())) if any(narrow) else (wide,)

    @property
    def width(self) -> int:
        """Channels of a retrieval head's stored vector, where all of them are of one kind."""
        return kv4.width(self.head_dim, self.bits)

    @property
    def scale(self) -> float:
        """What a product of a query with a stored key is times, where all heads are of one kind."""
        return kv4.score_scale(self.head_dim, self.bits)

    @cached_property
    def stored_channels(self) -> tuple[int, ...]:
        """For each layer, channels of the stored vectors of one token's retrieval heads, keys or values."""
        each = [[heads * part.width for heads in part.retrieval_heads] for part in self.parts]
        return tuple(map(sum, zip(*each, strict=True)))

    @cached_property
    def retrieval_slots(self) -> tuple[slice, ...]:
        """For each layer, its rows in storage that lists the retrieval heads of all layers."""
        return _slices(self.retrieval_heads)

    @cached_property
    def streaming_slots(self) -> tuple[slice, ...]:
        """For each layer, its rows in storage that lists the streaming heads of all layers."""
        return _slices(self.streaming_heads)

    @property
    def rotated(self) -> bool:
        """Whether keys, queries and values of retrieval heads are rotated before they are stored."""
        return self.bits < 16 and self.rotate

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token of history takes, over all retrieval heads."""
        if self.bits == 16:
            return sum(self.retrieval_heads) * 2 * self.head_dim * self.exact_dtype.itemsize
        return sum(sum(part.retrieval_heads) * kv4.bytes_per_token(self.head_dim, part.bits) for part in self.parts)

    def packed_blocks(self, length: int) -> int:
        """Blocks that are full, and so packed, in a sequence of `length` tokens."""
        return max(length - self.front, 0) // self.block

    @property
    def exact_tokens(self) -> int:
        """Room for tokens of a retrieval head that are not packed: the first ones, and the newest block."""
        return self.front + self.block

    @property
    def exact_bytes(self) -> int:
        """Bytes of a sequence's unpacked tokens."""
        return sum(self.stored_channels) * 2 * self.exact_tokens * self.exact_dtype.itemsize

    @property
    def window_bytes(self) -> int:
        """Bytes of a sequence's streaming windows."""
        return sum(self.streaming_heads) * 2 * (self.sink + self.recent) * self.head_dim * self.exact_dtype.itemsize


def _slices(counts: tuple[int, ...]) -> tuple[slice, ...]:
    ends = list(accumulate(counts))
    return tuple(slice(end - count, end) for count, end in zip(counts, ends, strict=True))
