"""Choosing int8 weights by the error that they cause on real activations."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.act_quant.ref import quantize_rows
from quant.formats import QuantizedWeight
from quant.w8a8 import quantize_weight

_DAMPING = 0.01  # of the mean diagonal, as GPTQ has it
_BLOCK = 64  # columns rounded before the rest is corrected in one product
_WIDEST_SCALE = 64.0  # a channel that is silent in the sample must not get a scale without bounds
_PIECE = 2048  # rows of activations copied at a time
_WIDEST_DOUBLE = 4096  # input channels up to which the factorisation runs in float64


def as_quantized(x: Tensor) -> Tensor:
    """Activations x [n, in] as an int8 layer sees them."""
    codes, scale = quantize_rows(x)
    return codes * scale


def gram(x: Tensor, change: Callable[[Tensor], Tensor] = lambda rows: rows) -> Tensor:
    """x^T x [in, in] of activations x [n, in] as an int8 layer sees them after `change`, piece by piece."""
    total = x.new_zeros(x.shape[1], x.shape[1])
    for piece in x.split(_PIECE):
        seen = as_quantized(change(piece))
        total.addmm_(seen.T, seen)
    return total


def round_weight(weight: Tensor, gram: Tensor) -> QuantizedWeight:
    """int8 codes of weight [out, in] whose rounding errors cancel on activations of this gram matrix [in, in].

    Column by column, the strongest input first, each error is spread over the columns that are still to come (GPTQ,
    Frantar et al., 2022, arXiv 2210.17323). The scales are those of plain rounding.
    """
    weight = weight.float()
    nearest = quantize_weight(weight)
    scale = nearest[1]
    columns = weight.shape[1]
    order = gram.diagonal().argsort(descending=True)
    upper = _inverse_root(gram[order][:, order])
    if upper is None:
        return QuantizedWeight(*nearest)
    left = weight[:, order]
    codes = torch.empty_like(nearest[0])
    for start in range(0, columns, _BLOCK):
        end = min(start + _BLOCK, columns)
        block, factors = left[:, start:end].clone(), upper[start:end]
        errors = torch.empty_like(block)
        for at in range(end - start):
            column = block[:, at]
            rounded = (column / scale).round_().clamp_(-127, 127)
            codes[:, order[start + at]] = rounded.to(torch.int8)
            errors[:, at] = (column - rounded * scale) / factors[at, start + at]
            block[:, at:].addr_(errors[:, at], factors[at, start + at : end], alpha=-1)
        left[:, end:] -= errors @ factors[:, end:]
    return QuantizedWeight(codes, scale)


def _inverse_root(gram: Tensor) -> Tensor | None:
    """Upper Cholesky factor of the damped gram's inverse, fp32; None where the sample says nothing."""
    size = gram.shape[0]
    mean = gram.diagonal().mean().item()
    if not mean > 0:
        return None
    dtype = torch.float64 if size <= _WIDEST_DOUBLE else torch.float32
    for damping in (_DAMPING, 10 * _DAMPING, 100 * _DAMPING):
        work = gram.to(dtype, copy=True)  # three matrices of this size at a time, no more
        work.diagonal().add_(damping * mean)
        work, failed = torch.linalg.cholesky_ex(work)
        if failed:
            continue
        work = torch.cholesky_inverse(work)
        work, failed = torch.linalg.cholesky_ex(work, upper=True)
        if not failed:
            return work.to(torch.float32)
    return None


def balance(weight: Tensor, x: Tensor, groups: int) -> Tensor:
    """Factors [groups] for as many groups of x's [n, in] neighbouring channels that even out both sides of a product.

    Rounding x costs in proportion to its energy, rounding weight [out, in] to its own; their product is least where
    each group's factor is the fourth root of their ratio. As SmoothQuant (Xiao et al., 2023), by energies not extremes.
    """
    theirs = weight.float().square().sum(0).unflatten(0, (groups, -1)).mean(1)
    ours = x.square().mean(0).unflatten(0, (groups, -1)).mean(1)
    ratio = (theirs.clamp_min(1e-20) / ours.clamp_min(1e-20)).pow(0.25)
    ratio = ratio / ratio.log().mean().exp()
    return ratio.clamp(1 / _WIDEST_SCALE, _WIDEST_SCALE)


def product_error(weight: Tensor, x: Tensor) -> float:
    """Squared error of the W8A8 product over that of the exact one: weight [out, in], x [n, in]."""
    exact = x @ weight.T
    codes, scale = quantize_weight(weight)
    ours = as_quantized(x) @ (codes.float() * scale[:, None]).T
    return ((ours - exact).square().sum() / exact.square().sum().clamp_min(1e-30)).item()
