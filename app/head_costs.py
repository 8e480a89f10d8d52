"""What a head pattern costs and saves at each ratio: memory, bytes read a token, arithmetic; its picture; and the
memory that other settings of the cache take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from app.config import Settings
from app.engine.sizing import resolve_shape
from models.cache.plan import plan_memory, weights_bytes
from models.cache.shape import CacheShape
from models.config import ModelConfig
from models.heads import HeadPattern
from quant.w8a8 import dense_dtype, int8_head

_MARK = "#2d6a5a"


@dataclass(frozen=True)
class RatioCost:
    """For a context of so many tokens: bytes of a sequence's cache, bytes read for one more token (weights and cache),
    and attention's arithmetic in reading the prompt, as a share of that with every head full."""

    ratio: float
    heads: int
    context: int
    cache_bytes: int
    read_bytes: int
    attention: float
    token_bytes: int = 0  # of cache for one more token
    total_bytes: int = 0  # of everything that the plan counts

    def against(self, other: RatioCost) -> str:
        """What this costs and saves beside another ratio, in words."""

        def change(now: float, before: float) -> str:
            return "the same" if now == before else f"{(now / before - 1) * 100:+.0f} %"

        return (
            f"{self.ratio:.0%}: {self.heads} heads keep everything. At {self.context:,} tokens the cache takes "
            f"{self.cache_bytes / 1e6:,.0f} MB ({change(self.cache_bytes, other.cache_bytes)}), a new token reads "
            f"{self.read_bytes / 1e6:,.0f} MB ({change(self.read_bytes, other.read_bytes)}), and reading the prompt "
            f"takes {self.attention:.0%} of full attention's arithmetic ({change(self.attention, other.attention)})."
        )


@dataclass(frozen=True)
class Heads:
    """A model with its pattern, None where it has none or no head keeps everything, and the settings in force."""

    config: ModelConfig
    pattern: HeadPattern | None
    settings: Settings
    device: torch.device

    @property
    def window(self) -> tuple[int, int]:
        """First and last tokens that a head keeps which does not keep everything."""
        shape = self._shape(self.settings)
        return shape.sink, shape.recent

    def compare(self, wanted: Settings, context: int, chunk: int) -> list[tuple[str, str, str]]:
        """Rows of what the settings in force and others take: what, now, and then with what changes.

        For a sequence of `context` tokens; `chunk` is the one in force.
        """
        now, then = self._costs(self.settings, context, chunk), self._costs(wanted, context, chunk)

        def change(before: float, after: float) -> str:
            return "" if round(after / before, 2) == 1 else f" ({(after / before - 1) * 100:+.0f} %)"

        rows = []
        if self.pattern is not None:
            rows.append(("Heads that keep everything", f"{now.heads}", f"{then.heads}"))
        shape, wanted_shape = self._shape(self.settings), self._shape(wanted)
        if shape.wide_heads or wanted_shape.wide_heads:  # what is told as 4 bits is not all of it
            rows.append(("Of these in 8 bits, not 4", _in_8_bits(shape), _in_8_bits(wanted_shape)))
        for what, name, text in (
            (f"Cache of {context:,} tokens", "cache_bytes", _megabytes),
            ("One more token of cache", "token_bytes", lambda n: f"{n:,} bytes"),
            ("Read from memory for each new word", "read_bytes", _megabytes),
            (f"Weights, workspace and cache of {context:,} tokens", "total_bytes", _megabytes),
            ("Arithmetic of attention in reading", "attention", lambda share: f"{share:.0%} of all heads full"),
        ):
            before, after = getattr(now, name), getattr(then, name)
            if before or after:
                rows.append((what, text(before), text(after) + (change(before, after) if before else "")))
        return rows

    def _shape(self, settings: Settings) -> CacheShape:
        return resolve_shape(self.config, self.pattern, settings, self.device)[1]

    def _costs(self, settings: Settings, context: int, chunk: int) -> RatioCost:
        cost = ratio_cost(self.config, self.pattern, settings, settings.retrieval_ratio, context, self.device)
        shape, chunk = self._shape(settings), settings.chunk or chunk
        plan = plan_memory(self.config, shape, settings.weights, context, chunk, self.device, settings.embedding)
        return replace(cost, token_bytes=plan.bytes_per_token, total_bytes=plan.total_bytes)


