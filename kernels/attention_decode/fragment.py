"""Decode attention on CUDA: fragment.cu over the fragment layout, split over the whole GPU, then merged."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels import nvrtc
from kernels.attention_decode.ref import Held, Packed
from kernels.kv4_pack import fragment as layout_of_this

SOURCE = Path(__file__).with_name("fragment.cu")
MOST_SPLITS = 512  # as in the source
MERGE_THREADS = 512
_LOG2_E = math.log2(math.e)


class _Params(ctypes.Structure):
    """`Params` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "exact_k", "exact_v", "keys", "values", "scales", "table")),
        *((name, ctypes.c_void_p) for name in ("lengths", "partial", "sums", "out")),
        *((name, ctypes.c_void_p) for name in ("new_k", "new_v", "window_k", "window_v")),
        *((name, ctypes.c_int64) for name in ("exact_stride", "key_stride", "value_stride", "scale_stride")),
        ("window_stride", ctypes.c_int64),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("group", "splits", "exact", "blocks", "heads")),
    )


@dataclass(frozen=True)
class Tuning:
    """Warps of a CTA (one CTA a multiprocessor) and tiles that each of them has in shared memory."""

    warps: int
    stages: int

    def shared_bytes(self, head_dim: int) -> int:
        """Dynamic shared memory of a CTA: the rings, and what its warps leave for each other."""
        ring = self.warps * self.stages * (layout_of_this.TILE * (head_dim + 8))
        return ring + 2 * 4 * 8 * self.warps


def tuning(head_dim: int, shared_limit: int) -> Tuning:
    """The ring that measured best where `shared_limit` bytes a CTA hold it, else a smaller one."""
    for choice in (Tuning(12 if head_dim == 64 else 8, 3), Tuning(8, 2), Tuning(4, 2)):
        if choice.shared_bytes(head_dim) <= shared_limit:
            return choice
    raise ValueError(f"{shared_limit} bytes of shared memory hold no ring for head size {head_dim}")


def declines(device: torch.device, head_dim: int, group: int = 1) -> str | None:
    """Serves what the fragment layout serves, if the kernel can be compiled and loaded."""
    return layout_of_this.declines(device, head_dim, group) or nvrtc.cannot_load(
        device, lambda: _plan(nvrtc.indexed(device), head_dim)
    )


@dataclass(frozen=True)
class _Plan:
    """The compiled kernels of one device and head size."""

    decode: nvrtc.Kernel
    merge: nvrtc.Kernel
    processors: int


@cache
def _plan(device: torch.device, head_dim: int) -> _Plan:
    properties = torch.cuda.get_device_properties(device)
    chosen = tuning(head_dim, getattr(properties, "shared_memory_per_block_optin", 48 * 1024))
    defines = {"HEAD_DIM": head_dim, "WARPS": chosen.warps, "STAGES": chosen.stages}
    program = nvrtc.Program(SOURCE, defines, device)
    return _Plan(
        program.kernel("kv4_decode", chosen.warps * 32, chosen.shared_bytes(head_dim)),
        program.kernel("kv4_merge", MERGE_THREADS),
        properties.multi_processor_count,
    )


def splits_for(heads: int, processors: int) -> int:
    """Parts that each head's tokens are cut into: one wave of CTAs, whatever the number of heads."""
    return min(max(processors // heads, 1), MOST_SPLITS)


def decode(
    q: Tensor,
    exact_k: Tensor,
    exact_v: Tensor,
    packed: Packed,
    layout: Any,
    scale: float,
    lengths: Tensor | None = None,
) -> Tensor:
    """As `ref.decode`; q and p are rounded to fp16, sums are kept in fp32.

    lengths: the front of a `ref.Clock` on the device, the exact tokens and packed blocks that count, of those that the
    tensors hold. With it, a captured graph serves every length.
    """
    d = q.shape[-1]
    if layout is not layout_of_this:
        raise ValueError(f"packed by {layout.__name__}, not by {layout_of_this.__name__}")
    if exact_k.dtype != torch.float16 or exact_k.stride() != exact_v.stride() or exact_k.stride()[1:] != (d, 1):
        exact_k, exact_v = exact_k.to(torch.float16).contiguous(), exact_v.to(torch.float16).contiguous()
    return _launch(q.contiguous(), (exact_k, exact_v), packed, scale, lengths)


def step(q: Tensor, k: Tensor, v: Tensor, clock: Tensor, held: Held, layout: Any, scale: float) -> Tensor:
    """As `ref.step`, in two launches whose shapes do not depend on the clock; all tensors are contiguous."""
    assert layout is layout_of_this
    return _launch(q, held.exact, held.packed, scale, clock, (k, v), held.windows)


def _launch(
    q: Tensor,
    exact: tuple[Tensor, Tensor],
    packed: Packed,
    scale: float,
    lengths: Tensor | None,
    new: tuple[Tensor, Tensor] | None = None,
    windows: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Both kernels. A CTA for each window, and the splits of the heads with a history over the other processors."""
    _, group, d = q.shape
    plan = _plan(q.device, d)
    heads, streaming = exact[0].shape[0], 0 if windows is None else windows[0].shape[0]
    splits = splits_for(heads, plan.processors - streaming) if heads else 1
    out = torch.empty_like(q)
    partial = q.new_empty(heads * splits * group * (d + 2))
    params = _Params(
        q.data_ptr(),
        exact[0].data_ptr(),
        exact[1].data_ptr(),
        packed.keys.data_ptr(),
        packed.values.data_ptr(),
        packed.scales.data_ptr(),
        packed.table.data_ptr(),
        None if lengths is None else lengths.data_ptr(),
        partial.data_ptr(),
        partial.data_ptr() + 4 * heads * splits * group * d,
        out.data_ptr(),
        *((None, None) if new is None else (x.data_ptr() for x in new)),
        *((None, None) if windows is None else (x.data_ptr() for x in windows)),
        2 * exact[0].stride(0),
        packed.keys.stride(0),
        packed.values.stride(0),
        2 * packed.scales.stride(0),
        0 if windows is None else 2 * windows[0].stride(0),
        scale * _LOG2_E,
        group,
        splits,
        exact[0].shape[1],
        packed.table.numel(),
        heads,
    )
    plan.decode.launch(heads * splits + streaming, 1, params, early=new is not None)
    if heads:
        plan.merge.launch(group, heads, params, early=True)
    return out
