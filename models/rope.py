"""Rotary position encoding as complex numbers, with phases in float64: fp32 is off by 0.1 rad at 3 million tokens."""

from __future__ import annotations

import math

import torch

from models.config import RopeConfig
from models.upload import upload

_SPREAD, _GOLDEN = 4096, 0.6180339887498949  # positions for a mean
_STILL = 0.8  # length of the mean of unit numbers spread over two radians


class Rope:
    """Unit complex numbers (times yarn's attention factor) that rotate adjacent pairs of a head.

    dynamic (NTK) scaling depends on a length. With `seq_len` given, all positions use that length, as transformers
    does in one forward pass. Without it each position uses its own (position + 1), so that a cached key never depends
    on how the text was cut into chunks; up to the original context both are the same.
    """

    def __init__(self, config: RopeConfig, head_dim: int, max_positions: int) -> None:
        self.config = config
        self.head_dim = head_dim
        self.max_positions = max_positions
        self.attention_factor = config["attention_factor"] if config.kind == "yarn" else 1.0
        # dynamic keeps the exponents, because its base changes with the length
        self._pairs = _exponents(head_dim) if config.kind == "dynamic" else inverse_frequencies(config, head_dim)
        self._placed: dict[torch.device, torch.Tensor] = {}

    def table(
        self, positions: torch.Tensor, device: torch.device | str | None = None, seq_len: int | None = None
    ) -> torch.Tensor:
        """int64 [L] -> complex64 [L, head_dim / 2] on `device` (default: the positions' own).

        Raises ValueError for positions outside the model's context when they are on the CPU; elsewhere the check
        would make the caller wait for the device.
        """
        if positions.device.type == "cpu" and positions.numel():
            low, high = (int(bound) for bound in torch.aminmax(positions))
            if low < 0 or high >= self.max_positions:
                raise ValueError(f"Positions {low} to {high} leave the context of {self.max_positions:,} tokens.")
        target = torch.device(device) if device is not None else positions.device
        steps = upload(positions, target).to(torch.float64)
        phases = steps[:, None] * self._frequencies(steps, seq_len)
        return torch.polar(torch.full_like(phases, self.attention_factor), phases).to(torch.complex64)

    def still(self) -> torch.Tensor:
        """Mean of the table over the whole context, complex64 [head_dim / 2], of the pairs that turn by less than about
        two radians in all of it; 0 for the others, which are nowhere near their mean for long.
        """
        spread = torch.arange(_SPREAD, dtype=torch.float64) * _GOLDEN % 1  # even, and in step with no frequency
        mean = self.table((spread * self.max_positions).long()).mean(0)
        return torch.where(mean.abs() > _STILL * self.attention_factor, mean, 0)

    def _frequencies(self, steps: torch.Tensor, seq_len: int | None) -> torch.Tensor:
        """float64 [head_dim / 2], or [L, head_dim / 2] where every position has its own."""
        if steps.device not in self._placed:
            self._placed[steps.device] = self._pairs.to(steps.device)
        pairs = self._placed[steps.device]
        if self.config.kind != "dynamic":
            return pairs
        factor, original = self.config["factor"], self.config["original_max_positions"]
        lengths = steps + 1 if seq_len is None else torch.full_like(steps[:1], seq_len)
        stretch = factor * lengths.clamp(min=original) / original - (factor - 1)
        bases = self.config.theta * stretch ** (self.head_dim / (self.head_dim - 2))
        return bases[:, None] ** -pairs


class EndlessRope:
    """Rotations by positions without end, for a cache that keeps `length` tokens.

    Phases are 64-bit fractions of a turn and wrap around as angles do. So the angle between two positions depends on
    their distance alone, to the last bit, however far out both are. dynamic (NTK) scaling takes the frequencies of a
    context of `length` tokens, since no position inside the cache is beyond it.
    """

    def __init__(self, rope: Rope, length: int) -> None:
        pairs = rope._frequencies(torch.zeros(1, dtype=torch.float64), length).flatten()
        self.attention_factor = rope.attention_factor
        self._steps = torch.tensor([round(pair / (2 * math.pi) * 2**64) for pair in pairs.tolist()])
        self._placed: dict[torch.device, torch.Tensor] = {}

    def table(self, positions: torch.Tensor, device: torch.device | str | None = None) -> torch.Tensor:
        """As `Rope.table`, for any int64 position: complex64 [L, head_dim / 2]."""
        phases = self._phases(positions, device)
        return torch.polar(torch.full_like(phases, self.attention_factor), phases).to(torch.complex64)

    def back(self, distances: torch.Tensor, device: torch.device | str | None = None) -> torch.Tensor:
        """complex64 [L, head_dim / 2] that moves what is rotated already by so many positions towards the start."""
        phases = self._phases(-distances, device)
        return torch.polar(torch.ones_like(phases), phases).to(torch.complex64)

    def _phases(self, positions: torch.Tensor, device: torch.device | str | None) -> torch.Tensor:
        target = torch.device(device) if device is not None else positions.device
        if target not in self._placed:
            self._placed[target] = self._steps.to(target)
        wrapped = positions.to(target)[:, None] * self._placed[target]
        return wrapped.double() * (2 * math.pi / 2**64)


def inverse_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """float64 [head_dim / 2]: radians a position for each pair; for dynamic those within the original context."""
    inv_freq = config.theta ** -_exponents(head_dim)
    if config.kind == "linear":
        return inv_freq / config["factor"]
    if config.kind == "llama3":
        return _llama3(config, inv_freq)
    if config.kind == "yarn":
        return _yarn(config, inv_freq)
    return inv_freq


def _exponents(head_dim: int) -> torch.Tensor:
    return torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim


def _llama3(config: RopeConfig, inv_freq: torch.Tensor) -> torch.Tensor:
    """Slow pairs are stretched by the factor, fast ones kept, those between are blended (Llama 3.1)."""
    low, high = config["low_freq_factor"], config["high_freq_factor"]
    turns = config["original_max_positions"] * inv_freq / (2 * math.pi)  # over the original context
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return inv_freq * (keep + (1 - keep) / config["factor"])


def _yarn(config: RopeConfig, inv_freq: torch.Tensor) -> torch.Tensor:
    """The same idea, blended linearly in the index of the pair (arXiv 2309.00071)."""
    head_dim = 2 * len(inv_freq)

    def index_of(turns: float) -> float:
        """The pair, as a real number, that turns this often over the original context."""
        ratio = config["original_max_positions"] / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(config.theta))

    low, high = index_of(config["beta_fast"]), index_of(config["beta_slow"])
    if config["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    pairs = torch.arange(len(inv_freq), dtype=torch.float64)
    stretch = ((pairs - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    return inv_freq * (1 - stretch + stretch / config["factor"])
