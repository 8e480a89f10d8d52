"""A whole decode step of the 8B shape over context: this project's, and the two designs that it is compared with.

Half of the KV heads are retrieval heads. Weights and history are random. The first steps at two lengths are compared
with the same tokens read step by step through the plain cache.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial
from itertools import islice, pairwise
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from app.config import Settings
from app.engine.graph import DecodeGraph
from app.engine.sampler import Sampler
from app.engine.sizing import resolve_shape
from app.engine.types import SamplingParams
from benchmarks._llama_8b import LLAMA_8B, WINDOW, full_cache, octavo_8b, synthetic_pattern
from benchmarks._report import Wrong
from benchmarks.capacity import CARD
from models.cache.duo import DuoCache
from models.cache.live import LiveCache
from models.cache.pool import BlockPool
from models.cache.sequence import StepCache
from models.cache.shape import CacheShape
from models.config import ModelConfig
from models.decoder import Decoder

K = 1 << 10
OURS = (64 * K, 128 * K, 256 * K, 320 * K, 512 * K, 768 * K, 1024 * K, 2048 * K, WINDOW)
DENSE = (64 * K, 128 * K, 320 * K, 512 * K, 768 * K)
EXPANDED = 1024 * K
LONGEST = WINDOW
STEPS = 24
ANSWER = 200
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def step_figures(attend: Attend) -> dict[str, Any]:
    """Milliseconds a token of the three designs by context, and how often the device waited for the host.

    attend: the fastest full attention of this machine: q [heads, d], k, v [n, kv_heads, d] in bf16.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.set_per_process_memory_fraction(CARD / torch.cuda.get_device_properties(device).total_memory)
    decoder, shape = octavo_8b(device)
    _free()
    figures = _ours(decoder, shape)
    _free()
    torch.cuda.set_per_process_memory_fraction(1.0)
    figures["expanded_ms"] = {EXPANDED: _expanded(decoder, attend)}
    del decoder
    _free()
    figures["dense_ms"] = _dense(ModelConfig.from_hf(LLAMA_8B), attend)
    _free()
    return figures


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def _ours(decoder: Decoder, shape: CacheShape) -> dict[str, Any]:
    pool = BlockPool(shape, WINDOW // shape.block, decoder.device)
    whole = full_cache(pool, WINDOW)
    graph = DecodeGraph(decoder, LiveCache(pool))
    errors = {n: _check(decoder, graph, _cut(whole, n)) for n in (OURS[0], WINDOW - 2)}
    ms, parts = {}, {}
    for n in OURS:
        at = min(n, WINDOW - STEPS)
        graph.live.take(_cut(whole, at))
        token, sampler = torch.ones(1, dtype=torch.int64, device=decoder.device), Sampler(SamplingParams())

        def step(token: Tensor = token, sampler: Sampler = sampler) -> None:
            sampler.sample(graph.replay(token))

        ms[n] = _milliseconds(step)
        graph.live.take(_cut(whole, at))
        parts[n] = _milliseconds(partial(graph.replay, token))
    waits, behind = _waits(graph, _cut(whole, OURS[0]), ms[OURS[0]])
    return {
        "ms": ms,
        "graph_ms": parts,
        "error": errors,
        "late_steps": waits,
        "answer_ms": behind,
        "bytes_a_token": shape.bytes_per_token,
        "weight_bytes": decoder.nbytes - decoder.embedding.nbytes,
        "peak_gib": torch.cuda.max_memory_reserved() / 2**30,
    }


def _cut(whole: DuoCache, length: int) -> DuoCache:
    """The front of a cache, for reading only: it takes no share in the blocks."""
    part = DuoCache(whole.pool)
    part.length, part._ids = length, whole._ids
    for own, theirs in zip(part.exact(), whole.exact(), strict=True):
        own.copy_(theirs)
    return part


def _check(decoder: Decoder, graph: DecodeGraph, cache: DuoCache) -> float:
    """Largest relative error of a layer's attention against the plain path, for the same queries; raises Wrong.

    The captured step must then give the logits of the same kernels launched one by one.
    """
    live, token = graph.live, torch.tensor([7], device=decoder.device)
    both = _Both(live, cache)
    live.take(cache)
    want = decoder.logits(decoder.forward(token, both))[0]
    live.take(cache)
    live.position.sub_(1)
    got = graph.replay(token)
    error = float((got - want).double().norm() / want.double().norm())
    worst = float(np.max(both.errors))  # NaN stays NaN
    if not worst <= 2e-3 or not error <= 1e-4:
        raise Wrong(f"at {cache.length:,} tokens a layer is off by {worst:.1e}, a captured step by {error:.1e}")
    return worst


class _Both:
    """A step through the live cache and the plain one; what the live one says goes on."""

    heads_dtype = torch.float32

    def __init__(self, live: StepCache, plain: DuoCache) -> None:
        self.shape = plain.shape
        self.errors: list[float] = []
        self._caches = live, plain

    def begin(self, n: int) -> Tensor:
        live, plain = self._caches
        plain.begin(n)
        return live.begin(n)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        got, want = (cache.attend(layer, q, k, v) for cache in self._caches)
        self.errors.append(float((got - want).double().norm() / want.double().norm()))
        return got

    def commit(self) -> None:
        for cache in self._caches:
            cache.commit()


def _milliseconds(step: Callable[[], Any]) -> float:
    """Median of single steps that follow each other without a gap."""
    for _ in range(3):
        step()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS - 3)]
    for event in events:
        event.record()
        step()
    torch.cuda.synchronize()
    return median(a.elapsed_time(b) for a, b in pairwise(events))


