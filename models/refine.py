"""Chooses the retrieval heads of one ratio by what dropping them does to the model's predictions.

A gate learned alone says little about heads that fail together. Here the effect of every head on the predicted
distribution is measured, one head at a time, around the choice in force, and heads are dropped or exchanged where a
second-order model of the Kullback-Leibler divergence from full attention says that it falls. Its matrix is the Fisher
information over the heads: for tokens y drawn from the full model, (d log p(y) / d h) (h_head - h) is each head's
coordinate, and sums of coordinates are changes together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from models.decoder import Decoder
from models.gated import finish_layers, full_attention, masked, run_layers
from models.identify import Sample
from quant.w8a8 import Rows, dense_dtype

_ROWS = 1024  # rows of logits at a time


@dataclass
class _Target:
    """What full attention gives for a sample: hidden states of the scored rows, and directions in them."""

    sample: Sample
    weight: float
    hidden: Tensor  # [rows, hidden]
    directions: Tensor  # [rows, hidden]: gradient of log p(y) for a y drawn from p


class Refiner:
    """Searches masks [layers, kv_heads] for the least weighted mean of the divergence over samples."""

    def __init__(
        self, decoder: Decoder, samples: Sequence[tuple[Sample, float]], sink: int, recent: int, seed: int = 0
    ) -> None:
        self.decoder = decoder
        self.sink = sink
        self.recent = recent
        self._generator = torch.Generator(decoder.device).manual_seed(seed)
        self._targets = [self._target(sample, weight) for sample, weight in samples]

    @torch.no_grad()
    def divergence(self, mask: Tensor) -> float:
        """Weighted mean over samples of KL(full || mask) a token, in nats."""
        total = 0.0
        for target in self._targets:
            hidden = self._run(target, mask)
            sums = 0.0
            for start in range(0, len(hidden), _ROWS):
                rows = slice(start, start + _ROWS)
                full, other = (self.logits(x[rows]).log_softmax(-1) for x in (target.hidden, hidden))
                sums += F.kl_div(other, full, log_target=True, reduction="sum").item()
            total += target.weight * sums / len(hidden)
        return total / sum(target.weight for target in self._targets)

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits of normed hidden states."""
        return self.decoder.head(Rows(hidden.to(dense_dtype(self.decoder.device))))

    @torch.no_grad()
    def gram(self, mask: Tensor) -> NDArray[np.float64]:
        """[1 + heads, 1 + heads]: products of coordinates of the mask's own effect and of each head's flip after it."""
        count = mask.numel()
        gram = torch.zeros(1 + count, 1 + count, dtype=torch.float64)
        norm = sum(target.weight for target in self._targets)
        for target in self._targets:
            inputs: list[Tensor] = []
            table = self.decoder.rope.table(torch.arange(len(target.sample.tokens)), self.decoder.device)
            x = self.decoder.look_up(target.sample.tokens)
            attend = masked(mask, self.sink, self.recent)
            base = finish_layers(self.decoder, x, table, attend, 0, _collect(inputs))
            rows = target.sample.scored
            features = [self._coordinate(target, base[rows] - target.hidden)]
            for index in range(count):
                layer = index // mask.shape[1]
                flipped = mask.clone()
                flipped.view(-1)[index] ^= True
                attend = masked(flipped, self.sink, self.recent)
                hidden = finish_layers(self.decoder, inputs[layer], table, attend, layer)
                features.append(self._coordinate(target, hidden[rows] - base[rows]))
            stacked = torch.stack(features).double()
            gram += (stacked @ stacked.T).cpu() * (target.weight / norm / stacked.shape[1])
        return gram.numpy() / 2

    def _coordinate(self, target: _Target, change: Tensor) -> Tensor:
        return (target.directions * change).sum(-1)

    def _run(self, target: _Target, mask: Tensor) -> Tensor:
        attend = masked(mask, self.sink, self.recent)
        return run_layers(self.decoder, target.sample.tokens, attend)[target.sample.scored]

    @torch.no_grad()
    def _target(self, sample: Sample, weight: float) -> _Target:
        hidden = run_layers(self.decoder, sample.tokens, lambda layer, *heads: full_attention(*heads))[sample.scored]
        directions = torch.empty_like(hidden)
        for start in range(0, len(hidden), _ROWS):
            rows = slice(start, start + _ROWS)
            with torch.enable_grad():
                leaf = hidden[rows].detach().requires_grad_()
                logits = self.logits(leaf).log_softmax(-1)
                drawn = torch.multinomial(logits.detach().exp(), 1, generator=self._generator)
                (directions[rows],) = torch.autograd.grad(logits.gather(1, drawn).sum(), leaf)
        return _Target(sample, weight, hidden, directions)


