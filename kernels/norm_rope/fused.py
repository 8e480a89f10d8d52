"""Positions and the cache's rotation in Triton, in place and in one pass over the heads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.jit import jit, missing, tl, triton
from kernels.norm_rope import ref

_HEAD_DIMS = (16, 32, 64, 128, 256)


def declines(device: torch.device) -> str | None:
    """Serves CUDA from sm_80 up where Triton is installed and compiles it."""
    return missing(device, _trial)


def _trial(device: torch.device) -> None:
    table = torch.ones(3, 32, dtype=torch.complex64, device=device)
    place(torch.ones(3, 4, 64, dtype=torch.float16, device=device), table, 3, ((0, 1),), torch.eye(64, device=device))


def place(
    heads: Tensor,
    table: Tensor,
    placed: int,
    turned: Sequence[tuple[int, int]],
    turn: Tensor,
    keys: int = 0,
    centre: Tensor | None = None,
) -> None:
    """As `ref.place`; heads of any float dtype. Head sizes that are no power of two go to the reference."""
    n, _, d = heads.shape
    if d not in _HEAD_DIMS:
        wide = heads[:, :placed].float()
        ref.place(wide, table, placed, turned, turn, keys, centre)
        heads[:, :placed] = wide
        return
    assert heads.stride(2) == 1 and len(turned) <= 2 and (centre is None or centre.is_contiguous())
    narrow = heads.dtype == torch.float16
    tokens = 128 if narrow else 32  # of a program: three products in tf32 need more room
    (first, first_count), (second, second_count) = (*turned, (0, 0), (0, 0))[:2]
    _place[(triton.cdiv(n, tokens), placed)](
        heads,
        torch.view_as_real(table),
        turn,
        turn if centre is None else centre,
        n,
        first,
        first + first_count,
        second,
        second + second_count,
        keys,
        keys if centre is None else keys + len(centre),
        heads.stride(0),
        heads.stride(1),
        TURNED=len(turned) > 0,
        NARROW=narrow,
        D=d,
        TOKENS=tokens,
        num_warps=8,
    )


# Chunks and layers differ in these alone.
@jit(do_not_specialize=["n", "first", "first_end", "second", "second_end", "keys", "keys_end"])
def _place(
    heads,
    table,
    turn,
    centre,
    n,
    first,
    first_end,
    second,
    second_end,
    keys,
    keys_end,
    row_stride,
    head_stride,
    TURNED: tl.constexpr,
    NARROW: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
):
    head = tl.program_id(1)
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = (row < n)[:, None]
    rows = row.to(tl.int64)[:, None]
    channel = tl.arange(0, D)
    at = heads + rows * row_stride + head * head_stride + channel[None]
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    real, imaginary = tl.split(tl.reshape(x, (TOKENS, D // 2, 2)))
    phase = table + rows * D + tl.arange(0, D // 2)[None] * 2
    cosine = tl.load(phase, mask=inside, other=0.0)
    sine = tl.load(phase + 1, mask=inside, other=0.0)
    x = tl.reshape(tl.join(real * cosine - imaginary * sine, real * sine + imaginary * cosine), (TOKENS, D))
    if TURNED:
        if ((head >= first) & (head < first_end)) | ((head >= second) & (head < second_end)):
            matrix = tl.load(turn + channel[:, None] * D + channel[None])
            if NARROW:  # as exact as what is stored; a Hadamard matrix times its root is +-1, which fp16 holds
                root: tl.constexpr = D**0.5
                x = tl.dot(x.to(tl.float16), (matrix * root).to(tl.float16)) * (1 / root)
            else:
                x = tl.dot(x, matrix, input_precision="tf32x3")
        if (head >= keys) & (head < keys_end):
            x -= tl.load(centre + (head - keys) * D + channel)[None]
    tl.store(at, x.to(heads.dtype.element_ty), mask=inside)
