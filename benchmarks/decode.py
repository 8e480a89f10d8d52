"""The decode attention kernel and a whole decode step of the 8B shape beside other designs, on one GPU.

The kernel is measured beside FlashInfer's bf16 decode and a device copy: bytes of codes and scales over time, for graph
replays that rotate through more history than the L2 holds, after a comparison with float64 on the same codes. The step
is measured over context by _step.py, beside full bf16 attention and the design that expands its 4-bit cache.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks._picture import draw
from benchmarks._report import Bar, Wrong, at_least, at_most, finish, parser_for
from benchmarks._step import EXPANDED, LONGEST, step_figures
from kernels.attention_decode import KV4_DECODE, Packed
from kernels.kv4_pack import KV4_LAYOUT

BLOCK, HEADS, GROUP, HEAD_DIM, EXACT = 128, 4, 4, 128, 256
# (KV heads, tokens): least part of FlashInfer's bandwidth
BARS = {
    (4, LONGEST): 0.9,
    (4, 1 << 20): 0.85,
    (4, 1 << 18): 0.75,
    (1, LONGEST): 0.8,
    (1, 1 << 20): 0.7,
}
FLASHINFER = ((4, LONGEST), (4, 1 << 20), (4, 1 << 18), (8, 1 << 20))
REPLAYS = 20


def main(argv: list[str]) -> int:
    """Runs the benchmark; exit code 1 when a bar is missed."""
    parser = parser_for("decode", __doc__)
    parser.add_argument("--picture", type=Path, help="where to draw milliseconds a token over context")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("This benchmark needs a CUDA GPU.", file=sys.stderr)
        return 1
    copy = copy_rate()
    history = random_history(HEADS, LONGEST // BLOCK, HEAD_DIM)
    rates, worst = {}, 0.0
    for heads, tokens in BARS:
        rate, error = kernel_rate(history, heads, tokens)
        rates[heads, tokens] = rate
        worst = max(worst, error)
    del history
    torch.cuda.empty_cache()
    dense, why = flashinfer_rates()
    limit = max(dense.values()) if dense else copy
    steps = step_figures(_full_attention())
    unit = "of FlashInfer" if dense else "of a copy"
    bars = [*_bars(rates, worst, limit, unit), *_step_bars(steps, limit, unit)]
    details = {
        "copy_tb_s": copy,
        "limit": "FlashInfer bf16 decode" if dense else f"device copy ({why})",
        "flashinfer_tb_s": _named(dense),
        "kernel_tb_s": _named(rates),
        "step": steps,
    }
    for name, figure in details.items():
        print(f"{name}: {figure}")
    draw(steps, limit, args.picture)
    finish("decode", argv, bars, details, args.json, torch.get_num_threads())
    return 0 if all(bar.holds for bar in bars) else 1


def _named(rates: dict[tuple[int, int], float]) -> dict[str, float]:
    return {f"{heads} KV heads, {tokens} tokens": round(rate, 4) for (heads, tokens), rate in rates.items()}


def _bars(rates: dict[tuple[int, int], float], worst: float, limit: float, unit: str) -> list[Bar]:
    bars = []
    for (heads, tokens), least in BARS.items():
        name = f"attention kernel, {heads} KV heads, {tokens} tokens"
        bars.append(at_least(name, rates[heads, tokens] / limit, unit, least))
    return [*bars, at_most("error against float64", worst * 1e3, "per mille", 1.0)]


def _step_bars(steps: dict[str, Any], limit: float, unit: str) -> list[Bar]:
    ms = steps["ms"]
    slope, intercept = (float(x) for x in np.polyfit(list(ms), list(ms.values()), 1))
    rate = steps["bytes_a_token"] / slope / 1e9
    dense, expanded = steps["dense_ms"], steps["expanded_ms"]
    steps["line"] = {"ms_at_0": round(intercept, 3), "tb_s": round(rate, 3)}
    faster = "x faster than bf16 weights and full bf16 attention"
    return [
        at_least("whole step: bytes a token over its slope", rate / limit, unit, 0.85),
        at_most("whole step: without context", intercept, "ms", 3.5),
        at_most("one step at 4,194,304 tokens", ms[LONGEST], "ms", 22.0),
        at_least(f"{faster}, 320K", dense[320 << 10] / ms[320 << 10], "x", 3.0),
        at_least(f"{faster}, 768K", dense[768 << 10] / ms[768 << 10], "x", 4.0),
        at_least("x faster than expanding everything, 1M", expanded[EXPANDED] / ms[EXPANDED], "x", 4.0),
        at_most("steps that waited for the host", steps["late_steps"], "steps", 0),
    ]


def _full_attention() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Full bf16 attention of one token, the fastest there is: FlashInfer's, else torch's."""
    try:
        from flashinfer import single_decode_with_kv_cache
    except ImportError:
        return lambda q, k, v: F.scaled_dot_product_attention(
            q[None, :, None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], enable_gqa=True
        )[0, :, 0]
    return lambda q, k, v: single_decode_with_kv_cache(q, k, v, use_tensor_cores=True)


