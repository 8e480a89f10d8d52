"""Decode attention over packed blocks as they lie, in C: all heads of a layer in one call."""

from __future__ import annotations

from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels import native
from kernels.attention_decode.ref import Packed
from kernels.kv4_pack import native as pack

SOURCE = Path(__file__).with_name("native.c")


def declines(device: torch.device, head_dim: int, group: int = 1) -> str | None:
    """Serves the layout int4pack on x86 processors with AVX-512."""
    return pack.declines(device, head_dim) or native.declines(SOURCE, device)


@cache
def _function():  # type: ignore[no-untyped-def]
    where, size, number = c_void_p, c_int64, c_int
    pool = (where, size, size, where, size, size, size, where, size, size, where)
    return native.function(
        SOURCE, "decode", *[where] * 4, size, size, *pool, size, number, size, number, number, c_float, number
    )


def decode(q: Tensor, exact_k: Tensor, exact_v: Tensor, packed: Packed, _: Any, scale: float) -> Tensor:
    """As `ref.decode`, in fp32; exact tokens are fp16."""
    heads, group, d = q.shape
    q = q.contiguous()
    assert q.dtype == torch.float32 and exact_k.dtype == exact_v.dtype == torch.float16
    assert exact_k.stride() == exact_v.stride() and exact_k.stride()[1:] == (d, 1)
    out = torch.empty(heads, group, d)
    _function()(
        q.data_ptr(),
        out.data_ptr(),
        exact_k.data_ptr(),
        exact_v.data_ptr(),
        exact_k.stride(0),
        exact_k.shape[1],
        *pack.pool_arguments(packed.keys, packed.values, packed.scales),
        packed.table.data_ptr(),
        packed.table.numel(),
        pack.tokens_of_block(packed.scales),
        heads,
        group,
        d,
        scale,
        torch.get_num_threads(),
    )
    return out
