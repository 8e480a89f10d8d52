"""oneDNN's int8 linear on the CPU (AMX, VNNI), with the channel scales in its epilogue."""

from functools import cache

import torch
from torch import Tensor

from kernels import cpu
from kernels.registry import first_line


@cache
def _works() -> str | None:
    try:
        # The largest sums: without VNNI pairs of products are summed in 16 bits, which they do not fit.
        weight = torch.tensor([[127], [-127]], dtype=torch.int8).repeat(8, 64)
        codes = torch.tensor([[127], [-127], [1]], dtype=torch.int8).repeat(1, 64)
        exact = codes.float() @ weight.float().T
        if not torch.equal(matmul(codes, prepack(weight), torch.ones(len(weight))), exact):
            return "oneDNN's int8 linear is not exact on this processor"
    except (RuntimeError, AttributeError) as error:
        return f"oneDNN's int8 linear is not in this build of torch ({first_line(error)})"
    return None


def declines(device: torch.device) -> str | None:
    """Serves the CPU where a small product comes out exact."""
    return _works() if device.type == "cpu" else f"CPU only, not {device.type}"


def prepack(weight: Tensor) -> Tensor:
    """Reorders an int8 weight [out, in] for the matrix units, once."""
    return torch.ops.onednn.qlinear_prepack(weight, None)


@cache
def _zero_points(channels: int) -> Tensor:
    return torch.zeros(channels, dtype=torch.int32)


def matmul(codes: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """fp32 [n, out] = (codes [n, in] @ weight^T) * scale [out]; `weight` comes from `prepack`."""
    zero = 0
    if not cpu.fast_bf16():  # VNNI takes unsigned codes; for signed ones oneDNN 3.12 has a loop a thousand times slower
        codes, zero = codes.view(torch.uint8) ^ 128, 128
    return torch.ops.onednn.qlinear_pointwise(
        codes, 1.0, zero, weight, scale, _zero_points(scale.shape[0]), None, 1.0, 0, torch.float32, "none", [], ""
    )
