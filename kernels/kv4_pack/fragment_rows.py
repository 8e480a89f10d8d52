"""Blocks in fragment order written and read back in Triton: quantised, packed, unpacked and scaled in one pass each.

The order is that of `kernels/kv4_pack/fragment.py`: element (token t, channel c) of a tile of 32 tokens is four bits of
one 32-bit word. The formulas here and the permutations there are two forms of one map; a test holds them together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention_decode.ref import Packed
from kernels.jit import jit, missing, tl

BLOCK = 128  # tokens
HEAD_DIMS = (64, 128, 256)  # powers of two


def declines(device: torch.device, head_dim: int) -> str | None:
    """Serves the fragment layout where Triton does, for head sizes that are powers of two."""
    return missing(device) if head_dim in HEAD_DIMS else f"head size {head_dim} is not one of {HEAD_DIMS}"


def store(packed: Packed, keys: Tensor, values: Tensor, share: float, past_k: Tensor, past_v: Tensor) -> None:
    """Quantises keys, values [heads, blocks * BLOCK, d] into the blocks in `packed.table`.

    share: a step's share of a vector's range (quant.kv4.step_share). past_k, past_v [heads, >= blocks * BLOCK,
    d] get what later reads will see.
    """
    heads, tokens, d = keys.shape
    assert all(t.stride(2) == 1 for t in (keys, values, past_k, past_v))
    _store[(tokens // 32, heads)](
        keys,
        values,
        *_addresses(packed),
        past_k,
        past_v,
        keys.stride(0),
        keys.stride(1),
        values.stride(0),
        values.stride(1),
        past_k.stride(0),
        past_k.stride(1),
        past_v.stride(0),
        past_v.stride(1),
        share,
        D=d,
        num_warps=4,
    )


def restore(packed: Packed, keys: Tensor, values: Tensor) -> None:
    """Unpacks the blocks in `packed.table` into keys, values [heads, tokens, d]."""
    heads, tokens, d = keys.shape
    assert tokens == packed.table.numel() * BLOCK and keys.stride(2) == values.stride(2) == 1
    _restore[(tokens // 32, heads)](
        *_addresses(packed),
        keys,
        values,
        keys.stride(0),
        keys.stride(1),
        values.stride(0),
        values.stride(1),
        D=d,
        num_warps=4,
    )


def _addresses(packed: Packed) -> tuple[Tensor | int, ...]:
    """Words of keys and values, scales, table, and their strides from head to head in elements."""
    words = packed.keys.view(torch.int32), packed.values.view(torch.int32)
    return (
        *words,
        packed.scales,
        packed.table,
        words[0].stride(0),
        words[1].stride(0),
        packed.scales.stride(0),
    )


@jit
def _packed_words(codes, D: tl.constexpr, VALUES: tl.constexpr):
    """codes [32, D] -> words [4 D] in the order of memory."""
    if VALUES:
        # tokens: sixteen, far, column, half; channels: sixteen (two parts), upper, row
        split = tl.reshape(codes, (2, 2, 4, 2, D // 64, 4, 2, 8))
        nibbles = tl.permute(split, (0, 4, 7, 2, 5, 3, 1, 6))
    else:
        # tokens: sixteen, upper, row; channels: segment of 32 (two parts), column, step, far, half
        split = tl.reshape(codes, (2, 2, 8, D // 64, 2, 4, 2, 2, 2))
        nibbles = tl.permute(split, (0, 3, 2, 5, 4, 6, 8, 7, 1))
    flat = tl.reshape(nibbles, (4 * D, 8))
    return tl.sum(flat << (4 * tl.arange(0, 8))[None], 1)


@jit
def _quantized(x, share):
    """As quant.kv4.quantize: codes, step and middle of rows x [32, D] in fp32; step and middle as fp16 holds them."""
    low, high = tl.min(x, 1), tl.max(x, 1)
    step = tl.maximum((high - low) * share, 9.5367431640625e-07).to(tl.float16)
    wide = step.to(tl.float32)
    middle = ((low + high) * 0.5 + wide * 0.5).to(tl.float16)
    codes = (x - middle.to(tl.float32)[:, None]) * tl.div_rn(1.0, wide)[:, None]
    codes = (codes + 12582912.0) - 12582912.0  # to the nearest, as torch rounds
    return (tl.minimum(tl.maximum(codes, -8.0), 7.0) + 8.0).to(tl.int32), step, middle


@jit
def _store(
    keys,
    values,
    key_words,
    value_words,
    scales,
    table,
    key_words_head,
    value_words_head,
    scales_head,
    past_k,
    past_v,
    keys_head,
    keys_row,
    values_head,
    values_row,
    past_k_head,
    past_k_row,
    past_v_head,
    past_v_row,
    share,
    D: tl.constexpr,
):
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    block = tl.load(table + tile // 4).to(tl.int64)
    token = tile.to(tl.int64) * 32 + tl.arange(0, 32)
    channel = tl.arange(0, D)
    word = (block * 4 + tile % 4) * (4 * D) + tl.arange(0, 4 * D)
    scale_at = scales + head * scales_head + (block * 128 + tile % 4 * 32 + tl.arange(0, 32)) * 4

    x = tl.load(keys + head * keys_head + token[:, None] * keys_row + channel[None]).to(tl.float32)
    codes, step, middle = _quantized(x, share)
    tl.store(key_words + head * key_words_head + word, _packed_words(codes, D, False))
    tl.store(scale_at, step)
    tl.store(scale_at + 1, middle)
    back = (codes.to(tl.float32) - 8.0) * step.to(tl.float32)[:, None] + middle.to(tl.float32)[:, None]
    tl.store(
        past_k + head * past_k_head + token[:, None] * past_k_row + channel[None], back.to(past_k.dtype.element_ty)
    )

    x = tl.load(values + head * values_head + token[:, None] * values_row + channel[None]).to(tl.float32)
    codes, step, middle = _quantized(x, share)
    tl.store(value_words + head * value_words_head + word, _packed_words(codes, D, True))
    tl.store(scale_at + 2, step)
    tl.store(scale_at + 3, middle)
    back = (codes.to(tl.float32) - 8.0) * step.to(tl.float32)[:, None] + middle.to(tl.float32)[:, None]
    tl.store(
        past_v + head * past_v_head + token[:, None] * past_v_row + channel[None], back.to(past_v.dtype.element_ty)
    )


@jit
def _restore(
    key_words,
    value_words,
    scales,
    table,
    key_words_head,
    value_words_head,
    scales_head,
    keys,
    values,
    keys_head,
    keys_row,
    values_head,
    values_row,
    D: tl.constexpr,
):
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    block = tl.load(table + tile // 4).to(tl.int64)
    within = tl.arange(0, 32)
    t, c = within[:, None], tl.arange(0, D)[None]
    token = tile.to(tl.int64) * 32 + within
    base = (block * 4 + tile % 4) * (4 * D)
    scale_at = scales + head * scales_head + (block * 128 + tile % 4 * 32 + within) * 4

    # Bits of an index, low to high. Keys: t = row 8, upper 2, sixteen 2; c = half 2, far 2, step 2, column 4, segment.
    word = (t // 16 * (D // 64) + c // 64) * 128 + (t % 8 * 4 + c // 8 % 4) * 4 + c // 32 % 2 * 2 + c // 4 % 2
    shift = 4 * (c % 2 * 4 + c // 2 % 2 * 2 + t // 8 % 2)
    codes = (tl.load(key_words + head * key_words_head + base + word) >> shift) & 15
    step, middle = tl.load(scale_at).to(tl.float32), tl.load(scale_at + 1).to(tl.float32)
    x = (codes.to(tl.float32) - 8.0) * step[:, None] + middle[:, None]
    tl.store(keys + head * keys_head + token[:, None] * keys_row + c, x.to(keys.dtype.element_ty))

    # Values: t = half 2, column 4, far 2, sixteen 2; c = row 8, upper 2, sixteen.
    word = (t // 16 * (D // 64) + c // 64) * 128 + (c % 8 * 4 + t // 2 % 4) * 4 + c // 16 % 4
    shift = 4 * (t % 2 * 4 + t // 8 % 2 * 2 + c // 8 % 2)
    codes = (tl.load(value_words + head * value_words_head + base + word) >> shift) & 15
    step, middle = tl.load(scale_at + 2).to(tl.float32), tl.load(scale_at + 3).to(tl.float32)
    x = (codes.to(tl.float32) - 8.0) * step[:, None] + middle[:, None]
    tl.store(values + head * values_head + token[:, None] * values_row + c, x.to(values.dtype.element_ty))