def ratio_cost(
    config: ModelConfig,
    pattern: HeadPattern | None,
    settings: Settings,
    ratio: float,
    context: int,
    device: torch.device,
) -> RatioCost:
    """The cost at one ratio. A speed is not promised: bytes and arithmetic are what the hardware has to get through."""
    _, shape = resolve_shape(config, pattern, replace(settings, retrieval_ratio=ratio), device)
    heads, streaming = sum(shape.retrieval_heads), sum(shape.streaming_heads)
    window = min(context, shape.sink + shape.recent)
    cache = context * shape.bytes_per_token + shape.exact_bytes + shape.window_bytes
    # A query sees its past: on average half of the context, or the window once it is behind it.
    seen_full = context * (context + 1) / 2
    seen_window = window * (window + 1) / 2 + (context - window) * window
    share = (heads * seen_full + streaming * seen_window) / ((heads + streaming) * seen_full)
    return RatioCost(ratio, heads, context, cache, _read_weights(config, settings, device) + cache, share)


def _in_8_bits(shape: CacheShape) -> str:
    """How many heads keep 8 bits."""
    return str(sum(shape.retrieval_heads if shape.bits == 8 else shape.wide_heads))


def _megabytes(count: float) -> str:
    return f"{count / 1e6:,.0f} MB" if count < 1e9 else f"{count / 1e9:,.1f} GB"


def _read_weights(config: ModelConfig, settings: Settings, device: torch.device) -> int:
    """Bytes of weights that one token reads: of the embedding a row, of an output head that has int8 codes those."""
    if settings.embedding == "int8":
        held = config.vocab_size * (config.hidden_size + 4)
        copies = 1 if not config.tied_embeddings or device.type == "cpu" else 0  # beside what the head reads
        return weights_bytes(config, settings.weights, device, "int8") - copies * held
    dense = config.vocab_size * config.hidden_size * dense_dtype(device).itemsize
    matrices = 1 if config.tied_embeddings else 2
    read = 0 if settings.weights == "w8a8" and int8_head(device) else 1
    return weights_bytes(config, settings.weights, device) - (matrices - read) * dense


def draw(pattern: HeadPattern, mask: NDArray[np.bool_], costs: list[RatioCost], ratio: float, file: Path | Any) -> None:
    """A PNG: scores of layers x KV heads with the retrieval heads marked, and the costs of every ratio as curves."""
    from matplotlib.figure import Figure  # slow to import

    layers, heads = pattern.scores.shape
    figure = Figure((6 + 0.35 * heads, max(4.4, 0.16 * layers + 1.4)), layout="constrained")
    table, curve = figure.subplots(1, 2, width_ratios=[1.2 + 0.35 * heads, 5])
    image = table.imshow(pattern.scores, cmap="Greys", vmin=min(0.0, pattern.scores.min()), aspect="auto")
    rows, columns = np.nonzero(mask)
    table.scatter(columns, rows, marker="s", s=22, color="#4fd1a5", edgecolors="white", linewidths=0.6)
    title = f"{int(mask.sum())} of {mask.size} heads (green)\nkeep everything"
    table.set(xlabel="KV head", ylabel="layer, from the input on", title=title)
    table.title.set_fontsize(10)
    table.set_xticks(range(0, heads, max(1, heads // 8)))
    bar = figure.colorbar(image, ax=table, label="how much it needs the past (score)")
    bar.outline.set_visible(False)
    ratios, most = [cost.ratio for cost in costs], costs[-1]
    for name, style, values, whole in (
        ("memory of the cache", "-", [cost.cache_bytes for cost in costs], most.cache_bytes),
        ("memory read for each new word", "--", [cost.read_bytes for cost in costs], most.read_bytes),
        ("arithmetic of attention in reading", "-.", [cost.attention for cost in costs], most.attention),
    ):
        curve.plot(ratios, [value / whole for value in values], style, label=name)
    curve.axvline(ratio, color=_MARK, linewidth=1)
    curve.annotate(f" in force: {ratio:.0%}", (ratio, 1.02), color=_MARK, fontsize=9)
    curve.set(xlabel="share of heads that keep everything", ylabel="of what it takes with all heads", xlim=(0, 1))
    curve.set_ylim(0, 1.08)
    for axis in (curve.xaxis, curve.yaxis):
        axis.set_major_formatter(lambda share, _: f"{share:.0%}")
    curve.set_title(
        f"What more heads take, at {most.context:,} tokens\n(all heads: {_megabytes(most.cache_bytes)} of cache)",
        fontsize=10,
    )
    curve.grid(alpha=0.3)
    curve.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), fontsize=9, frameon=False)
    curve.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=120, format="png")
