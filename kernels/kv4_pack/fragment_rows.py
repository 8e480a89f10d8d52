"""Blocks in fragment order written and read back in Triton.

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
    """Serves the fragment layout where Triton does and compiles it, for head sizes that are powers of two."""
    if head_dim not in HEAD_DIMS:
        return f"head size {head_dim} is not one of {HEAD_DIMS}"
    return missing(device, _trial, head_dim)


def _trial(device: torch.device, head_dim: int) -> None:
    keys = torch.empty(1, 1, BLOCK * head_dim // 2, dtype=torch.uint8, device=device)
    scales = torch.empty(1, 1, BLOCK, 4, dtype=torch.float16, device=device)
    packed = Packed(keys, keys[:, None].clone(), scales, torch.zeros(1, dtype=torch.int32, device=device))
    x = torch.zeros(1, BLOCK, head_dim, dtype=torch.float16, device=device)
    store(packed, x, x, 1 / 15, x.clone(), x.clone())
    restore(packed, x, x.clone())


def store(
    packed: Packed, keys: Tensor, values: Tensor, share: float, past_k: Tensor, past_v: Tensor, wide: bool = False
) -> None:
    """Quantises keys, values [heads, blocks * BLOCK, d] into the blocks in `packed.table`.

    share: a step's share of a vector's range (quant.kv4.step_share). past_k, past_v [heads, >= blocks * BLOCK,
    d] get what later reads will see. wide: the upper half of the channels is stored, in 8 bits, as two halves.
    """
    heads, tokens, d = keys.shape
    assert all(t.stride(2) == 1 for t in (keys, values, past_k, past_v))
    key_words, value_words, scales, table, key_head, value_head, scales_head = _addresses(packed)
    codes = torch.empty(2, heads, tokens, d, dtype=torch.uint8, device=keys.device)
    grid = (tokens // 32, heads)
    _quantize[grid](
        keys,
        values,
        codes,
        scales,
        table,
        scales_head,
        past_k,
        past_v,
        tokens,
        *_strides(keys, values, past_k, past_v),
        share,
        D=d,
        WIDE=wide,
        num_warps=4,
        enable_fp_fusion=False,  # halves between two codes are common, and a fused product rounds them otherwise
    )
    for side in (False, True):
        _pack[grid](codes, key_words, value_words, table, key_head, value_head, tokens, D=d, VALUES=side, num_warps=4)


def restore(packed: Packed, keys: Tensor, values: Tensor) -> None:
    """Unpacks the blocks in `packed.table` into keys, values [heads, tokens, d]."""
    heads, tokens, d = keys.shape
    assert tokens == packed.table.numel() * BLOCK and keys.stride(2) == values.stride(2) == 1
    _restore[(tokens // 32, heads)](
        *_addresses(packed),
        keys,
        values,
        *_strides(keys, values),
        D=d,
        num_warps=4,
    )


def _strides(*tensors: Tensor) -> list[int]:
    """Of each [heads, tokens, d]: elements from head to head and from token to token."""
    return [tensor.stride(axis) for tensor in tensors for axis in (0, 1)]


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
def _quantized(x, share, WIDE: tl.constexpr):
    """As quant.kv4.quantize: codes, step and middle of rows x [32, channels] in fp32; the latter as fp16 holds them."""
    low, high = tl.min(x, 1), tl.max(x, 1)
    step = tl.maximum((high - low) * share, 9.5367431640625e-07).to(tl.float16)
    wide = step.to(tl.float32)
    if WIDE:
        middle = (((low + high) * 0.5 + wide * 8.5) * 0.05882352963089943).to(tl.float16)
        centre = middle.to(tl.float32) * 17.0 - wide * 8.0
    else:
        middle = ((low + high) * 0.5 + wide * 0.5).to(tl.float16)
        centre = middle.to(tl.float32)
    half: tl.constexpr = 128.0 if WIDE else 8.0
    codes = (x - centre[:, None]) * tl.div_rn(1.0, wide)[:, None]
    codes = (codes + 12582912.0) - 12582912.0  # to the nearest, as torch rounds
    return (tl.minimum(tl.maximum(codes, -half), half - 1) + half).to(tl.int32), step, middle


@jit
def _back(codes, step, middle):
    """What later reads see of 4-bit codes [32, channels]."""
    return (codes.to(tl.float32) - 8.0) * step.to(tl.float32)[:, None] + middle.to(tl.float32)[:, None]


@jit(do_not_specialize=["table"])  # a sequence's list is read from any place on
def _quantize(
    keys,
    values,
    codes,
    scales,
    table,
    scales_head,
    past_k,
    past_v,
    tokens,
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
    WIDE: tl.constexpr,
):
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    block = tl.load(table + tile // 4).to(tl.int64)
    token = tile.to(tl.int64) * 32 + tl.arange(0, 32)
    C: tl.constexpr = D // 2 if WIDE else D
    channel = D - C + tl.arange(0, C)
    scale_at = scales + head * scales_head + (block * 128 + tile % 4 * 32 + tl.arange(0, 32)) * 4
    code_at = codes + (head * tokens + token[:, None]) * D + channel[None]
    for side in tl.static_range(2):
        if side == 0:
            x = tl.load(keys + head * keys_head + token[:, None] * keys_row + channel[None]).to(tl.float32)
            back_at = past_k + head * past_k_head + token[:, None] * past_k_row + channel[None]
        else:
            x = tl.load(values + head * values_head + token[:, None] * values_row + channel[None]).to(tl.float32)
            back_at = past_v + head * past_v_head + token[:, None] * past_v_row + channel[None]
        found, step, middle = _quantized(x, share, WIDE)
        tl.store(scale_at + 2 * side, step)
        tl.store(scale_at + 2 * side + 1, middle)
        to = code_at + side * tl.num_programs(1).to(tl.int64) * tokens * D
        if WIDE:
            high = found >> 4
            tl.store(to - C, high.to(tl.uint8))
            tl.store(back_at - C, _back(high, step, middle).to(past_k.dtype.element_ty))
            found = found & 15
        tl.store(to, found.to(tl.uint8))
        tl.store(back_at, _back(found, step, middle).to(past_k.dtype.element_ty))


@jit(do_not_specialize=["table"])
def _pack(
    codes,
    key_words,
    value_words,
    table,
    key_words_head,
    value_words_head,
    tokens,
    D: tl.constexpr,
    VALUES: tl.constexpr,
):
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    block = tl.load(table + tile // 4).to(tl.int64)
    place = tl.arange(0, 4 * D)
    piece, lane, high = place[:, None] % 4, place[:, None] // 4 % 32, place[:, None] // 128
    row, column = lane // 4, lane % 4
    sixteen, sixty_four = high // (D // 64), high % (D // 64)
    nibble = tl.arange(0, 8)[None]
    half, far, upper = nibble // 4, nibble // 2 % 2, nibble % 2
    if VALUES:
        t = sixteen * 16 + far * 8 + column * 2 + half
        c = sixty_four * 64 + piece * 16 + upper * 8 + row
        words, words_head, side = value_words, value_words_head, 1
    else:
        t = sixteen * 16 + upper * 8 + row
        c = sixty_four * 64 + piece // 2 * 32 + column * 8 + piece % 2 * 4 + far * 2 + half
        words, words_head, side = key_words, key_words_head, 0
    at = codes + ((side * tl.num_programs(1) + head) * tokens + tile * 32 + t) * D + c
    packed = tl.sum(tl.load(at).to(tl.int32) << (4 * nibble), 1)
    tl.store(words + head * words_head + (block * 4 + tile % 4) * (4 * D) + place, packed)


@jit(do_not_specialize=["table"])
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
