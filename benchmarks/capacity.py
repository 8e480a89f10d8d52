"""The longest context in the memory of an 80 GB card: the 8B model's shape, its whole window, and what the plan said.

Weights and history are random, which neither memory nor speed depends on. Memory is capped to what an A100-80GB gives:
once every kernel is loaded, the allocator gets what the driver, the kernels and their workspaces leave of it.
Before anything is timed, tokens at several depths of the full cache are asked for by their own keys and must come
back; a chunk of prefill and decode steps then run at the very end of the window.
"""

from __future__ import annotations

import gc
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch

from app.config import Settings
from app.engine.graph import DecodeGraph
from app.engine.sizing import fit, resolve_shape
from benchmarks._llama_8b import LLAMA_8B, WINDOW, full_cache, synthetic_pattern, w8a8_decoder
from benchmarks._report import Wrong, at_least, at_most, finish, parser_for
from models.cache.duo import DuoCache
from models.cache.live import LiveCache
from models.cache.pool import BlockPool
from models.cache.shape import CacheShape
from models.config import ModelConfig
from models.decoder import Decoder
from models.heads import HeadPattern

CARD = int(79.15 * 2**30)
DECODED = 12


def main(argv: list[str]) -> int:
    """Runs the benchmark; exit code 1 when a bar is missed."""
    parser = parser_for("capacity", __doc__)
    parser.add_argument("--pattern", type=Path, help="the published head pattern; else an equal synthetic one")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("This benchmark needs an NVIDIA GPU with 80 GB.")
        return 1
    device = torch.device("cuda", 0)
    config = ModelConfig.from_hf(LLAMA_8B)
    pattern = synthetic_pattern() if args.pattern is None else HeadPattern.load(args.pattern)
    settings = Settings()
    mask, shape = resolve_shape(config, pattern, settings, device)
    plan, chunk = fit(config, shape, settings, device, CARD - _beside(device))

    decoder = w8a8_decoder(config, mask, shape.rotated, device)
    _load_kernels(decoder, shape, chunk, device)
    beside = _beside(device)
    torch.cuda.set_per_process_memory_fraction((CARD - beside) / torch.cuda.mem_get_info(device)[1])
    pool = BlockPool(shape, -(-plan.context // shape.block), device)
    graph = DecodeGraph(decoder, LiveCache(pool))
    cache = full_cache(pool, plan.context - chunk - DECODED)
    for depth in (0.0, 0.5, 1.0):
        _check(cache, depth)

    # What building took is over; what follows is the engine at work.
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    tokens = torch.randint(0, config.vocab_size, (chunk,))
    begin = time.perf_counter()
    logits = decoder.logits(decoder.forward(tokens, cache)[-1:])[0]
    torch.cuda.synchronize()
    prefill = time.perf_counter() - begin
    cache.reserve(plan.context)
    graph.live.take(cache)
    steps = []
    for _ in range(DECODED):
        begin = time.perf_counter()
        logits = graph.replay(logits.argmax(-1, keepdim=True))
        torch.cuda.synchronize()
        steps.append(1e3 * (time.perf_counter() - begin))
    graph.live.give(cache, plan.context)
    if not logits.isfinite().all():
        raise Wrong("logits at the end of the window are not finite")
    beside = max(beside, _beside(device))
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    # The plan also counts the sequences that are kept for later turns; this run has one and the captured step's own.
    planned = plan.total_bytes - (plan.streaming_bytes + plan.retrieval_bytes - plan.context * plan.bytes_per_token)
    planned += 2 * (cache.streaming_bytes + shape.exact_bytes)
    bars = [
        at_least("context in 79.15 GiB", cache.length, "tokens", WINDOW),
        at_most("peak of the whole process, context and kernels included", (reserved + beside) / 2**30, "GiB", 79.15),
        at_most("plan against the peak of what is allocated", 100 * abs(planned - allocated) / planned, "%", 2),
    ]
    details = {
        "chunk": chunk,
        "last_chunk_s": round(prefill, 3),
        "decode_ms": round(median(steps), 2),
        "planned_gib": round(planned / 2**30, 3),
        "beside_the_allocator_gib": round(beside / 2**30, 3),
        "allocated_gib": round(allocated / 2**30, 3),
        "reserved_gib": round(reserved / 2**30, 3),
        "pattern": pattern.source if args.pattern else "synthetic, as many heads a layer as the published one",
    }
    print(details)
    finish("capacity", argv, bars, details, args.json, torch.get_num_threads())
    return 0 if all(bar.holds for bar in bars) else 1


def _beside(device: torch.device) -> int:
    """Bytes of the GPU that torch's allocator does not hold: the driver's, loaded kernels', library workspaces'."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def _load_kernels(decoder: Decoder, shape: CacheShape, chunk: int, device: torch.device) -> None:
    """Runs what is measured, a chunk over a history and captured steps, over a short one."""
    pool = BlockPool(shape, -(-4 * chunk // shape.block), device)
    graph = DecodeGraph(decoder, LiveCache(pool))
    cache = full_cache(pool, 2 * chunk)
    _check(cache, 0.5)
    logits = decoder.logits(decoder.forward(torch.zeros(chunk, dtype=torch.long), cache)[-1:])[0]
    cache.reserve(cache.length + 1)
    graph.live.take(cache)
    graph.replay(logits.argmax(-1, keepdim=True))
    torch.cuda.synchronize()
    del pool, graph, cache, logits
    gc.collect()
    torch.cuda.empty_cache()


def _check(cache: DuoCache, depth: float) -> None:
    """A query that is a token's own key, many times over, gives back that token's value."""
    layer = int(np.argmax(np.array(cache.shape.retrieval_heads) > 0))
    slots, shape = cache.shape.retrieval_slots[layer], cache.shape
    whole = len(cache.blocks)
    block = min(int(depth * whole), whole - 1)
    ((keys, values),) = cache.pool.stores[0].read(slots, cache._ids[block : block + 1], shape.block)
    at = int(keys[0, :, 0].float().argmax())
    key, value = keys[:, at].float(), values[:, at].float()
    q = (40 * key / key.norm(dim=-1, keepdim=True) * shape.head_dim**0.5).repeat_interleave(shape.group, 0)
    nothing = torch.zeros(1, key.shape[0], shape.head_dim, device=q.device)
    out = cache._retrieval[0].copy().attend(layer, q[None], nothing, nothing, cache.length, cache._ids)
    found = out.view(-1, shape.group, shape.head_dim)
    error = (found - value[:, None]).norm() / value.norm()
    print(f"depth {depth:.0%}: token {shape.front + shape.block * block + at:,} came back, relative error {error:.4f}")
    if not error < 0.05:
        raise Wrong(f"the token at depth {depth:.0%} did not come back: relative error {error:.3f}")
