"""Symmetric int8 quantisation of activations, one scale a token."""

import torch
from torch import Tensor
from torch.nn import functional as F

_TINY = 1e-12  # keeps an all-zero token from dividing by zero


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes [n, d] and fp32 scales [n, 1] of x [n, d], such that x ~ codes * scale."""
    largest = x.abs().amax(-1, keepdim=True).clamp_min_(_TINY)
    return (x * largest.reciprocal().mul_(127.0)).round_().to(torch.int8), largest.div_(127.0)


def rms_norm_quantize(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm of x [n, d] with weight [d] (None: ones), quantised a token at a time, as `quantize_rows`.

    Codes do not change when a token is scaled, so the norm's own factor only enters the scale: one pass less.
    """
    mean_square = torch.linalg.vector_norm(x, 2, -1, keepdim=True).square_().div_(x.shape[-1])
    codes, scale = quantize_rows(x if weight is None else x * weight)
    return codes, scale.mul_(mean_square.add_(eps).rsqrt_())


def gated(product: Tensor, scale: Tensor | None, turn: Tensor | None) -> Tensor:
    """silu(gate) * up [n, d] of product [n, 2 d] (gate, then up), which is used up.

    scale [n, 1] is the product's factor a token, left out of the up half: multiply the result by it. turn [b, b]
    rotates every b channels of the result.
    """
    gate, up = product.chunk(2, 1)
    if scale is not None:
        gate.mul_(scale)
    out = F.silu(gate, inplace=True).mul_(up)
    return turned(out, turn)


def turned(x: Tensor, turn: Tensor | None) -> Tensor:
    """Every b channels of x [n, d] rotated by turn [b, b] (None: as they are)."""
    return x if turn is None else (x.unflatten(1, (-1, turn.shape[0])) @ turn).flatten(1)


def turned_quantize(x: Tensor, turn: Tensor | None) -> tuple[Tensor, Tensor]:
    """`turned`, quantised a token at a time; x may be used up."""
    return quantize_rows(turned(x, turn))


def gated_quantize(product: Tensor, scale: Tensor | None, turn: Tensor | None) -> tuple[Tensor, Tensor]:
    """`gated`, quantised a token at a time; the scales [n, 1] given back have `scale` in them."""
    codes, step = quantize_rows(gated(product, scale, turn))
    return codes, step if scale is None else step.mul_(scale)
