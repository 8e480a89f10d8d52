"""torch's int8 matrix product with an int32 result, rescaled after it (CUDA)."""

import torch
from torch import Tensor
from torch.nn import functional as F

_MIN_ROWS = 32  # cuBLASLt refuses fewer than 17 rows


def declines(device: torch.device) -> str | None:
    """Serves CUDA from sm_80 up."""
    if device.type != "cuda":
        return f"CUDA only, not {device.type}"
    return None if torch.cuda.get_device_capability(device) >= (8, 0) else "needs sm_80 or newer"


def prepack(weight: Tensor) -> Tensor:
    """int8 weight [out, in] as it is; its sizes must be multiples of 8."""
    return weight.contiguous()


def matmul(codes: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """fp32 [n, out] = (codes [n, in] @ weight [out, in]^T) * scale [out]."""
    rows = codes.shape[0]
    if rows < _MIN_ROWS:
        codes = F.pad(codes, (0, 0, 0, _MIN_ROWS - rows))
    return torch._int_mm(codes, weight.T)[:rows].to(torch.float32) * scale
