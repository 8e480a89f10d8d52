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
_FEW = 8  # columns that are corrected one by one: too little for two threads, which would wait for each other each time
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
    Frantar et al., 2022, arXiv 2210.17323). The scales are those of plain rounding. `gram` is used up: for the widest
    layers it is the largest thing in memory.
    """
    weight = weight.float()
    nearest = quantize_weight(weight)
    scale = nearest[1]
    columns = weight.shape[1]
    order = gram.diagonal().argsort(descending=True)
    mirrored = order.flip(0)
    gram.copy_(gram.index_select(0, mirrored).index_select(1, mirrored))
    upper = _inverse_root(gram)
    if upper is None:
        return QuantizedWeight(*nearest)
    left = weight.T[order]  # [in, out]: a column's neighbours in memory are of the same column
    rounded = torch.empty_like(left, dtype=torch.int8)
    for start in range(0, columns, _BLOCK):
        end = min(start + _BLOCK, columns)
        factors, errors = upper[start:end], torch.empty_like(left[start:end])
        _round_columns(left[start:end], factors[:, start:end], scale, rounded[start:end], errors)
        left[end:].addmm_(factors[:, end:].T, errors, alpha=-1)
    return QuantizedWeight(torch.empty_like(nearest[0]).index_copy_(1, order, rounded.T), scale)


def _round_columns(left: Tensor, upper: Tensor, scale: Tensor, codes: Tensor, errors: Tensor) -> None:
    """Codes and weighted errors [n, out] of columns `left` [n, out], which are used up, by their factors [n, n]."""
    if (count := len(left)) > _FEW:
        half = count // 2
        _round_columns(left[:half], upper[:half, :half], scale, codes[:half], errors[:half])
        left[half:].addmm_(upper[:half, half:].T, errors[:half], alpha=-1)
        _round_columns(left[half:], upper[half:, half:], scale, codes[half:], errors[half:])
        return
    for at, column in enumerate(left):
        rounded = (column / scale).round_().clamp_(-127, 127)
        codes[at] = rounded
        errors[at] = (column - rounded * scale) / upper[at, at]
        left[at + 1 :].addr_(upper[at, at + 1 :], errors[at], alpha=-1)


def _inverse_root(mirrored: Tensor) -> Tensor | None:
    """Upper Cholesky factor of a damped gram matrix's inverse, fp32; None where the sample says nothing.

    The matrix comes with its rows and columns in reverse, and is used up. It is M M^T with an upper M, which its mirror
    image gives, and its inverse has the factor M^-1. Three matrices of its size are in memory, no more.
    """
    mean = mirrored.diagonal().mean().item()
    if not mean > 0:
        return None
    work = mirrored.to(torch.float64 if mirrored.shape[0] <= _WIDEST_DOUBLE else torch.float32)
    damped = 0.0
    for damping in (_DAMPING, 10 * _DAMPING, 100 * _DAMPING):
        work.diagonal().add_((damping - damped) * mean)
        damped = damping
        lower, failed = torch.linalg.cholesky_ex(work)
        if not failed:
            upper = lower.flip(0, 1)
            del lower
            work.zero_().fill_diagonal_(1)
            return torch.linalg.solve_triangular(upper, work, upper=True, out=work).to(torch.float32)
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
