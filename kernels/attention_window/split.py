"""Decode attention over sinks and ring in Triton: the new token is written and every slot read once, where it lies.

The slots of a KV head are split over programs (split-KV); their sums are merged by log-sum-exp in a second kernel.
How many slots count and which one is the new token's is read from the device, so a captured graph serves every length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.jit import INTERPRETED, jit, missing, tl, triton

_LOG2_E = 1.4426950408889634
_TILE = 64  # slots a step
_SLOTS = 128  # a program takes at least so many: fewer do not pay for their share of the merge
HEAD_DIMS = (16, 32, 64, 128, 256)


def declines(device: torch.device, head_dim: int, group: int, dtype: torch.dtype) -> str | None:
    """Serves fp16 and bf16 windows on CUDA from sm_80 up where Triton is installed."""
    if head_dim not in HEAD_DIMS:
        return f"head size {head_dim} is not one of {HEAD_DIMS}"
    if group > 64:
        return f"{group} query heads share a KV head; 64 are the most"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"{dtype} is not fp16 or bf16"
    return missing(device, _trial, head_dim)


def _trial(device: torch.device, head_dim: int) -> None:
    row = torch.zeros(1, 1, head_dim, device=device)
    keys, values = torch.zeros(2, 1, _TILE, head_dim, dtype=torch.float16, device=device)
    step(row, row, row[0], row[0], keys, values, 0, torch.tensor([1, 0], device=device), 1.0)


def step(
    q: Tensor, near: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, sink: int, clock: Tensor, scale: float
) -> Tensor:
    """As `ref.step`; keys and values need whole rows, clock is on their device."""
    heads, group, d = q.shape
    slots = keys.shape[1]
    assert keys.stride() == values.stride() and keys.stride(2) == 1 and keys.stride(1) == d
    processors = 8 if INTERPRETED else torch.cuda.get_device_properties(q.device).multi_processor_count
    splits = max(1, min(triton.cdiv(slots, _SLOTS), 2 * processors // heads))
    tiles = triton.cdiv(triton.cdiv(slots, _TILE), splits)
    partial = torch.empty(heads, splits, group, d, dtype=torch.float32, device=q.device)
    sums = torch.empty(heads, splits, group, 2, dtype=torch.float32, device=q.device)
    out = torch.empty(heads, group, d, dtype=torch.float32, device=q.device)
    read = (q.contiguous(), near.contiguous(), k, v, keys, values, clock)
    strides = (k.stride(0), v.stride(0), keys.stride(0))
    sizes = {"GROUP": group, "ROWS": max(16, triton.next_power_of_2(group)), "D": d, "TILE": _TILE}
    # What fits into sm_89's 99 KiB, and into a thread's registers.
    shape = {"num_warps": 4 if d <= 128 else 8, "num_stages": 3 if d <= 64 else 2 if d == 128 else 1}
    _stretch[(splits, heads)](*read, partial, sums, sink, tiles, scale * _LOG2_E, *strides, **sizes, **shape)
    _merge[(heads * group,)](
        partial, sums, out, splits, GROUP=group, D=d, SPLITS=triton.next_power_of_2(splits), num_warps=2
    )
    return out


@jit
def _stretch(  # type: ignore[no-untyped-def]
    q,
    near,
    new_k,
    new_v,
    keys,
    values,
    clock,
    partial,
    sums,
    sink,
    tiles,
    scale,
    k_stride,
    v_stride,
    head_stride,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
):
    split, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    held, at = tl.load(clock), tl.load(clock + 1)
    row, channel = tl.arange(0, ROWS), tl.arange(0, D)
    inside = (row < GROUP)[:, None]
    rows = (head * GROUP + row)[:, None] * D + channel[None]
    stored = keys.dtype.element_ty
    query = tl.load(q + rows, inside, 0.0).to(stored)
    own_k = tl.load(new_k + head * k_stride + channel).to(stored)
    own_v = tl.load(new_v + head * v_stride + channel).to(stored)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, D], tl.float32)
    start = split * tiles * TILE
    end = tl.minimum(start + tiles * TILE, held).to(tl.int32)
    for first in range(start, end, TILE):
        slot = first + tl.arange(0, TILE)
        counts = slot < end
        place = head * head_stride + slot[:, None] * D + channel[None]
        key = tl.load(keys + place, counts[:, None], 0.0)
        value = tl.load(values + place, counts[:, None], 0.0)
        is_new = (slot == at)[:, None]
        key = tl.where(is_new, own_k[None], key)
        value = tl.where(is_new, own_v[None], value)
        tl.store(keys + place, key, is_new & counts[:, None])
        tl.store(values + place, value, is_new & counts[:, None])
        scores = tl.dot(query, tl.trans(key))
        if first < sink:
            closer = tl.dot(tl.load(near + rows, inside, 0.0).to(stored), tl.trans(key))
            scores = tl.where((slot < sink)[None], closer, scores)
        scores = tl.where(counts[None], scores * scale, float("-inf"))
        top = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - top[:, None])
        fade = tl.exp2(best - top)
        mass = mass * fade + tl.sum(weights, 1)
        total = total * fade[:, None] + tl.dot(weights.to(stored), value)
        best = top
    splits = tl.num_programs(0)
    row_of = (head * splits + split) * GROUP + row
    tl.store(partial + row_of[:, None] * D + channel[None], total, inside)
    tl.store(sums + row_of * 2, best, row < GROUP)
    tl.store(sums + row_of * 2 + 1, mass, row < GROUP)


@jit
def _merge(  # type: ignore[no-untyped-def]
    partial, sums, out, splits, GROUP: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr
):
    head, member = tl.program_id(0) // GROUP, tl.program_id(0) % GROUP
    split, channel = tl.arange(0, SPLITS), tl.arange(0, D)
    counts = split < splits
    row = (head.to(tl.int64) * splits + split) * GROUP + member
    best = tl.load(sums + row * 2, counts, float("-inf"))
    factor = tl.exp2(best - tl.max(best, 0))  # a split without tokens has none: its sums are zeros
    mass = tl.sum(tl.load(sums + row * 2 + 1, counts, 0.0) * factor, 0)
    total = tl.load(partial + row[:, None] * D + channel[None], counts[:, None], 0.0)
    tl.store(out + tl.program_id(0).to(tl.int64) * D + channel, tl.sum(total * factor[:, None], 0) / mass)
