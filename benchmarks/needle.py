"""What the embedded model finds in its context unquantised and as it runs, and what its head pattern is worth.

The needle grid goes through the engine as in use. Perplexity is of six stretches of text of kinds that the pattern was
not made with, half prose and half code, and beside them of two stretches of Python's manual, half of which it was.
"""

from __future__ import annotations

import importlib.metadata
import math
import pydoc_data.topics
import sysconfig
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

import app
from app.__main__ import main as command_line
from app.config import EMBEDDED_MODEL, Settings
from app.evaluation.examiner import Examiner, Journal
from app.evaluation.haystack import Haystack
from app.evaluation.needle import Grid, needle
from app.model import OpenModel, choose_pattern, find_model, open_model
from app.tokenizer import TextTokenizer
from benchmarks._report import Bar, at_least, at_most, commit, finish, parser_for, threads_flag
from benchmarks.identification import identification_bars, published_bars, timed_identification
from models.heads import HeadPattern

_LENGTHS = (1024, 2048, 3072, 4096, 5120, 6144, 7168, 7500)
_PATTERN_LENGTHS = (2048, 4096, 7500)
_OTHER_LENGTHS = (2048, 4096)  # a bad pattern shows itself there already
_WINDOW = 8192  # tokens of a stretch
_PIECE = 1024  # tokens read between two looks at the logits
_FULL, _DUO, _SERVED = "full bf16", "duo 50 %", "duo 50 % + KV4 + W8A8"
_CALIBRATED = f"{_SERVED}, calibrated"  # by `quantize`
_OTHERS = ("random 50 %", "inverted 50 %")

_PACKAGES = "gradio transformers fastapi huggingface_hub pydantic numpy httpx rich requests tqdm typer click".split()
_MODULES = ("argparse", "tarfile", "typing")


@dataclass(frozen=True)
class _Side:
    """A setting to ask at, and the grid that it is asked."""

    name: str
    settings: Settings
    grid: Grid


def main(argv: list[str]) -> int:
    """Runs the benchmark; exit code 1 when a bar is missed."""
    parser = parser_for("needle", __doc__)
    threads_flag(parser)
    parser.add_argument("--trials", type=int, default=1, help="questions a cell of the grid (default 1)")
    parser.add_argument("--published", type=Path, metavar="DIR", help="check the published head patterns in DIR too")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="keep what is done there; a stopped run goes on from it"
    )
    parser.add_argument("--apart", action="store_true", help="ask the whole grid with Duo, KV4 and W8A8 alone too")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    published = [] if args.published is None else published_bars(args.published)
    served = Settings(model=EMBEDDED_MODEL, library_quota=0.0, threads=args.threads)
    pattern, _ = choose_pattern(find_model(served), served)
    assert pattern is not None
    details: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.out or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for side in _sides(pattern, served, args.trials, folder, args.apart):
            details[side.name] = _measure(side, folder)
        identified = timed_identification(folder, pattern, args.threads)
    bars = [*identification_bars(identified, args.threads), *_bars(details), *published]
    finish("needle", argv, bars, details | {"identification": identified}, args.json, args.threads)
    return 0 if all(bar.holds for bar in bars) else 1


def _sides(pattern: HeadPattern, served: Settings, trials: int, folder: Path, apart: bool) -> list[_Side]:
    """Full attention and patterns of one size, unquantised (ours, one by chance, ours inverted), and all as served.

    With `apart` also what the last one is made of, each by itself.
    """
    plain, every = replace(served, weights="bf16", kv="bf16"), Grid(_LENGTHS, trials=trials)
    whole = replace(plain, retrieval_ratio=1.0)
    sides = [
        _Side(_FULL, whole, every),
        _Side(_DUO, plain, every if apart else Grid(_PATTERN_LENGTHS, trials=trials)),
        _Side(_SERVED, served, every),
        _Side(_CALIBRATED, replace(served, model=str(_quantised(folder))), every),
    ]
    if apart:
        sides += [_Side("KV4", replace(whole, kv="kv4"), every), _Side("W8A8", replace(whole, weights="w8a8"), every)]
    chance = np.random.default_rng(0).permutation(pattern.scores.size).reshape(pattern.scores.shape)
    for name, scores in zip(_OTHERS, (chance.astype(float), -pattern.scores), strict=True):
        replace(pattern, scores=scores, source=name).save(folder / name)
        sides.append(_Side(name, replace(plain, pattern=folder / name), Grid(_OTHER_LENGTHS, trials=trials)))
    return sides


def _quantised(folder: Path) -> Path:
    """The embedded model as `quantize` writes it, its head pattern beside it."""
    out = folder / "w8a8"
    if not out.exists() and command_line(["quantize", EMBEDDED_MODEL, str(out)]) != 0:
        raise RuntimeError("the embedded model could not be quantised")
    return out


