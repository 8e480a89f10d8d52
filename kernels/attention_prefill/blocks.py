"""Attention of a chunk straight over the packed blocks of its history, in C on the CPU's matrix units."""

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


def declines(device: torch.device, head_dim: int, bits: int, dtype: torch.dtype) -> str | None:
    """Serves 4-bit caches in the layout int4pack on x86 processors with AMX, where attention runs in bf16."""
    if dtype != torch.bfloat16:
        return f"computes in bfloat16, not {str(dtype).removeprefix('torch.')}"
    if bits != 4:
        return f"for a cache of 4 bits, not {bits}"
    return native.declines(SOURCE, device, matrix_units=True) or pack.declines(device, head_dim)


@cache
def _function():  # type: ignore[no-untyped-def]
    where, size, number = c_void_p, c_int64, c_int
    exact = (where, where, size)
    pool = (where, size, size, where, size, size, size, where, size, size, where)
    return native.function(
        SOURCE,
        "attend_blocks",
        *(where, size) * 2,
        *exact,
        *exact,
        *pool,
        *[size] * 3,
        number,
        number,
        c_float,
        number,
    )


def attend(
    q: Tensor, own: tuple[Tensor, Tensor], first: tuple[Tensor, Tensor], packed: Packed, length: int, scale: float
) -> Tensor:
    """fp32 [n, heads * group, d] of queries q (the same shape) behind `length` tokens; products are in bf16.

    own: keys and values fp16 [heads, before + n, d] from the start of the block that the first query lies in; first:
    [heads, 128, d], the sequence's first block. packed: table[i] is where block i + 1 lies, the chunk's included.
    """
    (n, rows, d), heads = q.shape, own[0].shape[0]
    assert q.dtype == torch.float32 and q.stride()[1:] == (d, 1)
    for keys, values in (own, first):
        assert keys.dtype == values.dtype == torch.float16
        assert keys.stride() == values.stride() and keys.stride()[1:] == (d, 1)
    out = torch.empty(n, rows, d)
    _function()(
        q.data_ptr(),
        q.stride(0),
        out.data_ptr(),
        rows * d,
        own[0].data_ptr(),
        own[1].data_ptr(),
        own[0].stride(0),
        first[0].data_ptr(),
        first[1].data_ptr(),
        first[0].stride(0),
        *pack.pool_arguments(packed.keys, packed.values, packed.scales),
        packed.table.data_ptr(),
        length,
        n,
        heads,
        rows // heads,
        d,
        scale,
        torch.get_num_threads(),
    )
    return out
