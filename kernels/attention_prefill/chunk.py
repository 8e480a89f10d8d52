"""A chunk's own attention in Triton: retrieval heads block by block, streaming heads over sink and window, and merging.

No mask lies in memory: what a query sees follows from its position. Online softmax in powers of two (FlashAttention-2,
Dao, 2023).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels.jit import INTERPRETED, jit, missing, tl, triton

BLOCK = 128  # tokens of a block of the cache, and queries of a program
_LOG2E = math.log2(math.e)
HEAD_DIMS = (16, 32, 64, 128, 256)


def declines(device: torch.device, head_dim: int, dtype: torch.dtype) -> str | None:
    """Serves fp16 and bf16 where Triton does, for head sizes that are powers of two."""
    if head_dim not in HEAD_DIMS:
        return f"head size {head_dim} is not one of {HEAD_DIMS}"
    if dtype not in (torch.float16, torch.bfloat16) and not INTERPRETED:
        return f"{dtype} is not fp16 or bf16"
    return missing(device, _trial, head_dim)


def _trial(device: torch.device, head_dim: int) -> None:
    x = torch.ones(1, 2 * BLOCK, head_dim, dtype=torch.float16, device=device)
    q, lse = torch.ones(BLOCK, 2, head_dim, dtype=torch.float16, device=device), torch.zeros(BLOCK, 2, device=device)
    attend_chunk(q, (x, x), (x, x), (x, x), (q, lse), BLOCK, 1.0, torch.empty_like(q))
    attend_window(q, (x, x), (x, x), BLOCK, 0, 4, 20, 1.0, torch.empty_like(q))
    merge((q, lse), (q, lse), (torch.empty_like(q), torch.empty_like(lse)))


def _shape(device: torch.device, d: int) -> dict[str, int]:
    """Keys a step, their steps in flight, and warps: what fits beside 128 queries in 99 KiB, or in Hopper's 227."""
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    if hopper and d <= 128:
        return {"N": 128, "STAGES": 2, "num_warps": 8}
    return {"N": 64 if d <= 128 else 32, "STAGES": 2 if d <= 128 or hopper else 1, "num_warps": 8}


def _strides(*tensors: Tensor) -> list[int]:
    """Of rows and heads, as the tensors have them, one behind the other."""
    assert all(t.stride(2) == 1 for t in tensors)
    return [t.stride(axis) for t in tensors for axis in (0, 1)]


def attend_chunk(
    q: Tensor,
    own: tuple[Tensor, Tensor],
    past: tuple[Tensor, Tensor],
    first: tuple[Tensor, Tensor] | None,
    history: tuple[Tensor, Tensor] | None,
    before: int,
    scale: float,
    out: Tensor,
) -> None:
    """Writes out [n, heads, d]: each query sees its own block of `own` causally, and all earlier blocks of `past`.

    q [n, heads, d]: tokens before .. before + n - 1 of the stretch of blocks whose keys and values [kv_heads, m, d]
    `own` and `past` hold, as they are and as the cache gives them back; `past` need not hold the last block. `first`:
    BLOCK more tokens [kv_heads, BLOCK, d] that every query sees. `history`: output [n, heads, d] and log-sum-exp
    [n, heads] (fp32, natural) of the same queries over still older tokens, to go on from.
    """
    n, heads, d = q.shape
    kv_heads = own[0].shape[0]
    blocks = triton.cdiv(before + n, BLOCK)
    older, older_lse = history if history is not None else (q, q)
    front = first if first is not None else own
    tensors = (q, *own, *past, *front, older, out)
    _chunk[(blocks, heads)](
        *tensors,
        older_lse,
        n,
        own[0].shape[1],
        before,
        scale * _LOG2E,
        *_strides(*tensors),
        older_lse.stride(0),
        GROUP=heads // kv_heads,
        FIRST=first is not None,
        HISTORY=history is not None,
        D=d,
        M=BLOCK,
        **_shape(q.device, d),
    )


