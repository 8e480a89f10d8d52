"""Activations quantised in Triton, one pass over memory: a program holds a token's whole row in registers."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.act_quant import ref
from kernels.jit import jit, missing, tl, triton

_TINY = 1e-12  # as in the reference
_LONGEST = 1 << 16  # channels of a row that registers hold


def declines(device: torch.device) -> str | None:
    """Serves CUDA from sm_80 up where Triton is installed and compiles it."""
    return missing(device, _trial)


def _trial(device: torch.device) -> None:
    x = torch.ones(2, 256, dtype=torch.bfloat16, device=device)
    quantize_rows(x)
    gated_quantize(x, None, torch.eye(64, device=device))


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """As `ref.quantize_rows`; x of any float dtype, rows may lie apart."""
    return _rows(x, None, 0.0, norm=False)


def rms_norm_quantize(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """As `ref.rms_norm_quantize`."""
    return _rows(x, weight, eps, norm=True)


def gated_quantize(product: Tensor, scale: Tensor | None, turn: Tensor | None) -> tuple[Tensor, Tensor]:
    """As `ref.gated_quantize`; leaves `product` as it is."""
    if not _turns(turn):
        return ref.gated_quantize(product.float(), scale, turn)
    return _blocks(product, scale, turn, product.shape[1] // 2, gated=True)


def turned_quantize(x: Tensor, turn: Tensor | None) -> tuple[Tensor, Tensor]:
    """As `ref.turned_quantize`; x of any float dtype, and left as it is."""
    if turn is None:
        return quantize_rows(x)
    if not _turns(turn):
        return ref.turned_quantize(x.float(), turn)
    return _blocks(x, None, turn, x.shape[1], gated=False)


def _turns(turn: Tensor | None) -> bool:
    """Whether the kernel has a product for a rotation of this size."""
    return turn is None or (turn.shape[0] >= 16 and not turn.shape[0] & (turn.shape[0] - 1))


def _blocks(x: Tensor, scale: Tensor | None, turn: Tensor | None, width: int, gated: bool) -> tuple[Tensor, Tensor]:
    n, block = x.shape[0], 64 if turn is None else turn.shape[0]
    assert x.stride(1) == 1
    codes = x.new_empty(n, width, dtype=torch.int8)
    steps = x.new_empty(n, 1, dtype=torch.float32)
    _turned[(n,)](
        x,
        x if scale is None else scale,
        x if turn is None else turn,
        codes,
        steps,
        width,
        x.stride(0),
        GATED=gated,
        SCALED=scale is not None,
        TURNED=turn is not None,
        # bf16 holds a Hadamard matrix of 4^n channels exactly, and what comes in bf16 loses nothing that counts.
        NARROW=x.dtype == torch.bfloat16 and block in (16, 64, 256),
        BLOCKS=triton.next_power_of_2(triton.cdiv(width, block)),
        BLOCK=block,
        TINY=_TINY,
        num_warps=_warps(width),
    )
    return codes, steps


def _rows(x: Tensor, weight: Tensor | None, eps: float, norm: bool) -> tuple[Tensor, Tensor]:
    n, d = x.shape
    assert x.stride(1) == 1 and d <= _LONGEST
    codes = x.new_empty(n, d, dtype=torch.int8)
    scale = x.new_empty(n, 1, dtype=torch.float32)
    _quantize[(n,)](
        x,
        x if weight is None else weight,
        codes,
        scale,
        d,
        eps,
        x.stride(0),
        NORM=norm,
        WEIGHT=weight is not None,
        D=triton.next_power_of_2(d),
        TINY=_TINY,
        num_warps=_warps(d),
    )
    return codes, scale


def _warps(channels: int) -> int:
    return 4 if channels <= 4096 else 8 if channels <= 8192 else 16


@jit
def _codes(x, largest):
    """Nearest int8, halves to even as torch rounds: adding 1.5 * 2^23 leaves no place for a fraction."""
    return ((x * (127.0 / largest) + 12582912.0) - 12582912.0).to(tl.int8)


@jit
def _quantize(
    x,
    weight,
    codes,
    scale,
    d,
    eps,
    stride,
    NORM: tl.constexpr,
    WEIGHT: tl.constexpr,
    D: tl.constexpr,
    TINY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, D)
    inside = channel < d
    values = tl.load(x + row * stride + channel, mask=inside, other=0.0).to(tl.float32)
    factor = 1.0
    if NORM:
        factor = 1.0 / tl.sqrt(tl.sum(values * values) / d + eps)
    if WEIGHT:
        values *= tl.load(weight + channel, mask=inside, other=0.0)
    largest = tl.maximum(tl.max(tl.abs(values)), TINY)
    tl.store(codes + row * d + channel, _codes(values, largest), mask=inside)
    tl.store(scale + row, largest / 127.0 * factor)


@jit
def _turned(
    x,
    scale,
    turn,
    codes,
    steps,
    width,
    stride,
    GATED: tl.constexpr,
    SCALED: tl.constexpr,
    TURNED: tl.constexpr,
    NARROW: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    TINY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCKS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None]
    inside = channel < width
    at = x + row * stride + channel
    out = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    factor = 1.0
    if SCALED:
        factor = tl.load(scale + row)
    if GATED:
        up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
        gate = out * factor
        out = gate / (1.0 + tl.exp(-gate)) * up
    if TURNED:
        inner = tl.arange(0, BLOCK)
        matrix = tl.load(turn + inner[:, None] * BLOCK + inner[None])
        if NARROW:
            out = tl.dot(out.to(tl.bfloat16), matrix.to(tl.bfloat16))
        else:
            out = tl.dot(out, matrix, input_precision="tf32x3")
    largest = tl.maximum(tl.max(tl.abs(out)), TINY)
    tl.store(codes + row * width + channel, _codes(out, largest), mask=inside)
    tl.store(steps + row, largest / 127.0 * factor)
