"""rows.cu: a CTA a row, each read once; many rows, and rows in 16 bits, go to the kernels in Triton."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels import nvrtc
from kernels.act_quant import fused, ref

SOURCE = Path(__file__).with_name("rows.cu")
THREADS = 1024  # as in the source
TURN = 64  # channels of a block that it can rotate
LONGEST = 24_000  # channels: a row lies in shared memory, of which the least that a GPU gives is 99 KiB


class _Params(ctypes.Structure):
    """`Params` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "scale", "codes", "out")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("d", "turn")),
    )


def declines(device: torch.device) -> str | None:
    """Serves CUDA from compute capability 8.0 on where it compiles."""
    if device.type != "cuda":
        return f"CUDA only, not {device.type}"
    return nvrtc.cannot_load(device, lambda: _program(nvrtc.indexed(device)))


@cache
def _kernel(device: torch.device, name: str, d: int) -> nvrtc.Kernel:
    return _program(device).kernel(name, THREADS, 4 * d)


@cache
def _program(device: torch.device) -> nvrtc.Program:
    return nvrtc.Program(SOURCE, {}, device)


def _run(
    name: str,
    x: Tensor,
    d: int,
    weight: Tensor | None = None,
    scale: Tensor | None = None,
    eps: float = 0.0,
    turn: int = 0,
) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    n = x.shape[0]
    codes = x.new_empty(n, d, dtype=torch.int8)
    out = x.new_empty(n, 1)
    pointers = (None if t is None else t.data_ptr() for t in (x, weight, scale, codes, out))
    if n:
        _kernel(x.device, name, d).launch(n, 1, _Params(*pointers, eps, d, turn), early=True)
    return codes, out


FEW = 64  # rows


def _serves(x: Tensor, d: int) -> bool:
    return x.shape[0] <= FEW and x.dtype == torch.float32 and d % 4 == 0 and d <= LONGEST


@cache
def _other(device: torch.device) -> Any:
    return ref if fused.declines(device) else fused


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """As `ref.quantize_rows`."""
    d = x.shape[1]
    return _run("quantize_rows", x, d) if _serves(x, d) else _other(x.device).quantize_rows(x)


def rms_norm_quantize(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """As `ref.rms_norm_quantize`."""
    d = x.shape[1]
    if not _serves(x, d):
        return _other(x.device).rms_norm_quantize(x, weight, eps)
    return _run("rms_norm_quantize", x, d, weight=weight, eps=eps)


def turned_quantize(x: Tensor, turn: Tensor | None) -> tuple[Tensor, Tensor]:
    """As `ref.turned_quantize`; `turn` as for `gated_quantize`."""
    d = x.shape[1]
    if not _serves(x, d) or (turn is not None and turn.shape[0] != TURN):
        return _other(x.device).turned_quantize(x, turn)
    return _run("quantize_rows", x, d, turn=0 if turn is None else TURN)


def gated_quantize(product: Tensor, scale: Tensor | None, turn: Tensor | None) -> tuple[Tensor, Tensor]:
    """As `ref.gated_quantize`; `turn` is the Hadamard matrix of its size (`quant.kv4.rotation`)."""
    d = product.shape[1] // 2
    if not _serves(product, d) or (turn is not None and turn.shape[0] != TURN):
        return _other(product.device).gated_quantize(product, scale, turn)
    return _run("gated_quantize", product, d, scale=scale, turn=0 if turn is None else TURN)