def best_flips(gram: NDArray[np.float64], mask: NDArray[np.bool_], kept: int, most: int) -> tuple[list[int], float]:
    """Heads to flip so that `kept` stay, `most` at most, and the divergence that the second-order model expects.

    The cheapest first until the count is right; then pairs that leave the count as it is, while that helps.
    """
    inside = mask.ravel()
    flipped = np.zeros(inside.size, dtype=np.bool_)
    matrix = gram[1:, 1:]
    while True:
        surplus = int((inside ^ flipped).sum()) - kept
        sign = np.where(flipped, -1.0, 1.0)
        single = np.diag(matrix) + 2 * sign * (gram[0, 1:] + matrix @ flipped)  # what changing one head's mind costs
        count = np.where(inside ^ flipped, -1, 1)
        if surplus:
            single[flipped | (count * surplus > 0)] = np.inf
            flipped[int(single.argmin())] = True
            continue
        pairs = single[:, None] + single + 2 * np.outer(sign, sign) * matrix
        pairs[(count[:, None] + count != 0) | (flipped.sum() + sign[:, None] + sign > max(most, flipped.sum()))] = (
            np.inf
        )
        pair = np.unravel_index(int(pairs.argmin()), pairs.shape)
        chosen = np.concatenate(([True], flipped))
        expected = float(gram[np.ix_(chosen, chosen)].sum())
        if not pairs[pair] < -1e-6 * abs(expected):
            return np.flatnonzero(flipped).tolist(), expected
        flipped[list(pair)] ^= True


def refine(
    refiner: Refiner,
    start: NDArray[np.bool_],
    found: float,
    rounds: int,
    progress: Callable[[str], None],
) -> tuple[NDArray[np.bool_], float, NDArray[np.float64]]:
    """The best mask found, its divergence, and scores around it.

    Heads are exchanged, as many as helps, for `rounds` rounds or until nothing helps; `start` has divergence `found`.
    """
    mask, centre, most = start, start, start.size
    kept = int(start.sum())
    gram = np.zeros((1 + start.size, 1 + start.size))
    for _ in range(rounds):
        centre, gram = mask, refiner.gram(torch.from_numpy(mask))
        while True:
            flips, expected = best_flips(gram, mask, kept, most)
            other = mask.copy()
            other.ravel()[flips] ^= True
            now = refiner.divergence(torch.from_numpy(other)) if flips else found
            progress(f"{len(flips)} flips: divergence {now:.5f}, expected {expected:.5f}, before {found:.5f}")
            if now < found:
                mask, found = other, now
                break
            most = len(flips) // 2  # farther than the second-order model reaches
            if most < 2:
                return mask, found, scores_around(mask, centre, gram)
    return mask, found, scores_around(mask, centre, gram)


def scores_around(mask: NDArray[np.bool_], centre: NDArray[np.bool_], gram: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scores whose highest `mask.sum()` are the mask; beyond it, heads are ranked by taking one more, or one fewer.

    They lie evenly in (0, 1), so that every ratio near the mask's own has a choice that is nearly the best. `gram` was
    measured around `centre`.
    """
    scores = np.empty(mask.size)
    places = (np.arange(mask.size) + 0.5) / mask.size
    kept = int(mask.sum())
    matrix, shift = gram[1:, 1:], gram[0, 1:]
    for goals, dropping in ((range(kept - 1, -1, -1), True), (range(kept, mask.size), False)):
        now, flipped = mask.ravel().copy(), (mask ^ centre).ravel()
        for goal in goals:
            cost = np.diag(matrix) + np.where(flipped, -2, 2) * (shift + matrix @ flipped)
            cost[now != dropping] = np.inf
            head = int(cost.argmin())
            scores[head] = places[mask.size - 1 - goal]
            now[head] ^= True
            flipped[head] ^= True
    return scores.reshape(mask.shape)


def _collect(inputs: list[Tensor]) -> Callable[[int, Tensor], None]:
    return lambda layer, x: inputs.append(x)
