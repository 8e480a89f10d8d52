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
from kernels.attention_decode.ref import Packed
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
        *((name, ctypes.c_int64) for name in ("exact_stride", "key_stride", "value_stride", "scale_stride")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("group", "splits", "exact", "blocks")),
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
    reason = layout_of_this.declines(device, head_dim, group)
    if reason:
        return reason
    try:
        _plan(torch.device("cuda", device.index if device.index is not None else torch.cuda.current_device()), head_dim)
    except (nvrtc.CudaError, ValueError) as error:
        return f"cannot be compiled: {str(error).splitlines()[0]}"
    return None


@dataclass(frozen=True)
class _Plan:
    """The compiled kernels of one device and head size."""

    decode: nvrtc.Kernel
    merge: nvrtc.Kernel
    processors: int
    early: bool  # whether the merge may start while the last splits still run


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
        properties.major >= 9,
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

    lengths: int32 [2] on the device, the exact tokens and packed blocks that count, of those that the tensors hold.
    With it, a captured graph serves every length.
    """
    heads, group, d = q.shape
    if layout is not layout_of_this:
        raise ValueError(f"packed by {layout.__name__}, not by {layout_of_this.__name__}")
    if exact_k.dtype != torch.float16 or exact_k.stride() != exact_v.stride() or exact_k.stride()[1:] != (d, 1):
        exact_k, exact_v = exact_k.to(torch.float16).contiguous(), exact_v.to(torch.float16).contiguous()
    q = q.contiguous()
    plan = _plan(q.device, d)
    splits = splits_for(heads, plan.processors)
    out = torch.empty_like(q)
    partial = q.new_empty(heads * splits * group * (d + 2))
    params = _Params(
        q.data_ptr(),
        exact_k.data_ptr(),
        exact_v.data_ptr(),
        packed.keys.data_ptr(),
        packed.values.data_ptr(),
        packed.scales.data_ptr(),
        packed.table.data_ptr(),
        None if lengths is None else lengths.data_ptr(),
        partial.data_ptr(),
        partial.data_ptr() + 4 * heads * splits * group * d,
        out.data_ptr(),
        2 * exact_k.stride(0),
        packed.keys.stride(0),
        packed.values.stride(0),
        2 * packed.scales.stride(0),
        scale * _LOG2_E,
        group,
        splits,
        exact_k.shape[1],
        packed.table.numel(),
    )
    plan.decode.launch(splits, heads, params)
    plan.merge.launch(group, heads, params, early=plan.early)
    return out
