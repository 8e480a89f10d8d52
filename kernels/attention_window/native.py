"""One query a head over sinks and ring in C, in fp32."""

from __future__ import annotations

from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from kernels import native
from kernels.attention_decode.native import SOURCE
from kernels.attention_window import ref


def declines(device: torch.device, head_dim: int, dtype: torch.dtype, group: int = 1) -> str | None:
    """Serves windows in fp16 on x86 processors with AVX-512."""
    if dtype != torch.float16:
        return f"for windows in float16, not {str(dtype).removeprefix('torch.')}"
    if head_dim % 16 or head_dim > 256:
        return f"head size {head_dim} is not a multiple of 16 up to 256"
    return native.declines(SOURCE, device)


@cache
def _function():  # type: ignore[no-untyped-def]
    return native.function(SOURCE, "decode_window", *[c_void_p] * 5, *[c_int64] * 4, c_int, c_int, c_float, c_int)


def decode(q: Tensor, near: Tensor, keys: Tensor, values: Tensor, sink: int, held: int, scale: float) -> Tensor:
    """As `ref.decode`; keys and values are fp16."""
    heads, group, d = q.shape
    q, near = q.contiguous(), near.contiguous()
    assert q.dtype == near.dtype == torch.float32 and keys.dtype == values.dtype == torch.float16
    assert keys.stride() == values.stride() and keys.stride()[1:] == (d, 1)
    out = torch.empty(heads, group, d)
    _function()(
        q.data_ptr(),
        near.data_ptr(),
        out.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        keys.stride(0),
        sink,
        held,
        heads,
        group,
        d,
        scale,
        torch.get_num_threads(),
    )
    return out


def step(
    q: Tensor, near: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, sink: int, clock: Tensor, scale: float
) -> Tensor:
    """As `ref.step`."""
    return decode(q, near, keys, values, sink, ref.store(k, v, keys, values, clock), scale)
