"""Reading a long prompt on one GPU: attention over packed history, int8 products, and whole prefills of the 8B shape.

Weights are random, which speed does not depend on. Every kernel is compared with a reference before it is timed. A
whole prefill is timed chunk by chunk with device events while the host is always a chunk ahead, so the time to any
shorter length is in it too; c N + d N^2 is fitted to at least four lengths.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from app.engine.warm_up import warm_up
from benchmarks import _cutlass
from benchmarks._llama_8b import WINDOW, dense_8b, full_cache, octavo_8b
from benchmarks._report import Bar, Wrong, at_least, at_most, finish, parser_for
from benchmarks.decode import float64_attention, random_history, relative_error
from kernels.attention_prefill import ROWS
from kernels.int8_gemm import INT8_GEMM, int_mm, ref
from models.cache.duo import DuoCache
from models.cache.plan import workspace_bytes
from models.cache.pool import BlockPool
from models.cache.shape import CacheShape
from models.decoder import Decoder
from quant.w8a8 import W8A8Linear

CHUNK, KV_HEADS, GROUP, D = 8192, 4, 4, 128
MILLION, COMPARED, WATCHED = 1 << 20, 327_680, 1 << 17
SHAPES = {"qkv": (6144, 4096), "output": (4096, 4096), "gate_up": (28_672, 4096), "down": (4096, 14_336)}
DEVICE = torch.device("cuda", 0)


def main(argv: list[str]) -> int:
    """Runs the benchmark; exit code 1 when a bar is missed."""
    parser = parser_for("prefill", __doc__)
    parser.add_argument("--million", action="store_true", help="read 1,048,576 tokens too, in about four minutes")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("This benchmark needs a CUDA GPU.", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    details: dict[str, Any] = {}
    for name, part in (
        ("attention", attention),
        ("gemm", gemm),
        ("chunking_error", chunking),
        ("whole", lambda: whole(args.million)),
    ):
        details[name] = part()
        print(f"{name}: {details[name]}", flush=True)
        free()
    bars = _bars(details)
    finish("prefill", argv, bars, details, args.json, torch.get_num_threads())
    return 0 if all(bar.holds for bar in bars) else 1


def _bars(details: dict[str, Any]) -> list[Bar]:
    whole, worst = details["whole"], float(np.max(list(details["chunking_error"].values())))
    fitted = whole["fit"]
    bars = [
        at_least("attention over packed history at 1M", details["attention"]["share"], "of bf16", 0.92),
        at_least("int8 product with quantisation, a layer", details["gemm"]["layer_speedup"], "x bf16", 1.5),
        at_least("320K tokens, against bf16 and full attention", whole["speedup_320k"], "x", 1.8),
        at_most("320K tokens, KV memory of bf16", whole["kv_share_320k"], "of bf16", 1 / 6),
    ]
    if "million_s" in whole:
        bars.append(at_most("1,048,576 tokens, measured", whole["million_s"], "s", 280))
    else:
        seconds = _predicted(fitted, MILLION)
        bars.append(Bar("1,048,576 tokens, from the fit, not measured", round(seconds, 1), "s", "<= 280", False))
    return [
        *bars,
        at_most("residual of c N + d N^2", 100 * fitted["worst_residual"], "%", 3),
        at_most("4,194,304 tokens, last chunk against the fit", 100 * whole["window"]["off_fit"], "%", 10),
        at_most("chunked against unchunked", 1e3 * worst, "per mille", 2),
        at_most(f"device idle while {WATCHED:,} tokens are read", 100 * whole["idle"], "%", 1),
    ]


def free() -> None:
    """Gives back what nobody holds."""
    gc.collect()
    torch.cuda.empty_cache()


def in_turns(runs: dict[str, Callable[[], Any]], times: int = 5) -> dict[str, float]:
    """Milliseconds of each, the best of three means over `times` runs, in turns: a warm GPU is a slower one."""
    best = dict.fromkeys(runs, float("inf"))
    for run in runs.values():
        run()
    for _ in range(3):
        for name, run in runs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(2_000_000)  # a millisecond, in which the host gets ahead, as it is in a prefill
            start.record()
            for _ in range(times):
                run()
            end.record()
            end.synchronize()
            best[name] = min(best[name], start.elapsed_time(end) / times)
    return best


def _shape(retrieval: tuple[int, ...], streaming: tuple[int, ...], bits: int = 4, d: int = D) -> CacheShape:
    dtype = torch.float16 if bits == 4 else torch.bfloat16
    return CacheShape(retrieval, streaming, GROUP, d, 128, 256, bits, dtype, dtype)


def attention() -> dict[str, Any]:
    """A chunk's attention to a million packed tokens, and the same kernel on contiguous bf16, in turns."""
    (store,) = BlockPool(_shape((KV_HEADS,), (0,)), 1, DEVICE).stores
    store.blocks = MILLION // store.shape.block
    packed = random_history(KV_HEADS, store.blocks, D, store.layout)
    store._keys, store._values, store._scales = packed.keys, packed.values, packed.scales
    q = torch.randn(CHUNK, KV_HEADS * GROUP, D, device=DEVICE)
    slots, ids = slice(0, KV_HEADS), list(range(store.blocks))
    narrow = q.half()
    out, _ = store.history._history(slots, narrow, ids, packed.table)
    errors = []
    nothing = torch.zeros(KV_HEADS, 0, D, device=DEVICE)
    for row in (0, 77, CHUNK - 1):
        grouped = narrow[row].float().view(KV_HEADS, GROUP, D)
        want = float64_attention(grouped, nothing, nothing, packed, store.layout, D**-0.5)
        errors.append(relative_error(out[row].float().view_as(want), want))
    worst = float(np.max(errors))  # NaN stays NaN
    if not worst <= 5e-3:
        raise Wrong(f"attention over packed history: error {worst:.2e} against float64")
    k, v = torch.randn(2, KV_HEADS, MILLION, D, device=DEVICE, dtype=torch.bfloat16)
    choice = ROWS.choose(DEVICE, head_dim=D, dtype=torch.bfloat16).backend
    wide = q.bfloat16()
    times = in_turns(
        {
            "packed": lambda: store.history._history(slots, narrow, ids, packed.table),
            "bf16": lambda: choice.run.attend(wide, k, v, scale=D**-0.5),
        },
        2,
    )
    flops = 4 * CHUNK * MILLION * KV_HEADS * GROUP * D
    rates = [flops / time / 1e9 for time in times.values()]
    return {
        "kernel": choice.name,
        "error": worst,
        "packed_tflops": round(rates[0], 1),
        "bf16_tflops": round(rates[1], 1),
        "share": round(rates[0] / rates[1], 4),
    }


