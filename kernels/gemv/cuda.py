"""gemv.cu: a warp a row of the weight, everything fused behind it."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from kernels import nvrtc

SOURCE = Path(__file__).with_name("gemv.cu")
WARPS, SPAN, CTAS = 8, 2048, 4  # as in the source: warps of a CTA, bytes of a warp's loads, CTAs a multiprocessor
LONGEST = 48 * 1024  # bytes of a row: it lies in shared memory
ONE_ROW = True


class _Params(ctypes.Structure):
    """`Params` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "x", "channels", "token", "bias", "out")),
        *((name, ctypes.c_int) for name in ("rows", "bytes", "add")),
    )


def declines(device: torch.device, dtype: torch.dtype, width: int) -> str | None:
    """Serves CUDA from compute capability 8.0 on where it compiles, for int8 and bf16 rows of whole 16 bytes."""
    if device.type != "cuda":
        return f"CUDA only, not {device.type}"
    if dtype not in (torch.int8, torch.bfloat16):
        return f"int8 and bf16 only, not {dtype}"
    if width * dtype.itemsize % 16 or width * dtype.itemsize > LONGEST:
        return f"rows of {width} are not whole 16 bytes, or longer than {LONGEST} bytes"
    return nvrtc.cannot_load(device, lambda: _plan(nvrtc.indexed(device), dtype == torch.int8, width * dtype.itemsize))


@cache
def _plan(device: torch.device, int8: bool, size: int) -> tuple[nvrtc.Kernel, int]:
    program = nvrtc.Program(SOURCE, {"INT8": int(int8)}, device)
    kernel = program.kernel("gemv", WARPS * 32, -(-size // SPAN) * SPAN)
    return kernel, CTAS * torch.cuda.get_device_properties(device).multi_processor_count


def multiply(
    x: Tensor,
    weight: Tensor,
    channels: Tensor | None = None,
    token: Tensor | None = None,
    bias: Tensor | None = None,
    total: Tensor | None = None,
) -> Tensor:
    """As `ref.multiply`."""
    rows, width = weight.shape
    out = x.new_empty(1, rows, dtype=torch.float32) if total is None else total
    size = width * weight.element_size()
    kernel, most = _plan(x.device, weight.dtype == torch.int8, size)
    pointers = (None if t is None else t.data_ptr() for t in (weight, x, channels, token, bias, out))
    params = _Params(*pointers, rows, size, int(total is not None))
    kernel.launch(min(-(-rows // WARPS), most), 1, params, early=True)
    return out
