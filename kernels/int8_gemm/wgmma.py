"""wgmma.cu: many rows on Hopper, by its copy engine and its products of warpgroups; few rows go to the next kernel."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from kernels import nvrtc
from kernels.int8_gemm import fused

SOURCE = Path(__file__).with_name("wgmma.cu")
ROWS, COLUMNS, STEP, STAGES, THREADS = 128, 256, 128, 4, 384  # as in the source
SHARED = STAGES * (ROWS + COLUMNS) * STEP + 1024  # bytes: its tiles, and room to align them
LEAST_ROWS = 512  # fewer leave most of the GPU without a tile
_FEW_COLUMNS = 32  # tiles; bands of 4,096 rows are 3 % faster then, and with 112 tiles 5 % slower than 2,048 rows
_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_SUM, _GATED = 3, 4

prepack = fused.prepack  # the weight as it is serves either kernel


class _Params(ctypes.Structure):
    """`Params` of the source."""

    _fields_ = (
        *((name, nvrtc.TensorMap) for name in ("codes", "weight")),
        *((name, ctypes.c_void_p) for name in ("token", "channels", "bias", "out")),
        ("stride", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("m", "width", "steps", "down", "across", "band")),
    )


def declines(device: torch.device) -> str | None:
    """Serves compute capability 9.0, if the kernel can be compiled and loaded."""
    if device.type != "cuda":
        return f"CUDA only, not {device.type}"
    if torch.cuda.get_device_capability(device) != (9, 0):
        return "for compute capability 9.0"
    if reason := fused.declines(device):
        return f"few rows need the kernel in Triton: {reason}"
    return nvrtc.cannot_load(device, lambda: _kernel(nvrtc.indexed(device), _KINDS[torch.bfloat16]))


@cache
def _kernel(device: torch.device, kind: int) -> nvrtc.Kernel:
    return nvrtc.Program(SOURCE, {"KIND": kind}, device, features="a").kernel("gemm", THREADS, SHARED)


@cache
def _ctas(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count // 2 * 2


def _serves(codes: Tensor, weight: Tensor, out: Tensor | None = None) -> bool:
    (rows, inner), outer = codes.shape, weight.shape[0]
    aligned = inner % 16 == outer % 8 == codes.data_ptr() % 16 == weight.data_ptr() % 16 == codes.stride(0) % 16 == 0
    return rows >= LEAST_ROWS and aligned and (out is None or out.data_ptr() % 8 == out.stride(0) % 2 == 0)


def matmul(codes: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """fp32 [n, out] = (codes [n, in] @ weight [out, in]^T) * scale [out]."""
    return product(codes, None, weight, scale, None)


def product(
    codes: Tensor,
    token_scale: Tensor | None,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """[n, out] in `dtype` = (codes [n, in] @ weight [out, in]^T) * token_scale [n, 1] * scale [out] + bias [out]."""
    if not _serves(codes, weight):
        return fused.product(codes, token_scale, weight, scale, bias, dtype)
    out = codes.new_empty(codes.shape[0], weight.shape[0], dtype=dtype)
    _launch(_KINDS[dtype], out, codes, token_scale, weight, scale, bias)
    return out


def add_product_(
    total: Tensor, codes: Tensor, token_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None
) -> None:
    """total [n, out] (fp32) += `product`, in the epilogue."""
    if _serves(codes, weight, total):
        _launch(_SUM, total, codes, token_scale, weight, scale, bias)
    else:
        fused.add_product_(total, codes, token_scale, weight, scale, bias)


def gated_product(codes: Tensor, token_scale: Tensor, weight: Tensor, scale: Tensor) -> Tensor | None:
    """bf16 [n, out / 2]: silu(gate) * up of the halves of `product`, in its epilogue; None where it does not serve."""
    if not _serves(codes, weight) or weight.shape[0] % 16:
        return None
    out = codes.new_empty(codes.shape[0], weight.shape[0] // 2, dtype=torch.bfloat16)
    _launch(_GATED, out, codes, token_scale, weight, scale, None)
    return out


def _launch(
    kind: int,
    out: Tensor,
    codes: Tensor,
    token_scale: Tensor | None,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
) -> None:
    (m, k), width = codes.shape, out.shape[1]
    assert out.stride(1) == 1 and all(t is None or t.is_contiguous() for t in (token_scale, scale, bias))
    maps = (nvrtc.rows_in_boxes(x, (128, STEP)) for x in (codes, weight))
    pointers = (None if t is None else t.data_ptr() for t in (token_scale, scale, bias, out))
    across = -(-width // (COLUMNS // 2 if kind == _GATED else COLUMNS))
    tiles = -(-k // STEP), -(-m // (2 * ROWS)), across, 16 if across <= _FEW_COLUMNS else 8
    params = _Params(*maps, *pointers, out.stride(0), m, width, *tiles)
    _kernel(codes.device, kind).launch(_ctas(codes.device), 1, params)
