"""torch's fp32 product of weights that are converted for it, where int8 instructions saturate or are missing."""

import torch
from torch import Tensor

_CHUNK = 4096  # outputs at a time, so that a head over a large vocabulary is never in fp32 as a whole


def declines(device: torch.device) -> str | None:
    """Serves the CPU."""
    return None if device.type == "cpu" else f"CPU only, not {device.type}"


def prepack(weight: Tensor) -> Tensor:
    """Nothing to prepare: int8 weight [out, in] as it is."""
    return weight


def matmul(codes: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """fp32 [n, out] = (codes [n, in] @ weight [out, in]^T) * scale [out]; sums above 2^24 are rounded to fp32."""
    out, left = torch.empty(codes.shape[0], weight.shape[0]), codes.float()
    for start in range(0, weight.shape[0], _CHUNK):
        part = slice(start, start + _CHUNK)
        out[:, part] = left @ weight[part].float().T
    return out.mul_(scale)
