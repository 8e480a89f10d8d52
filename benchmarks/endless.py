"""Endless mode over real text: perplexity beside a window that is recomputed for every token, and speed at 4M tokens.

All sides have the same model with unquantised weights and see the same number of tokens. "Recomputed" reads the last
tokens afresh, from position 0, for each token that is judged: the costly truth that sinks stand in for. It is sampled
at the same places in every stretch, and every side is judged at those places. "Window only" has no sinks; "dense"
keeps everything. Then the text is read over and over, and tokens are generated, up to 4M tokens: time a token, memory,
and what moves in the cache when the window slides.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import pydoc_data.topics
import sys
import sysconfig
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from app.config import EMBEDDED_MODEL, Settings
from app.engine.graph import DecodeGraph
from app.engine.sizing import resolve_shape
from app.model import find_model
from app.tokenizer import Tokenizer
from benchmarks._report import RESULTS, Bar, at_least, at_most, finish
from kernels.attention_prefill import ATTENTION
from models.build import load_decoder
from models.cache.duo import DuoCache
from models.cache.endless import EndlessCache
from models.cache.live_endless import LiveEndless
from models.cache.pool import BlockPool
from models.cache.sequence import SequenceCache
from models.cache.shape import BLOCK, CacheShape
from models.checkpoint import open_checkpoint
from models.decoder import Decoder
from models.rope import EndlessRope, Rope

KEPT, SINK = 1024, 4  # tokens that every side sees in the comparison, and how many of them are sinks
CHUNK = 16_384
STRETCH = 20_000
LIMIT = 1.05  # perplexity over that of the recomputed window
WINDOWS = 64  # recomputed at a time
NEAR, STEPS, ROUNDS = 16_384, 20, 12  # where speed is first taken; decode steps a round, rounds at each place
FAR, SLIDES = 4_194_304, 8


class Wrong(Exception):
    """A result is not what it should be, so its speed means nothing."""


def main(argv: list[str]) -> int:
    """Runs the benchmark; exit code 1 when a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m app bench endless", description=__doc__)
    parser.add_argument("--tokens", type=int, default=10 * STRETCH, help="of real text (default %(default)s)")
    parser.add_argument("--dense", type=int, default=3 * STRETCH, help="tokens that plain dense reads")
    parser.add_argument("--samples", type=int, default=1000, help="judged tokens a stretch")
    parser.add_argument("--far", type=int, default=FAR, help="tokens to read for speed; 0 leaves that part out")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="only draw the kept result into FILE")
    parser.add_argument("--json", action="store_true", help="print the result as JSON on the last line")
    args = parser.parse_args(argv)
    if args.plot is not None:
        return _plot(args.plot)
    if not torch.cuda.is_available() and args.far:
        print("The part about speed needs a CUDA GPU: give --far 0.", file=sys.stderr)
        return 1
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    side = _Sides(device)
    ids = torch.tensor(_text(side.tokenizer, args.tokens))
    digest = hashlib.sha256(ids.numpy().astype("<i4").tobytes()).hexdigest()
    bars: list[Bar] = []
    details: dict[str, Any] = {"tokens": len(ids), "sha256_of_ids": digest, "kept": KEPT, "sink": SINK}
    if args.far:
        speed = _Speed(side, ids, args.far)
        details["speed"] = speed.details
        bars += speed.bars
    if args.samples:
        rows = _perplexities(side, ids, args.dense, args.samples)
        details["stretches"] = rows
        bars += _text_bars(rows)
    finish("endless", argv, bars, details, args.json, torch.get_num_threads())
    return 0 if all(bar.holds for bar in bars) else 1


