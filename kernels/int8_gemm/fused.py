"""int8 product in Triton with the rescale in its epilogue: no int32 result is ever in memory."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from kernels.jit import jit, missing, tl, triton

_L2_ROWS = 16  # row tiles that are walked together, so that the weight's tiles are found in the L2 cache


def declines(device: torch.device) -> str | None:
    """Serves CUDA from sm_80 up where Triton is installed and compiles it."""
    return missing(device, _trial)


def _trial(device: torch.device) -> None:
    codes, weight = (torch.zeros(size, 128, dtype=torch.int8, device=device) for size in (128, 64))
    token, scale = torch.ones(128, 1, device=device), torch.ones(64, device=device)
    add_product_(product(codes, token, weight, scale, None), codes, token, weight, scale, None)


def prepack(weight: Tensor) -> Tensor:
    """int8 weight [out, in] as it is: both operands are read along the inner dimension."""
    return weight.contiguous()


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
    out = codes.new_empty(codes.shape[0], weight.shape[0], dtype=dtype)
    _launch(out, codes, token_scale, weight, scale, bias, add=False)
    return out


def add_product_(
    total: Tensor, codes: Tensor, token_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None
) -> None:
    """total [n, out] += `product`, in the epilogue."""
    _launch(total, codes, token_scale, weight, scale, bias, add=True)


@cache
def tiles(rows: int, hopper: bool) -> dict[str, int]:
    """Tile sizes and launch shape, as measured on one H200 (benchmarks/prefill.py shows the table)."""
    if rows <= 64:
        return {"M": 64, "N": 64, "K": 128, "num_warps": 4, "num_stages": 4}
    if hopper:
        return {"M": 128, "N": 128, "K": 128, "num_warps": 4, "num_stages": 3}
    return {"M": 128, "N": 128, "K": 64, "num_warps": 4, "num_stages": 4}


def _launch(
    out: Tensor,
    codes: Tensor,
    token_scale: Tensor | None,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    add: bool,
) -> None:
    (m, k), n = codes.shape, weight.shape[0]
    assert codes.stride(1) == 1 and weight.stride(1) == 1 and out.stride(1) == 1
    hopper = codes.is_cuda and torch.cuda.get_device_capability(codes.device) >= (9, 0)
    config = tiles(128 if m > 64 else 64, hopper)
    grid = (triton.cdiv(m, config["M"]) * triton.cdiv(n, config["N"]),)
    _gemm[grid](
        codes,
        weight,
        out,
        scale if token_scale is None else token_scale,
        scale,
        scale if bias is None else bias,
        m,
        n,
        k,
        codes.stride(0),
        weight.stride(0),
        out.stride(0),
        TOKEN=token_scale is not None,
        BIAS=bias is not None,
        ADD=add,
        EVEN=k % config["K"] == 0,
        GROUP=_L2_ROWS,
        **config,
    )


@jit(do_not_specialize=["m"])  # one kernel for every length of a chunk
def _gemm(
    a,
    b,
    c,
    token_scale,
    scale,
    bias,
    m,
    n,
    k,
    a_stride,
    b_stride,
    c_stride,
    TOKEN: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    EVEN: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    program = tl.program_id(0)
    down, across = tl.cdiv(m, M), tl.cdiv(n, N)
    band = program // (GROUP * across)
    height = min(down - band * GROUP, GROUP)
    row_tile = band * GROUP + program % (GROUP * across) % height
    column_tile = program % (GROUP * across) // height
    rows = row_tile * M + tl.arange(0, M)
    columns = column_tile * N + tl.arange(0, N)
    # Past the edge a row is read again and not stored.
    a_rows = tl.where(rows < m, rows, 0).to(tl.int64)
    b_rows = tl.where(columns < n, columns, 0).to(tl.int64)
    inner = tl.arange(0, K)
    a_at = a + a_rows[:, None] * a_stride + inner[None]
    b_at = b + b_rows[None] * b_stride + inner[:, None]
    total = tl.zeros((M, N), dtype=tl.int32)
    for start in range(0, k, K):
        if EVEN:
            left, right = tl.load(a_at), tl.load(b_at)
        else:
            left = tl.load(a_at, mask=inner[None] < k - start, other=0)
            right = tl.load(b_at, mask=inner[:, None] < k - start, other=0)
        total = tl.dot(left, right, total, out_dtype=tl.int32)
        a_at += K
        b_at += K
    # In two halves: the sum's tile and the whole of what it is added to would not fit into registers together.
    halves = tl.permute(tl.reshape(total, (M, 2, N // 2)), (0, 2, 1)).split()
    for half in tl.static_range(2):
        columns = column_tile * N + half * (N // 2) + tl.arange(0, N // 2)
        out = halves[half].to(tl.float32) * tl.load(scale + columns, mask=columns < n, other=0.0)[None]
        if TOKEN:
            out *= tl.load(token_scale + rows, mask=rows < m, other=0.0)[:, None]
        if BIAS:
            out += tl.load(bias + columns, mask=columns < n, other=0.0)[None]
        inside = (rows < m)[:, None] & (columns < n)[None]
        at = c + rows.to(tl.int64)[:, None] * c_stride + columns[None]
        if ADD:
            out += tl.load(at, mask=inside, other=0.0)
        tl.store(at, out.to(c.dtype.element_ty), mask=inside)
