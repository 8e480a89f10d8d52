"""`python -m app identify`: find a model's retrieval heads and write them as a head pattern."""

from __future__ import annotations

import hashlib
import json
import random
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from app.config import Settings
from app.errors import UsageError
from app.evaluation.haystack import Haystack, read_haystack
from app.evaluation.passkeys import PromptMaker
from app.model import find_model
from app.status_line import StatusLine, TimeLeft
from app.tokenizer import Tokenizer
from app.writable import folder_to_write
from models.build import load_decoder
from models.cache.shape import CacheShape
from models.checkpoint import open_checkpoint
from models.decoder import Decoder
from models.fingerprint import fingerprint
from models.heads import HeadPattern
from models.identify import Recipe, Sample, Training, agreement, attention_beyond, train_gates
from models.refine import Refiner, refine

_COPIES = 4
_TEXTS, _PROMPTS = 9, 9  # of the measured refinement: with a third of them, other texts fared worse
_PROMPT_WEIGHT = 0.2  # of a prompt's answer beside a text: a lost answer costs far more nats a token than prose does


def identify(settings: Settings, flags: Namespace) -> int:
    """Write the pattern, its figures (identify.json) and a plot of the gates to --out; 0 when done."""
    out, ratio, seed = flags.out, settings.retrieval_ratio, flags.seed
    recipe = Recipe(_given(settings.sink, 128), _given(settings.recent, 256), flags.steps)
    begin = time.perf_counter()
    if not 0 < ratio < 1:
        raise UsageError(f"--retrieval-ratio is {ratio:g}; to identify, it must lie between 0 and 1.")
    folder_to_write("--out", out)
    files = find_model(settings)
    checkpoint = open_checkpoint(files.path)
    tokenizer = Tokenizer.of(checkpoint)
    maker = PromptMaker(tokenizer, Haystack.of(read_haystack(flags.haystack), tokenizer))
    longest = min(settings.context or 32_000, checkpoint.config.max_positions)
    if longest < 2 * (recipe.sink + recipe.recent):
        raise UsageError(
            f"Prompts of {longest:,} tokens hardly leave the window of {recipe.sink + recipe.recent:,}: "
            "give smaller --sink and --recent, or a longer --context."
        )
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = True
    every = np.ones((checkpoint.config.num_layers, checkpoint.config.num_kv_heads), dtype=np.bool_)
    shape = CacheShape.for_model(checkpoint.config, every, "fp32", recipe.sink, recipe.recent, device)
    with _told("Reading the weights") as progress:
        decoder = load_decoder(checkpoint, every, "fp32", shape, device, progress)
    out.mkdir(parents=True, exist_ok=True)
    run = _Run(decoder, maker, recipe, ratio, longest, seed)

    figures: dict[str, Any] = {"model": files.name, "sink": recipe.sink, "recent": recipe.recent, "seed": seed}
    figures["tokens"], figures["device"] = longest, str(device)
    scores, figures["training_free_s"] = run.timed("attention beyond the window", run.beyond)
    how = "attention beyond the window while copying"
    if not flags.training_free:
        beyond = scores
        weights = fingerprint(files.path, settings.cache_dir / "weights.json")
        recipe = replace(recipe, learned_from=run.learned_from(weights))
        gates, figures["gates_s"] = run.timed("gates", lambda: run.gates(out, recipe))
        figures["gates"] = {"recipe": asdict(recipe), "last": gates.history[-1]}
        scores = gates.gates.double().numpy()
        _plot(gates, out / "gates.png")
        common, correlation = agreement(scores, beyond, ratio)
        figures["training_free_agreement"] = {"common_heads": common, "rank_correlation": correlation}
        print(f"gates and attention agree on {common:.0%} of the heads, rank correlation {correlation:.2f}")
        how = "gates (DuoAttention)"
    if flags.refine:
        before = scores
        (scores, figures["divergence"]), figures["refine_s"] = run.timed(
            "refinement", lambda: run.refined(before, flags.refine)
        )
        figures["refined_agreement"] = dict(
            zip(("common_heads", "rank_correlation"), agreement(scores, before, ratio), strict=True)
        )
        how += f", then heads exchanged at {ratio:.0%} by measured divergence from full attention"
    figures["seconds"] = round(time.perf_counter() - begin, 1)
    HeadPattern(scores, recipe.sink, recipe.recent, how).save(out)
    (out / "identify.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(f"{out}: {how}; {figures['seconds']:.0f} s")
    return 0


class _Run:
    """The steps of one identification, over one loaded decoder."""

    def __init__(
        self, decoder: Decoder, maker: PromptMaker, recipe: Recipe, ratio: float, longest: int, seed: int
    ) -> None:
        self._decoder = decoder
        self._maker = maker
        self._recipe = recipe
        self._kept = round(ratio * decoder.config.num_layers * decoder.config.num_kv_heads)
        self._longest = longest
        self._seed = seed

    def timed(self, name: str, work: Callable[[], Any]) -> tuple[Any, float]:
        """The result of a step and its seconds."""
        _say(f"{name} ...")
        begin = time.perf_counter()
        result = work()
        seconds = round(time.perf_counter() - begin, 1)
        _say(f"{name}: {seconds} s")
        return result, seconds

    def beyond(self) -> NDArray[np.float64]:
        """The training-free scores."""
        random_ = random.Random(f"{self._seed} copying")
        copies = [self._maker.copying(min(self._longest, 6000), random_) for _ in range(_COPIES)]
        with _told("Copying texts") as progress:
            return attention_beyond(self._decoder, copies, self._recipe.sink, self._recipe.recent, progress)

    def learned_from(self, weights: str) -> str:
        """A hash of all that the gates come from beside the recipe."""
        ids = np.array(self._maker.haystack.ids, dtype="<i8").tobytes()
        return hashlib.sha256(f"{weights} {self._longest} {self._seed} ".encode() + ids).hexdigest()

    def gates(self, out: Path, recipe: Recipe) -> Training:
        """Gates of DuoAttention; training continues where an earlier run with the same recipe stopped."""

        def progress(training: Training) -> None:
            if training.step % 10 == 0:
                now = ", ".join(f"{name} {value:.4f}" for name, value in training.history[-1].items())
                _say(f"step {training.step} of {recipe.steps}: {now}")

        return train_gates(self._decoder, self._passkeys, recipe, out / "training.pt", progress)

    def refined(self, start: NDArray[np.float64], rounds: int) -> tuple[NDArray[np.float64], dict[str, float]]:
        """Scores whose best heads are those of a measured search, and its divergences in nats."""
        size = len(self._maker.haystack.ids)
        texts = [self._maker.plain(self._longest, size * i // _TEXTS) for i in range(_TEXTS)]
        samples = [(text, 1.0) for text in texts]
        samples += [(self._passkeys(-1 - i), _PROMPT_WEIGHT) for i in range(_PROMPTS)]
        refiner = Refiner(self._decoder, samples, self._recipe.sink, self._recipe.recent, self._seed)
        first = HeadPattern(start, 0, 1, "").retrieval_mask(self._kept / start.size)
        given = refiner.divergence(torch.from_numpy(first))
        _say(f"divergence before: {given:.5f}")
        _, found, scores = refine(refiner, first, given, rounds, _say)
        return scores, {"before": given, "after": found}

    def _passkeys(self, step: int) -> Sample:
        random_ = random.Random(f"{self._seed} passkeys {step}")
        least = min(self._longest, 2 * (self._recipe.sink + self._recipe.recent))
        return self._maker.passkeys(random_.randint(least, self._longest), random_)


def _plot(training: Training, file: Path) -> None:
    """Every gate over the steps, and the loss."""
    from matplotlib.figure import Figure  # slow to import, and only drawn here

    figure = Figure((9, 4), layout="constrained")
    gates, loss = figure.subplots(1, 2)
    steps = [10 * (i + 1) for i in range(len(training.seen))]
    gates.plot(steps, [seen.flatten().tolist() for seen in training.seen], linewidth=0.6, color="tab:blue", alpha=0.5)
    gates.set(xlabel="step", ylabel="gate", ylim=(-0.02, 1.02), title="gates: 1 full, 0 sink and recent")
    for name, values in _series(training.history).items():
        loss.plot(range(1, len(values) + 1), values, label=name, linewidth=0.8)
    loss.set(xlabel="step", yscale="log", title="loss")
    loss.legend()
    figure.savefig(file, dpi=120)


def _series(history: Sequence[dict[str, float]]) -> dict[str, list[float]]:
    return {name: [row[name] for row in history] for name in ("loss", "distance")}


def _given(value: int | None, default: int) -> int:
    return default if value is None else value


@contextmanager
def _told(stage: str) -> Iterator[Callable[[float], None]]:
    """Takes how far a stage is, from 0 to 1."""
    status, left = StatusLine(sys.stderr), TimeLeft()
    try:
        yield lambda done: status.show(f"{stage} {done:.0%}{left.told(done)}")
    finally:
        status.clear()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
