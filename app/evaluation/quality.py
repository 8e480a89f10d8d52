"""What quantisation and streaming heads cost: perplexity, KL divergence and top-1 against bf16 with full attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from app.errors import UsageError
from models.build import load_decoder
from models.cache.duo import DuoCache
from models.cache.pool import BlockPool
from models.cache.shape import CacheShape
from models.checkpoint import Checkpoint
from models.decoder import Decoder
from models.heads import HeadPattern
from models.keys import KeyForm
from models.measured import MeasuredHeads, choose_wide
from quant import kv4
from quant.llm_int8 import missing as bitsandbytes_missing

CHUNK = {"cpu": 2048, "cuda": 8192}  # tokens read at a time
_ROWS = 1024  # positions whose logits are held at a time
_RATIOS = (0.25, 0.5, 0.75)

Progress = Callable[[str, float], None]
"""Told what is read and scored, and how far that setting is, from 0 to 1."""


@dataclass(frozen=True)
class Variant:
    """A way to run a model: `ratio` of its heads keep everything; `rotate` false stores keys as they are; `kv_bits` as
    in Settings."""

    name: str
    weights: str = "bf16"
    kv: str = "bf16"
    ratio: float = 1.0
    rotate: bool = True
    kv_bits: float | None = None


REFERENCE = Variant("bf16")


def variants(pattern: HeadPattern | None, kv_bits: float | None = None) -> list[Variant]:
    """All that the report compares, the reference left out; streaming heads only where there is a pattern, and 8 bits
    for some heads where `kv_bits` or the pattern gives a budget."""
    if kv_bits is None and pattern is not None:
        kv_bits = pattern.kv_bits
    rows = [
        Variant("w8a8", "w8a8"),
        Variant("llm.int8", "llm.int8"),
        Variant("kv8", kv="kv8"),
        Variant("kv4 without rotation", kv="kv4", rotate=False),
        Variant("kv4", kv="kv4"),
        Variant("w8a8 + kv4", "w8a8", "kv4"),
    ]
    if kv_bits is not None:
        rows.append(Variant(f"kv4 at {kv_bits:g} bits", kv="kv4", kv_bits=kv_bits))
        rows.append(Variant(f"w8a8 + kv4 at {kv_bits:g} bits", "w8a8", "kv4", kv_bits=kv_bits))
    if pattern is not None:
        rows += [Variant(f"duo {ratio:.0%}", ratio=ratio) for ratio in _RATIOS]
        rows += [Variant(f"w8a8 + kv4 + duo {ratio:.0%}", "w8a8", "kv4", ratio) for ratio in _RATIOS]
    return [row for row in rows if row.weights != "llm.int8" or bitsandbytes_missing() is None]


@dataclass(frozen=True)
class Score:
    """A variant over windows of `length` tokens; kl in nats a token, top1 the share of equal likeliest tokens."""

    variant: str
    length: int
    tokens: int
    perplexity: float
    above: float
    kl: float
    top1: float

    def row(self) -> dict[str, Any]:
        """For JSON; `perplexity_above_percent` against the reference of the same length."""
        return {
            "setting": self.variant,
            "length": self.length,
            "tokens": self.tokens,
            "perplexity": round(self.perplexity, 5),
            "perplexity_above_percent": round(100 * self.above, 4),
            "kl": round(self.kl, 6),
            "top1_percent": round(100 * self.top1, 3),
        }


class Quality:
    """Scores variants of a checkpoint on token ids; `reference` (default: the same checkpoint) runs in bf16.

    measured: the checkpoint's heads, whose mean keys come off where keys are rotated, and whose losses tell which heads
    get 8 bits where a variant gives some.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        pattern: HeadPattern | None,
        ids: Sequence[int],
        lengths: Sequence[int],
        device: torch.device,
        reference: Checkpoint | None = None,
        measured: MeasuredHeads | None = None,
        progress: Progress = lambda stage, done: None,
    ) -> None:
        self.checkpoint = checkpoint
        self.pattern = pattern
        self.device = device
        self._measured = measured
        self._progress = progress
        tokens = torch.tensor(ids, dtype=torch.int64)
        self._windows = {length: _cut(tokens, length) for length in lengths}
        self._work = 2 * sum(map(len, (window for windows in self._windows.values() for window in windows)))
        self._stage, self._done = "", 0  # tokens that are read, and those that are scored
        exact = reference or checkpoint
        decoder, shape = self._load(exact, REFERENCE, None)
        keys = None if measured is None else measured.form(exact.config)
        self.head_errors = _HeadErrors(decoder, shape, keys)
        self._hidden: dict[int, list[Tensor]] = {}
        for length, windows in self._windows.items():
            self._begin(f"{REFERENCE.name}, {length} tokens")
            watch = self.head_errors if length == max(lengths) else None
            self._hidden[length] = [self._read(decoder, shape, window, watch) for window in windows]
        decoder.layers.clear()  # the head is all that is asked of it from here on
        self._logits = decoder.logits
        self._losses: dict[int, float] = {}
        self.scores = [self._score(REFERENCE.name, decoder, length) for length in lengths]
        self._done = 0

    def measure(
        self, variant: Variant, checkpoint: Checkpoint | None = None, measured: MeasuredHeads | None = None
    ) -> list[Score]:
        """The variant's scores at each length, also kept in `scores`; of another checkpoint with its own heads."""
        heads = self._measured if checkpoint is None else measured
        decoder, shape = self._load(checkpoint or self.checkpoint, variant, heads)
        done = []
        for length, windows in self._windows.items():
            self._begin(f"{variant.name}, {length} tokens")
            hidden = [self._read(decoder, shape, window) for window in windows]
            done.append(self._score(variant.name, decoder, length, hidden))
        self._done = 0
        self.scores += done
        return done

    def _begin(self, stage: str) -> None:
        self._stage = stage
        self._tell(0)

    def _tell(self, tokens: int) -> None:
        """So many more are read, or scored."""
        self._done += tokens
        self._progress(self._stage, self._done / self._work)

    def _load(
        self, checkpoint: Checkpoint, variant: Variant, measured: MeasuredHeads | None
    ) -> tuple[Decoder, CacheShape]:
        config = checkpoint.config
        pattern = self.pattern or HeadPattern.all_retrieval(config)
        mask = pattern.retrieval_mask(variant.ratio) if variant.ratio < 1 else np.ones_like(pattern.scores, dtype=bool)
        wide = None
        if variant.kv_bits is not None:
            losses = None if measured is None else measured.losses
            wide = choose_wide(mask, losses, variant.kv_bits, config.head_dim)
        shape = CacheShape.for_model(config, mask, variant.kv, pattern.sink, pattern.recent, self.device, wide)
        shape = replace(shape, rotate=variant.rotate)
        keys = None if measured is None else measured.form(config)
        decoder = load_decoder(checkpoint, mask, variant.weights, shape, self.device, wide=wide, keys=keys)
        return decoder, shape

    def _read(self, decoder: Decoder, shape: CacheShape, window: Tensor, watch: _HeadErrors | None = None) -> Tensor:
        """Hidden states [n, hidden] behind a fresh cache."""
        pool = BlockPool(shape, -(-len(window) // shape.block), self.device)
        cache = DuoCache(pool) if watch is None else _WatchedCache(pool, watch)
        chunk = CHUNK[self.device.type]
        hidden = []
        for part in window.split(chunk):
            hidden.append(decoder.forward(part, cache))
            self._tell(len(part))
        return torch.cat(hidden)

    def _score(self, name: str, decoder: Decoder, length: int, hidden: list[Tensor] | None = None) -> Score:
        loss = kl = agree = 0.0
        count = 0
        for index, window in enumerate(self._windows[length]):
            truth = window.to(self.device)
            for start in range(0, len(window) - 1, _ROWS):
                end = min(start + _ROWS, len(window) - 1)
                exact = self._logits(self._hidden[length][index][start:end]).float().log_softmax(-1)
                ours = exact if hidden is None else decoder.logits(hidden[index][start:end]).float().log_softmax(-1)
                loss -= ours.gather(1, truth[start + 1 : end + 1, None]).double().sum().item()
                kl += (exact.exp() * (exact - ours)).sum(-1).double().sum().item()
                agree += (exact.argmax(-1) == ours.argmax(-1)).sum().item()
                count += end - start
            self._tell(len(window))
        loss /= count
        base = self._losses.setdefault(length, loss)
        return Score(name, length, count, math.exp(loss), math.exp(loss - base) - 1, kl / count, agree / count)


def _cut(tokens: Tensor, length: int) -> list[Tensor]:
    """Whole windows of `length` tokens."""
    if len(tokens) < length:
        raise UsageError(
            f"The text has {len(tokens):,} tokens, too few for a window of {length:,}: give more text or a smaller "
            "--length."
        )
    return list(tokens[: len(tokens) // length * length].split(length))


class _WatchedCache(DuoCache):
    """A cache that shows keys, values and queries to the table of head errors."""

    def __init__(self, pool: BlockPool, table: _HeadErrors) -> None:
        super().__init__(pool)
        self._table = table

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.length == 0:
            self._table.add(layer, q, k, v)
        return super().attend(layer, q, k, v)


class _HeadErrors:
    """What 4 bits do to each head's keys and values, on the first chunk of every window of the reference."""

    def __init__(self, decoder: Decoder, shape: CacheShape, keys: KeyForm | None) -> None:
        config = decoder.config
        self._keys = keys
        self._turn = kv4.rotation(config.head_dim).to(decoder.device)
        self._group = shape.group
        self._sums = torch.zeros(config.num_layers, config.num_kv_heads, 9, dtype=torch.float64)

    def add(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        """q [n, heads, d], k and v [n, kv_heads, d] with positions, not rotated."""
        q, k, v = (x.transpose(0, 1).float() for x in (q, k, v))
        row = [k.square().sum((1, 2)), v.square().sum((1, 2))]
        errors = {}
        for name, x in (("k", k), ("v", v)):
            for turn in (False, True):
                y = self._kept(layer, x) if turn and name == "k" else x @ self._turn if turn else x
                codes, scales = kv4.quantize(y, 4)
                error = kv4.dequantize(codes, scales[..., :1], scales[..., 1:], torch.float32) - y
                if turn:  # back to what is compared with the other
                    error = error @ self._turn.T
                if turn and name == "k" and self._keys is not None:
                    error *= self._scales(layer)
                errors[name, turn] = error
                row.append(error.square().sum((1, 2)))
        some = q[:, :: max(1, q.shape[1] // 64)].unflatten(0, (-1, self._group)).flatten(1, 2)
        for turn in (False, True):
            scores = some @ errors["k", turn].transpose(1, 2) * k.shape[-1] ** -0.5
            row.append(scores.square().mean((1, 2)))
        row.append(k.square().amax((1, 2)) / k.square().mean((1, 2)).clamp_min(1e-30))
        self._sums[layer] += torch.stack([*row[:8], torch.ones_like(row[0])], 1).double().cpu()
        self._outlier = getattr(self, "_outlier", torch.zeros(self._sums.shape[:2], dtype=torch.float64))
        self._outlier[layer] = torch.maximum(self._outlier[layer], row[8].double().cpu().sqrt())

    def _scales(self, layer: int) -> Tensor:
        assert self._keys is not None
        return self._keys.scales[layer].repeat_interleave(2, -1)[:, None].to(self._turn.device)

    def _kept(self, layer: int, k: Tensor) -> Tensor:
        """Keys in the form in which a 4-bit cache rounds them."""
        if self._keys is None:
            return k @ self._turn
        return k / self._scales(layer) @ self._turn - self._keys.centres[layer, :, None].to(k.device)

    def rows(self) -> Iterator[dict[str, Any]]:
        """A row a head. Errors of keys and values are relative (root of squares); that of a score is in its own unit,
        the exponent of the softmax; k_outlier is the largest entry over the root mean square."""
        for layer, head in np.ndindex(*self._sums.shape[:2]):
            k, v, k_plain, k_turned, v_plain, v_turned, s_plain, s_turned, count = self._sums[layer, head].tolist()
            yield {
                "layer": layer,
                "kv_head": head,
                "k_error": round(math.sqrt(k_turned / k), 5),
                "k_error_unrotated": round(math.sqrt(k_plain / k), 5),
                "v_error": round(math.sqrt(v_turned / v), 5),
                "v_error_unrotated": round(math.sqrt(v_plain / v), 5),
                "score_error": round(math.sqrt(s_turned / count), 5),
                "score_error_unrotated": round(math.sqrt(s_plain / count), 5),
                "k_outlier": round(self._outlier[layer, head].item(), 2),
            }
