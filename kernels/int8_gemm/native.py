"""Our own int8 product in C, compiled for the processor at hand: AMX for many rows or else VNNI, VNNI for one."""

from __future__ import annotations

from ctypes import c_int, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from kernels import native

SOURCE = Path(__file__).with_name("native.c")


@dataclass(frozen=True)
class Tiles:
    """A weight [out, in] in the order of the matrix units, padded to whole panels, and the sum of each row."""

    codes: Tensor
    sums: Tensor
    inner: int


def declines(device: torch.device) -> str | None:
    """Serves x86 processors with AVX-512 VNNI where there is a C compiler."""
    return native.declines(SOURCE, device)


@cache
def _functions():  # type: ignore[no-untyped-def]
    prepack = native.function(SOURCE, "prepack", *[c_void_p] * 3, *[c_int64] * 2)
    matmul = native.function(SOURCE, "matmul", *[c_void_p] * 7, *[c_int64] * 3, *[c_int] * 2)
    gated = native.function(SOURCE, "gated_matmul", *[c_void_p] * 6, *[c_int64] * 3, c_int)
    return prepack, matmul, gated


def prepack(weight: Tensor) -> Tiles:
    """Reorders an int8 weight [out, in], once."""
    outer, inner = weight.shape
    size = -(-outer // 32) * -(-inner // 64) * 2048
    room = torch.empty(size + 64, dtype=torch.int8)
    start = -room.data_ptr() % 64  # rows of tiles are whole cache lines
    tiles, sums = room[start : start + size], torch.empty(outer, dtype=torch.int32)
    weight = weight.contiguous()
    _functions()[0](weight.data_ptr(), tiles.data_ptr(), sums.data_ptr(), outer, inner)
    return Tiles(tiles, sums, inner)


def matmul(codes: Tensor, weight: Tiles, scale: Tensor) -> Tensor:
    """fp32 [n, out] = (codes [n, in] @ weight^T) * scale [out]; `weight` comes from `prepack`."""
    return product(codes, None, weight, scale, None)


def product(codes: Tensor, token_scale: Tensor | None, weight: Tiles, scale: Tensor, bias: Tensor | None) -> Tensor:
    """fp32 [n, out] = (codes [n, in] @ weight^T) * scale [out] * token_scale [n, 1] + bias [out]."""
    out = torch.empty(codes.shape[0], scale.shape[0])
    _run(out, codes, token_scale, weight, scale, bias, add=False)
    return out


def write_product_(
    out: Tensor, codes: Tensor, token_scale: Tensor | None, weight: Tiles, scale: Tensor, bias: Tensor | None
) -> None:
    """out [n, out] = `product`."""
    _run(out, codes, token_scale, weight, scale, bias, add=False)


def gated_product(codes: Tensor, token_scale: Tensor, weight: Tiles, scale: Tensor) -> Tensor:
    """fp32 [n, out / 2]: silu(gate) * up of the halves of `product`, in its epilogue; out is a multiple of 32."""
    n, half = codes.shape[0], scale.shape[0] // 2
    assert codes.is_contiguous() and codes.shape[1] == weight.inner and scale.shape[0] % 32 == 0
    out = torch.empty(n, half)
    _functions()[2](
        codes.data_ptr(),
        weight.codes.data_ptr(),
        weight.sums.data_ptr(),
        scale.data_ptr(),
        token_scale.data_ptr(),
        out.data_ptr(),
        n,
        weight.inner,
        half,
        torch.get_num_threads(),
    )
    return out


def add_product_(
    total: Tensor, codes: Tensor, token_scale: Tensor | None, weight: Tiles, scale: Tensor, bias: Tensor | None
) -> None:
    """total [n, out] += `product`, in the epilogue."""
    _run(total, codes, token_scale, weight, scale, bias, add=True)


def _run(
    out: Tensor,
    codes: Tensor,
    token_scale: Tensor | None,
    weight: Tiles,
    scale: Tensor,
    bias: Tensor | None,
    add: bool,
) -> None:
    n, outer = codes.shape[0], scale.shape[0]
    assert codes.is_contiguous() and codes.shape[1] == weight.inner
    assert out.is_contiguous() and out.dtype == torch.float32 and out.shape == (n, outer)
    _functions()[1](
        codes.data_ptr(),
        weight.codes.data_ptr(),
        weight.sums.data_ptr(),
        scale.data_ptr(),
        native.at(token_scale),
        native.at(bias),
        out.data_ptr(),
        n,
        weight.inner,
        outer,
        add,
        torch.get_num_threads(),
    )
