"""Activations quantised in C: each row is read once and stays in a core's cache."""

from __future__ import annotations

from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from kernels import native
from kernels.act_quant import ref

SOURCE = Path(__file__).with_name("native.c")


def declines(device: torch.device) -> str | None:
    """Serves x86 processors with AVX-512 where there is a C compiler."""
    return native.declines(SOURCE, device)


@cache
def _functions():  # type: ignore[no-untyped-def]
    rows = native.function(SOURCE, "quantize_rows", *[c_void_p] * 4, *[c_int64] * 3, c_int, c_float, c_int)
    gated = native.function(SOURCE, "gated_quantize", *[c_void_p] * 4, *[c_int64] * 2, *[c_int] * 2)
    turned = native.function(SOURCE, "turned_quantize", *[c_void_p] * 3, *[c_int64] * 2, *[c_int] * 2)
    return rows, gated, turned


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """As `ref.quantize_rows`."""
    return _rows(x, None, 0.0, False)


def rms_norm_quantize(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """As `ref.rms_norm_quantize`."""
    return _rows(x, weight, eps, True)


def _rows(x: Tensor, weight: Tensor | None, eps: float, normed: bool) -> tuple[Tensor, Tensor]:
    x = x.float()
    if x.stride(1) != 1:
        x = x.contiguous()
    n, d = x.shape
    codes, scale = torch.empty(n, d, dtype=torch.int8), torch.empty(n, 1)
    held = None if weight is None else weight.float().contiguous()
    _functions()[0](
        x.data_ptr(),
        native.at(held),
        codes.data_ptr(),
        scale.data_ptr(),
        n,
        d,
        x.stride(0),
        normed,
        eps,
        torch.get_num_threads(),
    )
    return codes, scale


def gated_quantize(product: Tensor, scale: Tensor | None, turn: Tensor | None) -> tuple[Tensor, Tensor]:
    """As `ref.gated_quantize`; codes may be one off where a value lies between two, since exp differs by roundings."""
    if turn is not None and not native.is_hadamard(turn):
        codes, step = quantize_rows(ref.gated(product, scale, turn))
        return codes, step if scale is None else step.mul_(scale)
    n, d = product.shape[0], product.shape[1] // 2
    assert product.is_contiguous() and product.dtype == torch.float32
    codes, step = torch.empty(n, d, dtype=torch.int8), torch.empty(n, 1)
    _functions()[1](
        product.data_ptr(),
        native.at(scale),
        codes.data_ptr(),
        step.data_ptr(),
        n,
        d,
        0 if turn is None else turn.shape[0],
        torch.get_num_threads(),
    )
    return codes, step


def turned_quantize(x: Tensor, turn: Tensor | None) -> tuple[Tensor, Tensor]:
    """As `ref.turned_quantize`; x is used up."""
    if turn is not None and not native.is_hadamard(turn):
        return quantize_rows(ref.turned(x, turn))
    (n, d), block = x.shape, 0 if turn is None else turn.shape[0]
    assert x.is_contiguous() and x.dtype == torch.float32
    codes, step = torch.empty(n, d, dtype=torch.int8), torch.empty(n, 1)
    threads = torch.get_num_threads()
    _functions()[2](x.data_ptr(), codes.data_ptr(), step.data_ptr(), n, d, block, threads)
    return codes, step
