"""A chunk's keys and values into the cache in C: to fp16, and block by block to 4 bits in the layout int4pack."""

from __future__ import annotations

from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from kernels import native
from kernels.kv4_pack import int4pack

SOURCE = Path(__file__).with_name("native.c")


def declines(device: torch.device, head_dim: int) -> str | None:
    """Serves where the cache has the layout int4pack with panels of 64, up to head size 256."""
    if head_dim > 256:
        return f"head size {head_dim} is above 256"
    return int4pack.declines(device, head_dim) or native.declines(SOURCE, device)


@cache
def _functions():  # type: ignore[no-untyped-def]
    exact, size, number = c_void_p, c_int64, c_int
    join = native.function(
        SOURCE, "join_exact", exact, exact, size, exact, exact, *[size] * 4, number, exact, exact, number
    )
    pool = (exact, size, size, exact, size, size, size, exact, size, size)
    write = native.function(
        SOURCE, "write_blocks", exact, exact, size, exact, size, number, size, number, number, c_float, *pool, number
    )
    return join, write


def join_exact(k: Tensor, v: Tensor, held_k: Tensor, held_v: Tensor) -> tuple[Tensor, Tensor]:
    """fp16 [heads, before + n, d] twice: held tokens [heads, before, d], then those of k, v fp32 [n, heads, d]."""
    (n, heads, d), before = k.shape, held_k.shape[1]
    assert k.stride() == v.stride() and k.stride()[1:] == (d, 1) and k.dtype == v.dtype == torch.float32
    assert held_k.stride() == held_v.stride() and held_k.stride()[1:] == (d, 1) and held_k.dtype == torch.float16
    own = torch.empty(2, heads, before + n, d, dtype=torch.float16)
    _functions()[0](
        k.data_ptr(),
        v.data_ptr(),
        k.stride(0),
        held_k.data_ptr(),
        held_v.data_ptr(),
        held_k.stride(0),
        before,
        n,
        heads,
        d,
        own[0].data_ptr(),
        own[1].data_ptr(),
        torch.get_num_threads(),
    )
    return own[0], own[1]


def write_blocks(
    k: Tensor, v: Tensor, wide: bool, share: float, ids: Tensor, keys: Tensor, values: Tensor, scales: Tensor
) -> None:
    """Quantises fp16 k, v [heads, tokens, d] into blocks `ids` (int32) of keys, values, scales as `Packed`.

    wide: to 8 bits, of the upper half of the channels, as two 4-bit halves. share: the part of a vector's range that
    one step is.
    """
    heads, _, d = k.shape
    assert k.stride() == v.stride() and k.stride()[1:] == (d, 1) and k.dtype == v.dtype == torch.float16
    _functions()[1](
        k.data_ptr(),
        v.data_ptr(),
        k.stride(0),
        ids.data_ptr(),
        ids.numel(),
        tokens_of_block(scales),
        heads,
        d,
        wide,
        share,
        *pool_arguments(keys, values, scales),
        torch.get_num_threads(),
    )


def tokens_of_block(scales: Tensor) -> int:
    """Tokens of the blocks that `Packed` scales belong to; one or two panels."""
    tokens = scales.shape[2]
    assert tokens in (64, 128)
    return tokens


def pool_arguments(keys: Tensor, values: Tensor, scales: Tensor) -> tuple[int, ...]:
    """Where packed blocks lie, for C: keys (head, block), values (head, panel, block), scales (head, block)."""
    assert keys.stride(-1) == values.stride(-1) == scales.stride(-1) == 1
    return (
        keys.data_ptr(),
        *keys.stride()[:2],
        values.data_ptr(),
        *values.stride()[:3],
        scales.data_ptr(),
        *scales.stride()[:2],
    )
