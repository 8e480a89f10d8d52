"""RMSNorm and rotary position embedding in plain torch."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x [..., d] / sqrt(mean(x^2) + eps) * weight [d] (None: ones) (Zhang and Sennrich, 2019)."""
    inverse = (torch.linalg.vector_norm(x, 2, -1, keepdim=True).square_() / x.shape[-1] + eps).rsqrt_()
    return x * inverse if weight is None else x * inverse * weight


def apply_rope(x: Tensor, table: Tensor) -> None:
    """Rotates adjacent pairs of x [n, heads, d] (fp32) by table [n, d / 2] (complex64), in place (Su et al., 2021)."""
    torch.view_as_complex(x.unflatten(-1, (-1, 2))).mul_(table[:, None])
