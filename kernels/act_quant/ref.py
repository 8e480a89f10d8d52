"""Symmetric int8 quantisation of activations, one scale a token."""

import torch
from torch import Tensor

_TINY = 1e-12  # keeps an all-zero token from dividing by zero


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes [n, d] and fp32 scales [n, 1] of x [n, d], such that x ~ codes * scale."""
    scale = x.abs().amax(-1, keepdim=True).clamp_min_(_TINY).div_(127.0)
    return torch.div(x, scale).round_().to(torch.int8), scale


def rms_norm_quantize(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm of x [n, d] with weight [d] (None: ones), quantised a token at a time, as `quantize_rows`.

    Codes do not change when a token is scaled, so the norm's own factor only enters the scale: one pass less.
    """
    mean_square = torch.linalg.vector_norm(x, 2, -1, keepdim=True).square_().div_(x.shape[-1])
    codes, scale = quantize_rows(x if weight is None else x * weight)
    return codes, scale.mul_(mean_square.add_(eps).rsqrt_())