def _waits(graph: DecodeGraph, cache: DuoCache, step_ms: float) -> tuple[int, float]:
    """Steps of a sampled answer that the device had to wait for, and the answer's milliseconds a token."""
    logits = graph._logits.clone()
    graph.late = 0
    sampler = Sampler(SamplingParams(temperature=0.8, top_p=0.95, repetition_penalty=1.1, seed=0))
    gc.freeze()  # as when a model is loaded
    answer = graph.answer(cache, [0] * cache.length, logits, sampler, None, lambda length: None)
    for _ in islice(answer, 20):
        pass
    graph.late, begin = 0, time.perf_counter()
    for _ in islice(answer, ANSWER):
        pass
    taken = 1e3 * (time.perf_counter() - begin) / ANSWER
    answer.close()
    gc.unfreeze()
    return graph.late, taken


def _captured(step: Callable[[], Any]) -> Callable[[], None]:
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _expanded(decoder: Decoder, attend: Attend) -> float:
    """The design that keeps 4 bits but expands all of them to bf16 buffers in every layer of every step."""
    from benchmarks._expand import ExpandedCache  # Triton comes with torch on a GPU only

    _, shape = resolve_shape(decoder.config, synthetic_pattern(), Settings(), decoder.device)
    cache = ExpandedCache(shape, EXPANDED, decoder.device, attend)
    cache.check()
    token = torch.ones(1, dtype=torch.int64, device=decoder.device)
    return _milliseconds(_captured(lambda: decoder.logits(decoder.forward(token, cache)).argmax(-1)))


@torch.inference_mode()
def _dense(config: ModelConfig, attend: Attend) -> dict[int, float]:
    """bf16 weights and full bf16 attention in every head, captured, with positions and appending left out."""
    c, device, kind = config, torch.device("cuda", torch.cuda.current_device()), torch.bfloat16
    wide = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim

    def weight(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, device=device, dtype=kind).mul_(0.02)

    layers = []
    for _ in range(c.num_layers):
        qkv, out = weight(wide, c.hidden_size), weight(c.hidden_size, c.num_heads * c.head_dim)
        gate_up, down = weight(2 * c.intermediate_size, c.hidden_size), weight(c.hidden_size, c.intermediate_size)
        kv = torch.empty(2, DENSE[-1], c.num_kv_heads, c.head_dim, device=device, dtype=kind).normal_()
        layers.append((qkv, out, gate_up, down, kv))
    head, norm = weight(c.vocab_size, c.hidden_size), torch.ones(c.hidden_size, device=device, dtype=kind)
    embedded = torch.randn(1, c.hidden_size, device=device, dtype=kind)

    def step(n: int) -> Tensor:
        x = embedded
        for qkv, out, gate_up, down, kv in layers:
            heads = F.linear(F.rms_norm(x, norm.shape, norm), qkv)
            q = heads[0, : c.num_heads * c.head_dim].view(c.num_heads, c.head_dim)
            x = x + F.linear(attend(q, kv[0, :n], kv[1, :n]).view(1, -1), out)
            gate, up = F.linear(F.rms_norm(x, norm.shape, norm), gate_up).chunk(2, 1)
            x = x + F.linear(F.silu(gate) * up, down)
        return F.linear(F.rms_norm(x, norm.shape, norm), head).argmax(-1)

    return {n: _milliseconds(_captured(partial(step, n))) for n in DENSE}