def _stretches(tokenizer: TextTokenizer) -> dict[str, list[int]]:
    """Token ids of each stretch by its name; the names of the manual's begin with "manual"."""
    samples = Path(app.__file__).parent / "samples"
    laws = "\n\n".join(file.read_text(encoding="utf-8") for file in sorted(samples.glob("*.txt")))
    about: list[Any] = [importlib.metadata.metadata(name) for name in _PACKAGES]
    described = "\n\n".join(str(one.get_payload() or one.get("Description") or "") for one in about)
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    texts = {"prose: laws": laws, "prose: packages": described}
    texts |= {f"code: {name}": (stdlib / f"{name}.py").read_text(encoding="utf-8") for name in _MODULES}
    found = {}
    for name, text in texts.items():
        ids = tokenizer.encode_text(text)
        for part in range(2 if name == "prose: packages" else 1):
            stretch = ids[part * _WINDOW : (part + 1) * _WINDOW]
            if len(stretch) < _WINDOW:
                raise RuntimeError(f"{name} has too few tokens for stretch {part + 1} of {_WINDOW}")
            found[f"{name} {part + 1}" if part else name] = stretch
    manual = Haystack.of(_manual(), tokenizer)
    for part, start in enumerate((0, len(manual.ids) // 2)):
        found[f"manual {part + 1}"] = manual.take(_WINDOW, start)
    return found


def _manual() -> str:
    """The half of Python's manual that the pattern was not made with."""
    text = "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    return text[len(text) // 2 :]


def _measure(side: _Side, folder: Path) -> dict[str, Any]:
    """The grid through the engine, and the loss a token over each stretch of text."""
    begin = time.perf_counter()

    def say(what: str) -> None:
        print(f"{time.perf_counter() - begin:6.0f} s  {side.name}: {what}", flush=True)

    head: dict[str, Any] = {"commit": commit(), "side": side.name}
    losses = Journal(folder / f"{side.name} perplexity.jsonl", head)
    head |= {"lengths": side.grid.lengths, "trials": side.grid.trials}
    asked = Journal(folder / f"{side.name} needle.jsonl", head)
    model = open_model(side.settings, lambda stage, done: None)
    examiner = Examiner(model)
    try:
        for name, ids in _stretches(model.tokenizer).items():
            if name not in losses:
                losses.add(name, loss=_loss(model, ids))
                say(f"{name} {losses.rows[name]['loss']:.4f}")

        def progress(done: int, total: int) -> None:
            if done % 10 == 0:
                say(f"{done} of {total} asked")

        result = needle(examiner, Haystack.of(_manual(), model.tokenizer), side.grid, asked, progress)
    finally:
        examiner.close()
    say(f"{result['accuracy']:.1%} found")
    return result | {"loss": {n: row["loss"] for n, row in losses.rows.items()}, "settings": examiner.settings}


def _loss(model: OpenModel, stretch: list[int]) -> float:
    """Nats a token, read as prompts are read."""
    runner: Any = model.runner
    ids = torch.tensor(stretch)
    cache, loss = runner.new_cache(), 0.0
    for at in range(0, len(ids) - 1, _PIECE):
        piece = ids[at : min(at + _PIECE, len(ids) - 1)]
        logits = runner.decoder.logits(runner.decoder.forward(piece, cache))
        wanted = ids[at + 1 : at + 1 + len(piece)].to(logits.device)
        loss += F.cross_entropy(logits, wanted, reduction="sum").item()
    cache.release()
    return loss / (len(ids) - 1)


def _dearer(details: dict[str, Any], name: str, manual: bool) -> dict[str, float]:
    """What each stretch's perplexity is above full attention's, in percent; of the manual's stretches or the others."""
    full, other = details[_FULL]["loss"], details[name]["loss"]
    kept = [stretch for stretch in full if stretch.startswith("manual") == manual]
    return {stretch: 100 * (math.exp(other[stretch] - full[stretch]) - 1) for stretch in kept}


def _bars(details: dict[str, Any]) -> list[Bar]:
    """The grids and perplexities against full attention; prints the table of perplexities."""
    full = details[_FULL]

    def lost(name: str) -> float:
        """Points of accuracy below full attention's, over the lengths that both were asked at."""
        other = details[name]
        there = [full["hits"][full["lengths"].index(length)] for length in other["lengths"]]
        return round(100 * (float(np.mean(there)) - float(other["accuracy"])), 6) + 0.0  # equal is equal

    bars = [
        at_most("needle grid: full bf16 less duo + KV4 + W8A8 (quantize)", lost(_CALIBRATED), "points", 2),
        at_most("needle grid: full bf16 less duo + KV4 + W8A8 (as loaded)", lost(_SERVED), "points", 2),
        at_least("pass codes: duo 50 % less full", -lost(_DUO), "points", 0),
    ]
    for name in [name for name in details if name != _FULL]:
        apart, manual = _dearer(details, name, False), _dearer(details, name, True)
        mean, of_manual = (
            100 * math.expm1(np.mean([math.log1p(x / 100) for x in d.values()])) for d in (apart, manual)
        )
        details[name]["perplexity_above_full_percent"] = apart | manual | {"mean without the manual": mean}
        each = ", ".join(f"{stretch} {above:+.2f} %" for stretch, above in (apart | manual).items())
        print(f"{name}: perplexity {mean:+.2f} %, the manual {of_manual:+.2f} % ({each})")
        if name == _DUO:
            bars.append(at_most(f"perplexity at 8K, mean of {len(apart)} texts: {name}", mean, "%", 1))
        elif name in _OTHERS:
            bars.append(at_least(f"perplexity at 8K, mean of {len(apart)} texts: {name}", mean, "%", 2))
            bars.append(at_least(f"pass codes lost: {name}", lost(name), "points", 10))
    return bars
