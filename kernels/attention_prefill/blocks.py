"""Attention of a chunk straight over the packed blocks of its history, in C, in bf16."""

from __future__ import annotations

from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from kernels import native
from kernels.attention_decode.ref import Packed
from kernels.kv4_pack import native as pack

SOURCE = Path(__file__).with_name("blocks.c")


def declines(device: torch.device, head_dim: int, packed: bool, dtype: torch.dtype) -> str | None:
    """Serves packed caches in the layout int4pack on x86 processors that multiply bf16, where attention runs in it."""
    if dtype != torch.bfloat16:
        return f"computes in bfloat16, not {str(dtype).removeprefix('torch.')}"
    if not packed:
        return "for a packed cache"
    return native.declines(SOURCE, device, bf16=True) or pack.declines(device, head_dim)


def declines_window(device: torch.device, head_dim: int, dtype: torch.dtype, exact: torch.dtype) -> str | None:
    """Serves windows kept in fp16 on x86 processors that multiply bf16, where attention runs in it."""
    if dtype != torch.bfloat16 or exact != torch.float16:
        return "for windows in float16 and attention in bfloat16"
    if head_dim % 32 or head_dim > 256:
        return f"head size {head_dim} is not a multiple of 32 up to 256"
    return native.declines(SOURCE, device, bf16=True)


@cache
def _functions():  # type: ignore[no-untyped-def]
    where, size, number = c_void_p, c_int64, c_int
    exact = (where, where, size)
    last = (number, number, c_float, number)
    window = native.function(SOURCE, "attend_window", *(where, size) * 2, *exact, *exact, *[size] * 6, *last)
    pool = (where, size, size, where, size, size, size, where, size, size, where)
    blocks = native.function(
        SOURCE, "attend_blocks", *(where, size) * 2, *exact, *exact, size, *pool, number, *[size] * 3, *last
    )
    return blocks, window


def attend(
    q: Tensor, own: tuple[Tensor, Tensor], first: tuple[Tensor, Tensor], packed: Packed, length: int, scale: float
) -> Tensor:
    """fp32 [n, heads * group, d] of queries q (the same shape); products are in bf16.

    first: keys and values fp16 [heads, at most 128, d] of the sequence's first tokens, which are in no block. length:
    tokens between them and the chunk. own: [heads, before + n, d] from the start of the block that the first query lies
    in. packed: its table lists all full blocks, the chunk's included; a block has 64 or 128 tokens.
    """
    (n, rows, d), heads = q.shape, own[0].shape[0]
    out = torch.empty(n, rows, d)
    _functions()[0](
        *_queries(q, out),
        *_exact(own, d),
        *_exact(first, d),
        first[0].shape[1],
        *pack.pool_arguments(packed.keys, packed.values, packed.scales),
        packed.table.data_ptr(),
        pack.tokens_of_block(packed.scales),
        length,
        n,
        heads,
        rows // heads,
        d,
        scale,
        torch.get_num_threads(),
    )
    return out


def attend_window(
    q: Tensor,
    run: tuple[Tensor, Tensor],
    sinks: tuple[Tensor, Tensor],
    sink: int,
    recent: int,
    length: int,
    scale: float,
) -> Tensor:
    """fp32 [n, heads * group, d] of queries q behind `length` tokens, over sinks and a window; products are in bf16.

    run: keys and values fp16 [heads, held + n, d], the chunk's behind those that its first query still sees; sinks:
    [heads, at least min(sink, length + n), d]. A query sees the first `sink` tokens and the `recent` newest, as far as
    they are not behind it; its own counts.
    """
    (n, rows, d), heads = q.shape, run[0].shape[0]
    out = torch.empty(n, rows, d)
    _functions()[1](
        *_queries(q, out),
        *_exact(run, d),
        *_exact(sinks, d),
        sink,
        recent,
        run[0].shape[1] - n,
        length,
        n,
        heads,
        rows // heads,
        d,
        scale,
        torch.get_num_threads(),
    )
    return out


def _queries(q: Tensor, out: Tensor) -> tuple[int, ...]:
    assert q.dtype == torch.float32 and q.stride()[1:] == (q.shape[2], 1)
    return q.data_ptr(), q.stride(0), out.data_ptr(), out.stride(0)


def _exact(pair: tuple[Tensor, Tensor], d: int) -> tuple[int, ...]:
    keys, values = pair
    assert keys.dtype == values.dtype == torch.float16
    assert keys.stride() == values.stride() and keys.stride()[1:] == (d, 1)
    return keys.data_ptr(), values.data_ptr(), keys.stride(0)