def attend_window(
    q: Tensor,
    sinks: tuple[Tensor, Tensor],
    run: tuple[Tensor, Tensor],
    length: int,
    run_from: int,
    sink: int,
    recent: int,
    scale: float,
    out: Tensor,
) -> None:
    """Writes out [n, heads, d]: the query at position i sees keys j <= i with j < sink or j > i - recent.

    q [n, heads, d] at positions length .. length + n - 1; `sinks`: keys and values [kv_heads, >= min(sink, length + n),
    d] of the first tokens; `run` [kv_heads, m, d]: those of positions run_from .. length + n - 1.
    """
    n, heads, d = q.shape
    kv_heads = run[0].shape[0]
    tensors = (q, *sinks, *run, out)
    _window[(triton.cdiv(n, BLOCK), heads)](
        *tensors,
        n,
        length,
        run_from,
        min(sink, length + n),
        sink,
        recent,
        scale * _LOG2E,
        *_strides(*tensors),
        GROUP=heads // kv_heads,
        D=d,
        M=BLOCK,
        **_shape(q.device, d),
    )


def merge(
    part: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], out: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """`out` = the attention over both parts' keys: each (output [n, heads, d], natural log-sum-exp [n, heads]).

    Outputs of any float dtype; `out` may be `part`.
    """
    (x, x_lse), (y, y_lse), (z, z_lse) = part, other, out
    n, heads, d = x.shape
    assert all(t.is_contiguous() for t in (x, x_lse, y, y_lse, z, z_lse))
    rows = n * heads
    _merge[(triton.cdiv(rows, 32),)](x, x_lse, y, y_lse, z, z_lse, rows, D=d, ROWS=32, num_warps=4)
    return out


@jit
def _scores(query, key, scale):
    return tl.dot(query, key) * scale


@jit
def _take(total, mass, top, scores, value):
    """Online softmax: scores [M, N] in log2 and values [N, D] join the running sums."""
    peak = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - peak[:, None])
    factor = tl.exp2(top - peak)
    mass = mass * factor + tl.sum(weights, 1)
    total = tl.dot(weights.to(value.dtype), value, total * factor[:, None])
    return total, mass, peak


