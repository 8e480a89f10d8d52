"""What the embedded model finds in its context unquantised and as it runs, and what its head pattern is worth.

The needle grid goes through the engine as in use. Perplexity is of the second half of Python's manual, which the
pattern was not made with.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from app.__main__ import main as command_line
from app.config import EMBEDDED_MODEL, Settings
from app.evaluation.examiner import Examiner, Journal
from app.evaluation.haystack import Haystack, read_haystack
from app.evaluation.needle import Grid, needle
from app.model import choose_pattern, find_model, open_model
from benchmarks._report import Bar, at_least, at_most, finish
from models.heads import HeadPattern

_LENGTHS = (1024, 2048, 3072, 4096, 5120, 6144, 7168, 7500)
_PATTERN_LENGTHS = (2048, 4096, 7500)
_PERPLEXITY_TOKENS = 8192


@dataclass(frozen=True)
class _Side:
    """A setting to ask at."""

    name: str
    settings: Settings


def main(argv: list[str]) -> int:
    """Runs the benchmark; exit code 1 when a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m app bench needle", description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--trials", type=int, default=1, help="questions a cell of the grid (default 1)")
    parser.add_argument("--published", type=Path, metavar="DIR", help="check the published head patterns in DIR too")
    parser.add_argument("--json", action="store_true", help="print the result as JSON on the last line")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    published = [] if args.published is None else _published(args.published)
    text = read_haystack(None)
    text = text[len(text) // 2 :]
    served = Settings(model=EMBEDDED_MODEL, library_quota=0.0, threads=args.threads)
    plain = replace(served, weights="bf16", kv="bf16")
    pattern, _ = choose_pattern(find_model(served), served)
    assert pattern is not None
    bars: list[Bar] = []
    details: dict[str, Any] = {}

    with tempfile.TemporaryDirectory() as folder:
        bars += _identification(Path(folder), args.threads)
        sides = _patterns(pattern, plain, Path(folder))
        for side in [*sides, _Side("duo 50 % + KV4 + W8A8", served)]:
            whole = side.name in ("full bf16", "duo 50 % + KV4 + W8A8")
            grid = Grid(_LENGTHS if whole else _PATTERN_LENGTHS, trials=args.trials)
            found = details[side.name] = _measure(side, text, grid, Path(folder) / f"{len(details)}.jsonl")
            print(f"{side.name:<24} {found['accuracy']:7.1%} perplexity {found['perplexity']:.3f}", flush=True)

    full, ours, duo = (details[name] for name in ("full bf16", "duo 50 % + KV4 + W8A8", "duo 50 %"))
    at = [_LENGTHS.index(length) for length in _PATTERN_LENGTHS]
    full_there = float(np.mean([full["hits"][i] for i in at]))
    points = 100 * (full["accuracy"] - ours["accuracy"])
    bars.append(at_most("needle grid: full bf16 less duo + KV4 + W8A8", points, "points", 2))
    bars.append(at_least("pass codes: duo 50 % less full", 100 * (duo["accuracy"] - full_there), "points", 0))
    for name, least in (("duo 50 %", None), ("random 50 %", 2.0), ("inverted 50 %", 2.0)):
        dearer = 100 * (details[name]["perplexity"] / full["perplexity"] - 1)
        if least is None:
            bars.append(at_most(f"perplexity at 8K: {name}", dearer, "%", 1))
        else:
            bars.append(at_least(f"perplexity at 8K: {name}", dearer, "%", least))
            lost = 100 * (full_there - details[name]["accuracy"])
            bars.append(at_least(f"pass codes lost: {name}", lost, "points", 10))
    bars += published
    finish("needle", argv, bars, details, args.json, args.threads)
    return 0 if all(bar.holds for bar in bars) else 1


def _identification(folder: Path, threads: int) -> list[Bar]:
    """On a GPU the whole way, as the pattern was made; on a CPU the training-free one."""
    out = folder / "pattern"
    flags = ["identify", "--model", EMBEDDED_MODEL, "--out", str(out), "--sink", "128", "--recent", "512"]
    gpu = torch.cuda.is_available()
    flags += ["--steps", "120", "--refine", "3"] if gpu else ["--training-free", "--threads", str(threads)]
    begin = time.perf_counter()
    if command_line(flags) != 0:
        raise RuntimeError("identification failed")
    seconds = time.perf_counter() - begin
    if gpu:
        return [at_most("identification, gates and refinement, one GPU", seconds / 60, "min", 10)]
    return [at_most(f"identification, training-free, {threads} CPU cores", seconds / 60, "min", 15)]


def _patterns(pattern: HeadPattern, plain: Settings, folder: Path) -> list[_Side]:
    """Full attention and patterns of the same size, unquantised: ours, one by chance, and ours inverted."""
    chance = np.random.default_rng(0).permutation(pattern.scores.size).reshape(pattern.scores.shape)
    sides = [_Side("full bf16", replace(plain, retrieval_ratio=1.0)), _Side("duo 50 %", plain)]
    for name, scores in (("random", chance.astype(float)), ("inverted", -pattern.scores)):
        replace(pattern, scores=scores, source=name).save(folder / name)
        sides.append(_Side(f"{name} 50 %", replace(plain, pattern=folder / name)))
    return sides


def _measure(side: _Side, text: str, grid: Grid, file: Path) -> dict[str, Any]:
    """The grid through the engine, and the perplexity over two windows of the text."""
    model = open_model(side.settings, lambda stage, done: None)
    haystack = Haystack.of(text, model.tokenizer)
    runner: Any = model.runner
    losses = []
    for start in (0, len(haystack.ids) // 2):
        ids = torch.tensor(haystack.take(_PERPLEXITY_TOKENS, start))
        cache, loss = runner.new_cache(), 0.0
        for at in range(0, len(ids) - 1, 1024):
            piece = ids[at : min(at + 1024, len(ids) - 1)]
            logits = runner.decoder.logits(runner.decoder.forward(piece, cache))
            wanted = ids[at + 1 : at + 1 + len(piece)].to(logits.device)
            loss += F.cross_entropy(logits, wanted, reduction="sum").item()
        cache.release()
        losses.append(loss / (len(ids) - 1))
    examiner = Examiner(model)
    try:
        result = needle(examiner, haystack, grid, Journal(file, {}))
    finally:
        examiner.close()
    return result | {"perplexity": math.exp(float(np.mean(losses))), "settings": examiner.settings}


def _published(folder: Path) -> list[Bar]:
    """Published patterns whose retrieval set at 50 % is that of their own quantile rule, but for ties."""
    files = sorted(folder.rglob("full_attention_heads.tsv"))
    if not files:
        raise FileNotFoundError(f"no head pattern lies in {folder}")
    agreeing = 0
    for file in files:
        made = HeadPattern.load(file.parent)
        ours, theirs = made.retrieval_mask(0.5), made.scores >= np.quantile(made.scores, 0.5)
        tied = made.scores == np.sort(made.scores, axis=None)[::-1][made.scores.size // 2 - 1]
        agreeing += bool(((ours != theirs) <= tied).all())
    return [at_least("published patterns with the set of their quantile rule", agreeing, "patterns", 6)]
