"""Finds retrieval heads: by gates learned on passkeys (DuoAttention, arXiv 2410.10819), and by attention alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.decoder import Decoder
from models.errors import BadPattern
from models.gated import full_attention, gated, run_layers

_SAVE_EVERY = 20  # steps


@dataclass(frozen=True)
class Sample:
    """int64 tokens [n] whose last `answer` ones are what the heads must not lose."""

    tokens: Tensor
    answer: int

    @property
    def scored(self) -> slice:
        """Positions that predict the answer."""
        return slice(len(self.tokens) - 1 - self.answer, len(self.tokens) - 1)


@dataclass(frozen=True)
class Recipe:
    """How gates are learned: window of the streaming heads in tokens, steps, AdamW's rate, weight of the L1 term.

    learned_from: a hash of weights and samples, which no training that is continued may change.
    """

    sink: int
    recent: int
    steps: int = 240
    learning_rate: float = 0.02
    penalty: float = 0.05
    learned_from: str = ""


@dataclass
class Training:
    """Where learning stands: gates fp32 [layers, kv_heads], and for every step its loss, distance and mean gate."""

    gates: Tensor
    step: int = 0
    history: list[dict[str, float]] = field(default_factory=list)
    seen: list[Tensor] = field(default_factory=list)  # the gates after every tenth step, for the plot


def train_gates(
    decoder: Decoder,
    sample: Callable[[int], Sample],
    recipe: Recipe,
    saved: Path | None = None,
    progress: Callable[[Training], None] = lambda training: None,
) -> Training:
    """One gate a KV head between full (1) and windowed (0) attention, learned by distillation from full attention.

    Loss: squared distance of the final hidden states at the answer's tokens, over their mean square, plus the L1 norm
    of the gates. `sample(step)` must give the same at every call, so that training which was interrupted continues from
    the file `saved` as if it had not been. Raises BadPattern when that file is of another recipe or of other heads.
    """
    shape = (decoder.config.num_layers, decoder.config.num_kv_heads)
    gates = torch.ones(shape, requires_grad=True)
    optimizer = torch.optim.AdamW([gates], lr=recipe.learning_rate, weight_decay=0.0)
    training = Training(gates.detach())
    if saved is not None and saved.exists():
        training = _restore(saved, recipe, gates, optimizer)
    while training.step < recipe.steps:
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * _schedule(training.step, recipe.steps)
        now = sample(training.step)
        with torch.no_grad():
            target = run_layers(decoder, now.tokens, lambda layer, *heads: full_attention(*heads))[now.scored]
        hidden = run_layers(decoder, now.tokens, gated(gates, recipe.sink, recipe.recent))[now.scored]
        distance = (hidden - target).square().mean() / target.square().mean()
        loss = distance.cpu() + recipe.penalty * gates.abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            gates.clamp_(0, 1)
        training.step += 1
        training.history.append({"loss": loss.item(), "distance": distance.item(), "gates": gates.mean().item()})
        if training.step % 10 == 0:
            training.seen.append(gates.detach().clone())
        training.gates = gates.detach()
        if saved is not None and (training.step % _SAVE_EVERY == 0 or training.step == recipe.steps):
            _save(saved, recipe, training, optimizer)
        progress(training)
    return training


def _schedule(step: int, steps: int) -> float:
    """Up over the first fifth, down over the last."""
    return min(1.0, 5 * (step + 1) / steps, 5 * (steps - step) / steps)


def _save(file: Path, recipe: Recipe, training: Training, optimizer: torch.optim.Optimizer) -> None:
    part = file.with_suffix(".part")
    torch.save({"recipe": asdict(recipe), **vars(training), "optimizer": optimizer.state_dict()}, part)
    os.replace(part, file)


def _restore(file: Path, recipe: Recipe, gates: Tensor, optimizer: torch.optim.Optimizer) -> Training:
    try:
        state: dict[str, Any] = torch.load(file, weights_only=True)
        same = state["recipe"] == asdict(recipe) and state["gates"].shape == gates.shape
    except Exception as error:  # torch names no common base for what a damaged file raises
        raise BadPattern(f"{file} cannot be read: {error}. Delete it to start anew.") from error
    if not same:
        raise BadPattern(f"{file} is of another model, text, length, seed or recipe. Delete it, or give another --out.")
    with torch.no_grad():
        gates.copy_(state["gates"])
    optimizer.load_state_dict(state["optimizer"])
    return Training(gates.detach(), state["step"], state["history"], state["seen"])


@torch.no_grad()
def attention_beyond(
    decoder: Decoder,
    samples: Sequence[Sample],
    sink: int,
    recent: int,
    progress: Callable[[float], None] = lambda done: None,
) -> NDArray[np.float64]:
    """Scores [layers, kv_heads]: the share of attention that goes beyond the window while text is copied.

    Needs no training. Of the query heads that share a KV head the one that looks back most counts: if one of them
    needs the history, it must be kept. `progress` gets fractions from 0 to 1.
    """
    config = decoder.config
    total = torch.zeros(config.num_layers, config.num_kv_heads, dtype=torch.float64)
    for number, one in enumerate(samples):
        rows = torch.arange(one.scored.start, one.scored.stop, device=decoder.device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, rows: Tensor = rows, number: int = number) -> Tensor:
            at = torch.arange(k.shape[1], device=k.device)
            keys = k.repeat_interleave(q.shape[0] // k.shape[0], 0)
            logits = q[:, rows] @ keys.transpose(1, 2) * q.shape[-1] ** -0.5
            weights = logits.masked_fill(at > rows[:, None], float("-inf")).softmax(-1)
            beyond = (at >= sink) & (at <= rows[:, None] - recent)
            mass = (weights * beyond).sum(-1).mean(-1).view(k.shape[0], -1)
            total[layer] += mass.amax(1).double().cpu()
            progress((number + (layer + 1) / config.num_layers) / len(samples))
            return full_attention(q, k, v)

        run_layers(decoder, one.tokens, attend)
    return (total / len(samples)).numpy()


def agreement(first: NDArray[np.float64], second: NDArray[np.float64], ratio: float) -> tuple[float, float]:
    """Share of the retrieval heads at `ratio` that two score tables have in common, and their rank correlation."""
    count = round(ratio * first.size)
    tops = [set(np.argsort(-scores, axis=None, kind="stable")[:count].tolist()) for scores in (first, second)]
    common = len(tops[0] & tops[1]) / count if count else 1.0
    ranks = [np.argsort(np.argsort(scores, axis=None, kind="stable"), kind="stable") for scores in (first, second)]
    return common, float(np.corrcoef(ranks[0], ranks[1])[0, 1])
