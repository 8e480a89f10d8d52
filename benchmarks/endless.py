"""Endless mode over real text: perplexity beside a window that is recomputed for every token, and speed at 4M tokens.

All sides have the same model with unquantised weights and see the same number of tokens. "Recomputed" reads the last
tokens afresh, from position 0, for each token that is judged: the costly truth that sinks stand in for. It is sampled
at the same places in every stretch, and every side is judged at those places. "Window only" has no sinks, and its cache
is slid, not read anew: keys and values stay as they came about while the first tokens were still seen. "Dense" keeps
everything. Then the text is read over and over, and tokens are generated, up to 4M tokens: time a token, memory, and
what moves in the cache when the window slides.
"""

from __future__ import annotations

import hashlib
import math
import pydoc_data.topics
import sys
import sysconfig
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from app.config import EMBEDDED_MODEL, Settings
from app.engine.sizing import resolve_shape
from app.model import find_model
from app.tokenizer import Tokenizer
from benchmarks._endless_speed import CHUNK, FAR, Speed
from benchmarks._report import RESULTS, Bar, Wrong, at_least, at_most, finish, parser_for
from kernels.attention_prefill import ATTENTION
from models.build import load_decoder
from models.cache.duo import DuoCache
from models.cache.endless import EndlessCache
from models.cache.pool import BlockPool
from models.cache.sequence import SequenceCache
from models.cache.shape import CacheShape
from models.checkpoint import open_checkpoint
from models.decoder import Decoder
from models.rope import EndlessRope, Rope

KEPT, SINK = 2048, 4  # tokens that every side sees in the comparison, and how many are sinks: the mode's own defaults
OTHERS = (256, 512, 1024, 2048, 4096)  # windows over which the control without sinks is read as well
STRETCH = 20_000
LIMIT, COLLAPSE = 1.05, 2.0  # perplexity over that of the recomputed window: what is asked for, and what is a collapse
WINDOWS = 32  # recomputed at a time


def main(argv: list[str]) -> int:
    """Runs the benchmark; exit code 1 when a bar is missed."""
    parser = parser_for("endless", __doc__)
    parser.add_argument("--tokens", type=int, default=10 * STRETCH, help="of real text (default %(default)s)")
    parser.add_argument("--dense", type=int, default=3 * STRETCH, help="tokens that plain dense reads")
    parser.add_argument(
        "--samples", type=int, default=1000, help="judged tokens a stretch; 0 with --far 0: only the control is shown"
    )
    parser.add_argument("--far", type=int, default=FAR, help="tokens to read for speed; 0 leaves that part out")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="only draw the kept result into FILE")
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
    if not args.samples and not args.far:
        _windows_only(side, ids)
    if args.samples:
        rows = _perplexities(side, ids, args.dense, args.samples)
        details |= {"stretches": rows, "window_only": _windows_only(side, ids)}
        bars += _text_bars(rows)
        finish("endless", argv, bars, details, args.json, torch.get_num_threads())
    if args.far:
        defaults = resolve_shape(side.config, None, Settings(mode="endless"), device)[1]
        speed = Speed(side.decoder, side.endless(defaults.sink, defaults.recent), ids, args.far)
        details["speed"] = speed.details
        bars += speed.bars
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
        self.config, self.tokenizer = checkpoint.config, Tokenizer.of(checkpoint)
        mask, shape = resolve_shape(self.config, None, Settings(mode="endless"), device)
        weights = "bf16" if device.type == "cuda" else "w8a8"
        self.decoder: Decoder = load_decoder(checkpoint, mask, weights, shape, device)
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
        return DuoCache(BlockPool(shape, -(-tokens // shape.block), self.device))

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


def _windows_only(side: _Sides, ids: Tensor) -> list[dict[str, Any]]:
    """What the same number of kept tokens costs without sinks, over all tokens behind the first that was forgotten."""
    rows = []
    for kept in OTHERS:
        sinks, none = (side.losses(ids, side.endless(sink, kept - sink)) for sink in (SINK, 0))
        stretches = [slice(max(start, kept), start + STRETCH) for start in range(0, len(ids), STRETCH)]
        ratios = [float(np.exp((none - sinks)[part].mean())) for part in stretches if part.start < len(ids)]
        row = {
            "kept": kept,
            "with_sinks": float(np.exp(sinks[kept:].mean())),
            "without": float(np.exp(none[kept:].mean())),
            "ratio_by_stretch": [round(min(ratios), 4), round(max(ratios), 4)],
        }
        print(row, flush=True)
        rows.append(row)
    return rows


def _text_bars(rows: list[dict[str, Any]]) -> list[Bar]:
    worst = float(np.max([row["endless"] / row["recomputed"] for row in rows]))  # NaN stays NaN
    lowest = float(np.min([row["window_only"] / row["recomputed"] for row in rows]))
    bars = [
        at_most("endless perplexity over recomputed, worst stretch", worst, "x", LIMIT),
        at_least("window only collapses, its best stretch over recomputed", lowest, "x", COLLAPSE),
    ]
    past = [row["dense"] / row["recomputed"] for row in rows if row["dense"] is not None and row["from"] >= STRETCH]
    if past:
        bars.append(
            at_least("dense collapses past 8K, its best stretch over recomputed", float(np.min(past)), "x", COLLAPSE)
        )
    return bars


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