@jit(do_not_specialize=["n", "filled", "before", "older_lse_row"])  # one kernel for chunks and layers of any size
def _chunk(
    q,
    own_k,
    own_v,
    past_k,
    past_v,
    first_k,
    first_v,
    older,
    out,
    older_lse,
    n,
    filled,
    before,
    scale,
    q_row,
    q_head,
    own_k_head,
    own_k_row,
    own_v_head,
    own_v_row,
    past_k_head,
    past_k_row,
    past_v_head,
    past_v_row,
    first_k_head,
    first_k_row,
    first_v_head,
    first_v_row,
    older_row,
    older_head,
    out_row,
    out_head,
    older_lse_row,
    GROUP: tl.constexpr,
    FIRST: tl.constexpr,
    HISTORY: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    STAGES: tl.constexpr,
):
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest first
    head = tl.program_id(1)
    kv_head = (head // GROUP).to(tl.int64)
    place = block * M + tl.arange(0, M)
    row = place - before
    asked = (row >= 0) & (row < n)
    rows = tl.where(asked, row, 0).to(tl.int64)
    channel = tl.arange(0, D)
    key_place = tl.arange(0, N)
    query = tl.load(q + rows[:, None] * q_row + head * q_head + channel[None])
    if HISTORY:
        total = tl.load(older + rows[:, None] * older_row + head * older_head + channel[None]).to(tl.float32)
        top = tl.load(older_lse + rows * older_lse_row + head) * 1.4426950408889634
        mass = tl.full((M,), 1.0, tl.float32)
    else:
        total = tl.zeros((M, D), tl.float32)
        top = tl.full((M,), -1e30, tl.float32)
        mass = tl.zeros((M,), tl.float32)
    if FIRST:
        for start in tl.range(0, M, N, num_stages=1):
            places = (start + key_place).to(tl.int64)
            key = tl.load(first_k + kv_head * first_k_head + places[None] * first_k_row + channel[:, None])
            value = tl.load(first_v + kv_head * first_v_head + places[:, None] * first_v_row + channel[None])
            total, mass, top = _take(total, mass, top, _scores(query, key, scale), value)
    for start in tl.range(0, block * M, N, num_stages=STAGES):
        places = (start + key_place).to(tl.int64)
        key = tl.load(past_k + kv_head * past_k_head + places[None] * past_k_row + channel[:, None])
        value = tl.load(past_v + kv_head * past_v_head + places[:, None] * past_v_row + channel[None])
        total, mass, top = _take(total, mass, top, _scores(query, key, scale), value)
    for start in tl.range(block * M, block * M + M, N, num_stages=1):
        places = (start + key_place).to(tl.int64)
        there = places < filled
        key = tl.load(
            own_k + kv_head * own_k_head + places[None] * own_k_row + channel[:, None], mask=there[None], other=0.0
        )
        value = tl.load(
            own_v + kv_head * own_v_head + places[:, None] * own_v_row + channel[None], mask=there[:, None], other=0.0
        )
        scores = tl.where(places[None] <= place[:, None], _scores(query, key, scale), float("-inf"))
        total, mass, top = _take(total, mass, top, scores, value)
    at = out + rows[:, None] * out_row + head * out_head + channel[None]
    tl.store(at, (total / mass[:, None]).to(out.dtype.element_ty), mask=asked[:, None])


@jit(do_not_specialize=["n", "length", "run_from", "sinks", "sink", "recent"])
def _window(
    q,
    sink_k,
    sink_v,
    run_k,
    run_v,
    out,
    n,
    length,
    run_from,
    sinks,
    sink,
    recent,
    scale,
    q_row,
    q_head,
    sink_k_head,
    sink_k_row,
    sink_v_head,
    sink_v_row,
    run_k_head,
    run_k_row,
    run_v_head,
    run_v_row,
    out_row,
    out_head,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    STAGES: tl.constexpr,
):
    head = tl.program_id(1)
    kv_head = (head // GROUP).to(tl.int64)
    row = tl.program_id(0) * M + tl.arange(0, M)
    asked = row < n
    rows = tl.where(asked, row, 0).to(tl.int64)
    place = length + row
    channel = tl.arange(0, D)
    step = tl.arange(0, N)
    query = tl.load(q + rows[:, None] * q_row + head * q_head + channel[None])
    total = tl.zeros((M, D), tl.float32)
    top = tl.full((M,), -1e30, tl.float32)
    mass = tl.zeros((M,), tl.float32)
    for start in tl.range(0, sinks, N, num_stages=1):
        places = start + step
        there = places < sinks
        key = tl.load(
            sink_k + kv_head * sink_k_head + places[None] * sink_k_row + channel[:, None], mask=there[None], other=0.0
        )
        value = tl.load(
            sink_v + kv_head * sink_v_head + places[:, None] * sink_v_row + channel[None],
            mask=there[:, None],
            other=0.0,
        )
        seen = there[None] & (places[None] <= place[:, None])
        total, mass, top = _take(total, mass, top, tl.where(seen, _scores(query, key, scale), float("-inf")), value)
    first_place = length + tl.program_id(0) * M
    low = tl.maximum(tl.maximum(first_place - recent + 1, run_from), sink)
    high = tl.minimum(first_place + M, length + n)
    for start in tl.range(low, high, N, num_stages=STAGES):
        places = start + step
        there = places < high
        at = (places - run_from).to(tl.int64)
        key = tl.load(
            run_k + kv_head * run_k_head + at[None] * run_k_row + channel[:, None], mask=there[None], other=0.0
        )
        value = tl.load(
            run_v + kv_head * run_v_head + at[:, None] * run_v_row + channel[None], mask=there[:, None], other=0.0
        )
        seen = there[None] & (places[None] <= place[:, None]) & (places[None] > place[:, None] - recent)
        total, mass, top = _take(total, mass, top, tl.where(seen, _scores(query, key, scale), float("-inf")), value)
    at = out + rows[:, None] * out_row + head * out_head + channel[None]
    tl.store(at, (total / mass[:, None]).to(out.dtype.element_ty), mask=asked[:, None])


@jit(do_not_specialize=["rows"])
def _merge(x, x_lse, y, y_lse, z, z_lse, rows, D: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    left = tl.load(x_lse + row, mask=inside, other=0.0)
    right = tl.load(y_lse + row, mask=inside, other=0.0)
    share = 1.0 / (1.0 + tl.exp(left - right))
    at = row[:, None] * D + tl.arange(0, D)[None]
    a = tl.load(x + at, mask=inside[:, None], other=0.0).to(tl.float32)
    b = tl.load(y + at, mask=inside[:, None], other=0.0).to(tl.float32)
    tl.store(z + at, (a + (b - a) * share[:, None]).to(z.dtype.element_ty), mask=inside[:, None])
    top = tl.maximum(left, right)
    tl.store(z_lse + row, top + tl.log(tl.exp(left - top) + tl.exp(right - top)), mask=inside)