def gemm() -> dict[str, Any]:
    """bf16 and int8 products of a layer at 8,192 rows; int8 with the quantisation of its bf16 input."""
    serves = INT8_GEMM.choose(DEVICE).backend.name
    why_no_cutlass = _cutlass.declines(DEVICE)
    table: dict[str, Any] = {"kernel": serves} | ({"cutlass": why_no_cutlass} if why_no_cutlass else {})
    sums = np.zeros(2)
    for name, (outer, inner) in SHAPES.items():
        times, of_cutlass = _product_times(name, outer, inner, cutlass=why_no_cutlass is None)
        sums += times["bf16"], times["quantise"] + times[serves]
        tera = 2 * CHUNK * outer * inner / 1e9
        table[name] = {
            "ms": {key: round(value, 4) for key, value in times.items()},
            "bf16_tflops": round(tera / times["bf16"]),
            "int8_tops": round(tera / times[serves]),
            "speedup": round(times["bf16"] / (times["quantise"] + times[serves]), 3),
            **({"cutlass": of_cutlass} if of_cutlass else {}),
        }
    return {**table, "layer_speedup": round(float(sums[0] / sums[1]), 4)}


def _product_times(name: str, outer: int, inner: int, cutlass: bool) -> tuple[dict[str, float], str | None]:
    """Milliseconds of each, all checked, and which of CUTLASS's kernels was the fastest of them, where it serves."""
    x = torch.randn(CHUNK, inner, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.randn(outer, inner, device=DEVICE, dtype=torch.bfloat16) * 0.02
    layer = W8A8Linear.from_float(weight)
    rows = layer.prepare(x)
    if rows.scale is None:
        raise Wrong("no int8 product serves here")
    codes, token_scale, codes_w, scale_w = rows.values, rows.scale, layer._weight, layer._scale
    some = slice(0, CHUNK, CHUNK // 16)
    want = (ref.matmul(codes[some], codes_w, scale_w) * token_scale[some]).double()
    error = relative_error(layer(rows)[some], want)
    if not error <= 1e-6:
        raise Wrong(f"int8 product {name}: error {error:.1e}")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    layer.raw(rows)
    if torch.cuda.max_memory_allocated() - held >= 4 * CHUNK * outer:
        raise Wrong(f"int8 product {name}: an int32 result lay in memory")
    runs: dict[str, Callable[[], Tensor]] = {}
    for backend in INT8_GEMM.backends:
        if hasattr(backend.run, "product") and backend.declines(DEVICE) is None:
            runs[backend.name] = partial(
                backend.run.product, codes, token_scale, codes_w, scale_w, None, torch.bfloat16
            )
    runs["int_mm, rescaled"] = lambda: int_mm.matmul(codes, codes_w, scale_w).mul_(token_scale)
    runs |= _bitsandbytes(codes, token_scale, codes_w, scale_w)
    of_cutlass = None
    if cutlass:
        offered = _cutlass.products(codes, token_scale, codes_w, scale_w)
        tried = in_turns(offered)
        of_cutlass = min(tried, key=tried.__getitem__)
        runs["cutlass"] = offered[of_cutlass]
    for label, run in runs.items():
        error = relative_error(run()[some], want)
        if not error <= 4e-3:
            raise Wrong(f"int8 product {name} by {label}: error {error:.1e}")
    times = in_turns(
        {
            "bf16": lambda: x @ weight.T,
            "quantise": lambda: layer.prepare(x),
            **runs,
            "int_mm, int32 alone": lambda: torch._int_mm(codes, codes_w.T),
        }
    )
    return times, of_cutlass


def _bitsandbytes(codes: Tensor, token_scale: Tensor, weight: Tensor, scale: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Its int8 product and rescaling, where it is installed."""
    try:
        from bitsandbytes.functional import int8_linear_matmul, int8_mm_dequant
    except ImportError:
        return {}
    token, channels = 127 * token_scale[:, 0], 127 * scale  # it keeps the largest value where we keep the step
    return {"bitsandbytes": lambda: int8_mm_dequant(int8_linear_matmul(codes, weight), token, channels)}


def chunking() -> dict[str, float]:
    """The largest relative difference that cutting a prompt into chunks makes, by size of the chunks."""
    n, heads = 1500, KV_HEADS
    shape = _shape((heads - 1, 0), (1, heads))
    q = torch.randn(2, n, heads * GROUP, D, device=DEVICE) * 2
    k, v = torch.randn(2, 2, n, heads, D, device=DEVICE)
    pool = BlockPool(shape, 32 * n // shape.block, DEVICE)

    def read(size: int) -> Tensor:
        cache, outs = DuoCache(pool), []
        for start in range(0, n, size):
            part = slice(start, min(start + size, n))
            cache.begin(part.stop - part.start)
            outs.append(torch.stack([cache.attend(i, *(x[i, part] for x in (q, k, v))).float() for i in range(2)]))
            cache.commit()
        return torch.cat(outs, 1)

    whole = read(n)
    return {str(size): relative_error(read(size), whole.double()) for size in (1, 333, 1024)}


def read(decoder: Decoder, cache: DuoCache, until: int, chunk: int = CHUNK) -> tuple[list[int], list[float]]:
    """Reads random tokens up to `until`: ends of chunks, and seconds up to each.

    The host waits for the chunk before the last, as the engine does.
    """
    tokens = torch.randint(0, decoder.config.vocab_size, (until,))
    ends, marks = [], []
    while cache.length < until:
        marks.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
        marks[-1][0].record()
        hidden = decoder.forward(tokens[cache.length : min(cache.length + chunk, until)], cache)
        logits = decoder.logits(hidden[-1:])
        marks[-1][1].record()
        ends.append(cache.length)
        if len(marks) > 1:
            marks[-2][1].synchronize()
    torch.cuda.synchronize()
    if not logits.isfinite().all():
        raise Wrong("the logits behind the prompt are not finite")
    seconds = [marks[0][0].elapsed_time(end) / 1e3 for _, end in marks]
    return ends, seconds


def idle(decoder: Decoder, cache: DuoCache, until: int) -> float:
    """The share of a read, from its first kernel to its last, in which nothing ran on the device.

    That counts what lies between two kernels too; and whoever watches them makes launching them slower.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as watched:
        read(decoder, cache, until)
    results = watched.profiler.kineto_results.events()
    on_device = [each for each in results if each.device_type() == torch.autograd.DeviceType.CUDA]
    spans = sorted((each.start_ns(), each.start_ns() + each.duration_ns()) for each in on_device)
    if len(spans) < decoder.config.num_layers * until // CHUNK:
        raise Wrong(f"only {len(spans)} kernels were seen")
    begin = end = spans[0][0]
    busy = 0
    for start, stop in spans:
        busy += max(0, stop - max(start, end))
        end = max(end, stop)
    return 1 - busy / (end - begin)


def warmed(decoder: Decoder, shape: CacheShape, tokens: int) -> tuple[BlockPool, DuoCache]:
    """A pool for `tokens` and an empty cache, after what the program does when it loads a model and one chunk."""
    pool = BlockPool(shape, tokens // shape.block, DEVICE)
    warm_up(decoder, DuoCache(pool))
    cache = DuoCache(pool)
    read(decoder, cache, CHUNK)
    cache.release()
    return pool, DuoCache(pool)


def fit(lengths: list[int], seconds: list[float]) -> dict[str, Any]:
    """Least squares of c N + d N^2, relative to what was measured."""
    n, t = np.array(lengths, dtype=np.float64), np.array(seconds)
    terms = np.stack((n, n * n), 1) / t[:, None]
    (c, d), *_ = np.linalg.lstsq(terms / terms.max(0), np.ones_like(t), rcond=None)
    c, d = c / terms[:, 0].max(), d / terms[:, 1].max()
    residual = float(np.abs((c * n + d * n * n) / t - 1).max())
    return {
        "c": float(c),
        "d": float(d),
        "worst_residual": residual,
        "measured": dict(zip(lengths, seconds, strict=True)),
    }


def _predicted(fitted: dict[str, Any], n: int) -> float:
    return float(fitted["c"] * n + fitted["d"] * n * n)


def whole(million: bool) -> dict[str, Any]:
    """Whole prefills, and single chunks at the ends of the longest window."""
    found: dict[str, Any] = {}
    decoder, shape = octavo_8b(DEVICE)
    free()
    pool, cache = warmed(decoder, shape, MILLION if million else COMPARED)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    ends, seconds = read(decoder, cache, MILLION if million else COMPARED)
    found["workspace_mib"] = {
        "planned": round(workspace_bytes(decoder.config, shape, CHUNK, DEVICE) / 2**20),
        "used": round((torch.cuda.max_memory_allocated() - held) / 2**20),
    }
    ours = seconds[ends.index(COMPARED)]
    kv = COMPARED * shape.bytes_per_token + shape.exact_bytes + shape.window_bytes
    if million:
        found["million_s"] = round(seconds[-1], 2)
    lengths = [n for n in ends if n % (ends[-1] // 8 // CHUNK * CHUNK) == 0]
    found["fit"] = fit(lengths, [round(seconds[ends.index(n)], 3) for n in lengths])
    found["chunk_s"] = [round(b - a, 4) for a, b in pairwise([0.0, *seconds])]
    print(found, flush=True)
    cache.release()
    cache = DuoCache(pool)
    found["idle"] = idle(decoder, cache, WATCHED)
    print(f"idle: {found['idle']:.5f}", flush=True)
    cache.release()
    del cache, pool
    free()
    found["window"] = _window(decoder, shape, found["fit"])
    del decoder
    free()
    decoder, shape = dense_8b(DEVICE)
    free()
    _, cache = warmed(decoder, shape, COMPARED)
    theirs = read(decoder, cache, COMPARED)[1][-1]
    full = COMPARED * shape.bytes_per_token + shape.exact_bytes
    return found | {
        "ours_320k_s": round(ours, 2),
        "bf16_320k_s": round(theirs, 2),
        "speedup_320k": theirs / ours,
        "kv_share_320k": kv / full,
        "chunk": CHUNK,
    }


def _window(decoder: Decoder, shape: CacheShape, fitted: dict[str, Any]) -> dict[str, Any]:
    """The first and the last chunk of the longest window at their own places, and what the fit says of them."""
    pool, cache = warmed(decoder, shape, WINDOW)
    first = read(decoder, cache, CHUNK)[1][0]
    cache.release()
    cache = full_cache(pool, WINDOW - CHUNK)
    last = read(decoder, cache, WINDOW)[1][0]
    expected = _predicted(fitted, WINDOW) - _predicted(fitted, WINDOW - CHUNK)
    return {
        "first_chunk_s": round(first, 3),
        "last_chunk_s": round(last, 3),
        "last_chunk_from_fit_s": round(expected, 3),
        "off_fit": abs(expected / last - 1),
        "total_from_fit_s": round(_predicted(fitted, WINDOW), 1),
        "total_from_its_chunks_s": round((first + last) / 2 * WINDOW / CHUNK, 1),
    }