def seconds(run: Callable[[int], Any], variants: int, graph: bool = True) -> float:
    """Median seconds of `run(i)`, i = 0 .. variants - 1, over replays of a graph that holds all of them."""

    def all_of_them() -> None:
        for i in range(variants):
            run(i)

    all_of_them()
    torch.cuda.synchronize()
    replay = all_of_them
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            all_of_them()
        replay = captured.replay
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / variants)
    return median(times[REPLAYS // 4 :])


def copy_rate() -> float:
    """TB/s of a device copy, read and written; outside a graph, where copies may take another engine."""
    source = torch.randint(256, (1 << 32,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda _: target.copy_(source), 1, graph=False) / 1e12


def random_history(heads: int, blocks: int, d: int, layout: Any = None) -> Packed:
    """Random codes with scales as of unit-variance keys and values, in all blocks of a pool."""
    layout = layout or KV4_LAYOUT.choose(torch.device("cuda"), head_dim=d, group=GROUP).backend.run
    panels = layout.value_panels(d)
    width = BLOCK * d // 2
    keys = torch.randint(256, (heads, blocks, width), dtype=torch.uint8, device="cuda")
    values = torch.randint(256, (heads, panels, blocks, width // panels), dtype=torch.uint8, device="cuda")
    scales = torch.rand(heads, blocks, BLOCK, 4, device="cuda") * 0.1
    scales[..., 0::2] += 0.3
    return Packed(keys, values, scales.half(), torch.arange(blocks, dtype=torch.int32, device="cuda"))


def part_of(history: Packed, heads: int, table: Tensor) -> Packed:
    """The first heads, over the blocks in `table`."""
    return Packed(history.keys[:heads], history.values[:heads], history.scales[:heads], table)


def float64_attention(q: Tensor, exact_k: Tensor, exact_v: Tensor, packed: Packed, layout: Any, scale: float) -> Tensor:
    """The truth, 512 blocks at a time: [heads, group, d] in float64."""
    d = q.shape[-1]
    q = q.double() * scale

    def restore(codes: Tensor, scales: Tensor) -> Tensor:
        return (codes.double() - 8) * scales[..., :1].double() + scales[..., 1:].double()

    tops, masses, sums = [], [], []

    def add(keys: Tensor, values: Tensor) -> None:
        scores = q @ keys.transpose(1, 2)
        tops.append(scores.amax(-1, keepdim=True))
        weights = (scores - tops[-1]).exp()
        masses.append(weights.sum(-1, keepdim=True))
        sums.append(weights @ values)

    if exact_k.shape[1]:
        add(exact_k.double(), exact_v.double())
    for table in packed.table.long().split(512) if packed.table.numel() else ():
        scales = packed.scales[:, table].flatten(1, 2)
        keys = layout.unpack_keys(packed.keys[:, table].flatten(1), d)
        values = layout.unpack_values(packed.values[:, :, table].flatten(2), d)
        add(restore(keys, scales[..., :2]), restore(values, scales[..., 2:]))
    weights = (torch.stack(tops) - torch.stack(tops).amax(0)).exp()
    return (torch.stack(sums) * weights).sum(0) / (torch.stack(masses) * weights).sum(0)


def relative_error(out: Tensor, want: Tensor) -> float:
    """|out - want| / |want| over everything; NaN stays NaN."""
    return float((out.double() - want).norm() / want.norm())


def kernel_rate(history: Packed, heads: int, tokens: int) -> tuple[float, float]:
    """TB/s over codes and scales, and the error against float64."""
    device = history.keys.device
    layout = KV4_LAYOUT.choose(device, head_dim=HEAD_DIM, group=GROUP).backend.run
    decode = KV4_DECODE.choose(device, head_dim=HEAD_DIM, group=GROUP).backend.run.decode
    q = torch.randn(heads, GROUP, HEAD_DIM, device=device)
    exact_k, exact_v = torch.randn(2, heads, EXACT, HEAD_DIM, device=device).half()
    blocks = tokens // BLOCK
    parts = [part_of(history, heads, table) for table in history.table.split(blocks)]
    scale = HEAD_DIM**-0.5
    out = decode(q, exact_k, exact_v, parts[-1], layout, scale)
    error = relative_error(out, float64_attention(q, exact_k, exact_v, parts[-1], layout, scale))
    if not error <= 1e-2:  # no speed of what is wrong; the bar is stricter
        raise Wrong(f"{heads} heads, {tokens} tokens: error {error:.2e} against float64")
    time = seconds(lambda i: decode(q, exact_k, exact_v, parts[i], layout, scale), len(parts))
    return heads * tokens * (HEAD_DIM + 8) / time / 1e12, error


def flashinfer_rates() -> tuple[dict[tuple[int, int], float], str]:
    """TB/s of FlashInfer's bf16 decode for (KV heads, tokens), the better of its kernels; or none and the reason."""
    try:
        from flashinfer import single_decode_with_kv_cache
    except ImportError as missing:
        return {}, str(missing)
    rates: dict[tuple[int, int], float] = {}
    why = ""
    for heads, tokens in FLASHINFER:
        q = torch.randn(heads * GROUP, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        k, v = torch.randn(2, tokens, heads, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        want = torch.cat([_dense(q[h * GROUP : (h + 1) * GROUP], k[:, h], v[:, h]) for h in range(heads)])
        for tensor_cores in (True, False):

            def run(_: int, q: Tensor = q, k: Tensor = k, v: Tensor = v, tensor_cores: bool = tensor_cores) -> Tensor:
                return single_decode_with_kv_cache(q, k, v, use_tensor_cores=tensor_cores)

            try:
                error = relative_error(run(0), want)
                if not error <= 2e-2:
                    raise Wrong(f"error {error:.2e} against float64")
                rate = (k.nbytes + v.nbytes) / seconds(run, 1) / 1e12
                rates[heads, tokens] = max(rate, rates.get((heads, tokens), 0.0))
            except (RuntimeError, Wrong) as failure:
                why = str(failure).splitlines()[0]
                print(f"FlashInfer, {heads} x {tokens}, tensor cores {tensor_cores}: {why}", file=sys.stderr)
        del q, k, v
        torch.cuda.empty_cache()
    return rates, why


def _dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One head in float64: q [group, d], k, v [n, d]."""
    return (q.double() @ k.double().T * HEAD_DIM**-0.5).softmax(-1) @ v.double()