def _text(tokenizer: Tokenizer, tokens: int) -> list[int]:
    """Python's documentation, then the source of its library: real text that every Python carries."""
    ids = tokenizer.encode_text("\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items())))
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if len(ids) >= tokens:
            break
        ids += tokenizer.encode_text(path.read_text(encoding="utf-8", errors="ignore"))
    if len(ids) < tokens:
        raise Wrong(f"the text that Python carries here has {len(ids):,} tokens, not {tokens:,}")
    return ids[:tokens]


class _Sides:
    """One model, and the caches that are compared."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        files = find_model(Settings() if Settings().model else Settings(model=EMBEDDED_MODEL))
        checkpoint = open_checkpoint(files.path)
        self.config, self.tokenizer = checkpoint.config, Tokenizer(files.path)
        mask, shape = resolve_shape(self.config, None, Settings(mode="endless"), device)
        self.decoder: Decoder = load_decoder(checkpoint, mask, "bf16", shape, device)
        self.plain = Rope(self.config.rope, self.config.head_dim, self.config.max_positions)

    def endless(self, sink: int, recent: int) -> EndlessCache:
        """An empty endless cache; the decoder takes its positions."""
        shape = resolve_shape(self.config, None, Settings(mode="endless", sink=sink, recent=recent), self.device)[1]
        rope = EndlessRope(self.plain, sink + recent)
        self.decoder.rope = rope
        return EndlessCache(shape, rope, self.device)

    def dense(self, tokens: int) -> DuoCache:
        """A cache that keeps everything, at positions that go on past the model's window."""
        mask = np.ones((self.config.num_layers, self.config.num_kv_heads), dtype=np.bool_)
        shape = CacheShape.for_model(self.config, mask, "bf16", 0, 1, self.device)
        self.decoder.rope = EndlessRope(self.plain, self.config.max_positions)
        return DuoCache(BlockPool(shape, -(-tokens // BLOCK), self.device))

    def losses(self, ids: Tensor, cache: SequenceCache) -> np.ndarray:
        """float32 [n]: what predicting each token cost, given those that the cache lets it see; the first is 0."""
        parts = [torch.zeros(1)]
        for start in range(0, len(ids), CHUNK):
            chunk = ids[start : start + CHUNK]
            hidden = self.decoder.forward(chunk, cache)
            targets = ids[start + 1 : start + len(chunk) + 1].to(self.device)
            for at in range(0, len(targets), 2048):
                part = targets[at : at + 2048]
                logits = self.decoder.logits(hidden[at : at + len(part)])
                parts.append(F.cross_entropy(logits, part, reduction="none").cpu())
        return torch.cat(parts).numpy()

    def recomputed(self, ids: Tensor, places: np.ndarray) -> np.ndarray:
        """float32 of ids[places], each predicted from the KEPT tokens before it, read from position 0."""
        shape = resolve_shape(self.config, None, Settings(mode="endless", sink=0, recent=KEPT), self.device)[1]
        self.decoder.rope = _FromZero(self.plain)
        parts = []
        for start in range(0, len(places), WINDOWS):
            at = torch.from_numpy(places[start : start + WINDOWS])
            windows = ids[at[:, None] + torch.arange(-KEPT, 0)]
            hidden = self.decoder.forward(windows.flatten(), _Windows(shape, self.device))
            logits = self.decoder.logits(hidden[KEPT - 1 :: KEPT])
            parts.append(F.cross_entropy(logits, ids[at].to(self.device), reduction="none").cpu())
        return torch.cat(parts).numpy()


class _FromZero(EndlessRope):
    """Every KEPT tokens a text of their own begins, at position 0."""

    def __init__(self, plain: Rope) -> None:
        super().__init__(plain, KEPT)

    def table(self, positions: Tensor, device: torch.device | str | None = None) -> Tensor:
        return super().table(positions % KEPT, device)


class _Windows:
    """In place of a cache: a chunk is many texts of KEPT tokens, each of which attends to itself and is forgotten."""

    heads_dtype = torch.float32

    def __init__(self, shape: CacheShape, device: torch.device) -> None:
        self.shape = replace(shape, exact_dtype=shape.compute_dtype)
        choice = ATTENTION.choose(device, head_dim=shape.head_dim, dtype=shape.compute_dtype)
        self._attend = choice.backend.run.attend

    def begin(self, n: int) -> Tensor:
        return torch.arange(n)

    def commit(self) -> None: ...

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, (-1, KEPT)).transpose(1, 2).to(self.shape.compute_dtype) for x in (q, k, v))
        out, _ = self._attend(q, k, v, scale=self.shape.head_dim**-0.5, causal=True)
        return out.transpose(1, 2).flatten(0, 1).flatten(1).float()


def _perplexities(side: _Sides, ids: Tensor, dense_tokens: int, samples: int) -> list[dict[str, Any]]:
    """Perplexity of each side in each stretch at the sampled places, and what the sampling leaves open."""
    begin = time.perf_counter()

    def told(name: str, losses: np.ndarray) -> np.ndarray:
        print(f"{name}: {len(losses):,} tokens judged after {time.perf_counter() - begin:.1f} s", flush=True)
        return losses

    endless = told("endless", side.losses(ids, side.endless(SINK, KEPT - SINK)))
    window = told("window only", side.losses(ids, side.endless(0, KEPT)))
    dense = told("dense", side.losses(ids[:dense_tokens], side.dense(dense_tokens)))
    rows = []
    random = np.random.default_rng(0)
    for start in range(0, len(ids), STRETCH):
        inside = np.arange(max(start, KEPT), min(start + STRETCH, len(ids)))
        places = np.sort(random.choice(inside, min(samples, len(inside)), replace=False))
        truth = side.recomputed(ids, places)
        difference = endless[places] - truth
        row = {
            "from": start,
            "recomputed": float(np.exp(truth.mean())),
            "endless": float(np.exp(endless[places].mean())),
            "window_only": float(np.exp(window[places].mean())),
            "dense": float(np.exp(dense[places].mean())) if places[-1] < len(dense) else None,
            "endless_all_tokens": float(np.exp(endless[inside].mean())),
            "standard_error": float(difference.std() / math.sqrt(len(places))),
        }
        print(" ".join(f"{name} {value:.4g}" for name, value in row.items() if value is not None), flush=True)
        rows.append(row)
    told("recomputed", np.zeros(samples * len(rows)))
    return rows


def _text_bars(rows: list[dict[str, Any]]) -> list[Bar]:
    worst = max(row["endless"] / row["recomputed"] for row in rows)
    lowest = min(row["window_only"] / row["recomputed"] for row in rows)
    bars = [
        at_most("endless perplexity over recomputed, worst stretch", worst, "x", LIMIT),
        # The control: without sinks every stretch must miss what endless mode is held to.
        at_least("window only over recomputed, its best stretch", lowest, "x", LIMIT),
    ]
    past = [row["dense"] / row["recomputed"] for row in rows if row["dense"] is not None and row["from"] >= STRETCH]
    if past:
        bars.append(at_least("dense collapses past 8K, its best stretch", min(past), "x", 2))
    return bars


class _Speed:
    """Reads `far` tokens in endless mode; decode steps at NEAR and at the end are timed in turns."""

    def __init__(self, side: _Sides, ids: Tensor, far: int) -> None:
        self.side = side
        self.graph: DecodeGraph | None = None
        shape = resolve_shape(side.config, None, Settings(mode="endless"), side.device)[1]
        cache = side.endless(shape.sink, shape.recent)
        ids = ids.to(side.device)
        begin = time.perf_counter()
        near: EndlessCache | None = None
        allocated: list[int] = []
        rates: list[float] = []
        while cache.length < far:
            n = min(CHUNK, far - cache.length)
            rates.append(n / self._read(cache, ids, n))
            if near is None and cache.length >= NEAR:
                near = cache.fork()
            elif near is not None:
                allocated.append(torch.cuda.memory_allocated())
        seconds = time.perf_counter() - begin
        print(f"read {cache.length:,} tokens in {seconds:.1f} s", flush=True)
        assert near is not None
        moved = self._moved(cache)
        spread = max(allocated) - min(allocated)
        if LiveEndless.serves(shape, side.device):
            self.graph = DecodeGraph(side.decoder, LiveEndless(shape, cache.rope, side.device))
        # In turns: what the machine does meanwhile meets both. The first rounds warm up.
        times: dict[str, list[float]] = {"near": [], "far": []}
        chunks: dict[str, list[float]] = {"near": [], "far": []}
        for _ in range(ROUNDS + 2):
            for name, each in (("near", near), ("far", cache)):
                chunks[name].append(1e3 * self._read(each, ids, CHUNK))
                times[name].append(self._decode(each))
        at = {name: median(values[2:]) for name, values in times.items()}
        read = {name: median(values[2:]) for name, values in chunks.items()}
        tenth = max(1, len(rates) // 10)
        self.details = {
            "sink": shape.sink,
            "recent": shape.recent,
            "read_tokens": far,
            "read_seconds": round(seconds, 1),
            "tokens_per_s_by_tenth": [round(median(rates[i : i + tenth])) for i in range(0, len(rates), tenth)],
            "chunk_ms_near": round(read["near"], 3),
            "chunk_ms_far": round(read["far"], 3),
            "cache_bytes": cache.streaming_bytes,
            "allocated_bytes": allocated[-1],
            "reserved_bytes": torch.cuda.memory_reserved(),
            "generated_tokens": STEPS * (ROUNDS + 2) + SLIDES,
            "captured_step": self.graph is not None,
            "decode_ms_near": round(at["near"], 4),
            "decode_ms_far": round(at["far"], 4),
            "decode_ms_rounds": {name: [round(value, 4) for value in values] for name, values in times.items()},
        }
        print(self.details, flush=True)
        change = 100 * abs(at["far"] / at["near"] - 1)
        self.bars = [
            at_most(f"decode at {far:,} against {NEAR:,} tokens", change, "%", 2),
            at_most(f"reading at {far:,} against {NEAR:,} tokens", 100 * abs(read["far"] / read["near"] - 1), "%", 2),
            at_most("memory's growth after the window is full", spread, "bytes", 0),
            at_most("KV bytes moved per slide", moved, "bytes", 0),
        ]

    def _read(self, cache: EndlessCache, ids: Tensor, n: int) -> float:
        """Seconds for the next n tokens of the text, which begins again at its end."""
        decoder = self.side.decoder
        chunk = ids[torch.arange(cache.length, cache.length + n, device=ids.device) % len(ids)]
        torch.cuda.synchronize()
        begin = time.perf_counter()
        last = decoder.logits(decoder.forward(chunk, cache)[-1:])
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        if not last.isfinite().all():
            raise Wrong(f"logits at {cache.length:,} tokens are not finite")
        return seconds

    def _decode(self, cache: EndlessCache) -> float:
        """Milliseconds a token, generating STEPS tokens greedily; by the captured step where there is one."""
        decoder, graph = self.side.decoder, self.graph
        token = torch.tensor([cache.length % decoder.config.vocab_size], device=self.side.device)
        if graph is not None:
            graph.live.take(cache)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(STEPS):
            if graph is not None:
                token = graph.replay(token).argmax(-1, keepdim=True)
            else:
                token = decoder.logits(decoder.forward(token, cache)).argmax(-1)
            token.item()
        seconds = time.perf_counter() - begin
        if graph is not None:
            graph.live.give(cache, cache.length + STEPS)
        return 1e3 * seconds / STEPS

    def _moved(self, cache: EndlessCache) -> float:
        """Bytes of the cache that change in a slide beside those of the token that comes for the one that goes."""
        sink, recent = cache.shape.sink, cache.shape.recent
        changed = 0
        token = torch.tensor([1], device=self.side.device)
        for _ in range(SLIDES):
            before = cache.keys.clone(), cache.values.clone()
            slot = sink + (cache.length - sink) % recent
            token = self.side.decoder.logits(self.side.decoder.forward(token, cache)).argmax(-1)
            for old, new in zip(before, (cache.keys, cache.values), strict=True):
                if torch.equal(old[:, :, slot], new[:, :, slot]):
                    raise Wrong("the new token was not written where it belongs")
                old[:, :, slot] = new[:, :, slot]
                changed += int((old != new).sum()) * old.element_size()
        return changed / SLIDES


def _plot(file: Path) -> int:
    """Draws the stretches of the kept result."""
    import json

    from matplotlib import pyplot

    rows = json.loads((RESULTS / "endless.json").read_text())["details"]["stretches"]
    figure, axes = pyplot.subplots(figsize=(7, 4))
    middle = [(row["from"] + STRETCH / 2) / 1000 for row in rows]
    for name, style in (("dense", "^-"), ("window_only", "s-"), ("recomputed", "o-"), ("endless", "x--")):
        axes.plot(middle, [row[name] or math.nan for row in rows], style, label=name.replace("_", " "))
    axes.set(xlabel="thousand tokens read", ylabel="perplexity", yscale="log")
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    return 0
