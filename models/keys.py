"""The form in which keys are rounded; and whether they fit 4 bits in it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from models.checkpoint import Checkpoint
from models.config import ModelConfig
from models.rope import Rope
from quant import kv4

# Of a rotated head, whose entries are near normal: the range of 64 to 256 of them over 15 steps, and the root mean
# square error of rounding to a step.
_ERROR = 0.09
# In units of the softmax's exponent. SmolLM2's largest is 0.4, and 4 bits cost it 0.8 % of perplexity; with keys made
# larger on purpose perplexity is lost from about 1 on (tests/models/test_keys.py).
HARMLESS = 1.0
WIDEST_SCALE = 20.0  # or one over it: a channel that nobody asks for is not blown up without end


@dataclass(frozen=True)
class KeyForm:
    """How rotated keys are kept: rotary pairs divided by `scales` fp32 [..., kv_heads, head_dim / 2], by which queries
    are multiplied; rotated; and `centres` [..., kv_heads, head_dim] subtracted. No score changes but by a constant.
    """

    scales: Tensor
    centres: Tensor

    @classmethod
    def of(cls, means: Tensor, scales: Tensor, config: ModelConfig) -> KeyForm:
        """The form of keys with these means [..., kv_heads, head_dim] and scales; pairs as neighbours.

        A vector that all keys of a head share adds the same to all its scores, and softmax does not see it; rounded to
        4 bits it costs as much as what tells keys apart (SageAttention, Zhang et al., 2024, takes it off inside a
        kernel). Only pairs that hardly turn over the whole context share one.
        """
        turn = kv4.rotation(config.head_dim).to(means.device)
        return cls(scales, (shared_part(means, config) / scales[..., None]).flatten(-2) @ turn)

    def layer(self, index: int) -> KeyForm:
        """Of one layer."""
        return KeyForm(self.scales[index], self.centres[index])


def shared_part(means: Tensor, config: ModelConfig) -> Tensor:
    """Of placed keys whose means without positions are [..., head_dim]: what all share, [..., head_dim / 2, 2]."""
    still = Rope(config.rope, config.head_dim, config.max_positions).still().to(means.device)
    return torch.view_as_real(torch.view_as_complex(means.float().unflatten(-1, (-1, 2)).contiguous()) * still)


def key_scales(q: Tensor, k: Tensor, alike: bool) -> Tensor:
    """Scales fp32 [kv_heads, head_dim / 2] for keys [n, kv_heads, head_dim] and their queries [n, heads, head_dim].

    Rounding puts the same error into every pair of a rotated key, and a score takes it in times the query's: so pairs
    with large keys and small queries give way to the others (SmoothAttention of QServe, Lin et al., 2024, does it for
    the largest channels). alike: one scale for all heads. k: without what all keys share.
    """
    energies = [x.float().square().unflatten(-1, (-1, 2)).sum(-1).mean(0) for x in (q, k)]
    of_queries, of_keys = energies[0].unflatten(0, (len(energies[1]), -1)).mean(1), energies[1]
    if alike:
        of_queries, of_keys = (x.mean(0).expand_as(x) for x in (of_queries, of_keys))
    logs = (of_keys.clamp_min(1e-20) / of_queries.clamp_min(1e-20)).log() / 4
    scales = (logs - logs.mean(-1, keepdim=True)).exp()
    return scales.clamp(1 / WIDEST_SCALE, WIDEST_SCALE)


def score_errors(checkpoint: Checkpoint) -> Tensor:
    """The error [layers, kv_heads] of an attention score that 4-bit keys cause, estimated for normed inputs.

    A key's rounding error grows with its length, that of a score with the query's too: error * |q| |k| / d. Lengths are
    those that weights and biases give to inputs whose channels are alike; a bias as large as Qwen's dominates them,
    where `KeyForm` leaves it.
    """
    config = checkpoint.config
    group = config.num_heads // config.num_kv_heads
    names = set(checkpoint.names())
    turns = Rope(config.rope, config.head_dim, config.max_positions).still() == 0
    rows = []
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        norm = None
        if f"{prefix}input_layernorm.weight" in names:
            norm = checkpoint.load_float(f"{prefix}input_layernorm.weight").float()
        lengths = []
        for name in ("q", "k"):
            heads = f"{prefix}self_attn.{name}_"
            if config.qk_norm:  # a normed head is as long as its norm's weight
                size = checkpoint.load_float(f"{heads}norm.weight").float().square().sum()
                count = config.num_heads if name == "q" else config.num_kv_heads
                lengths.append(size.expand(count))
                continue
            weight = checkpoint.load_float(f"{heads}proj.weight").float()
            energy = (weight if norm is None else weight * norm).square().sum(1)
            if config.qkv_bias:
                bias = checkpoint.load_float(f"{heads}proj.bias").float()
                if name == "k":  # of it, only what turns with the position stays in the keys
                    bias = (bias.unflatten(0, (-1, 2, len(turns))) * turns).flatten()
                energy = energy + bias.square()
            lengths.append(energy.unflatten(0, (-1, config.head_dim)).sum(1))
        q, k = lengths
        rows.append((q.unflatten(0, (-1, group)).mean(1) * k).sqrt() * (_ERROR / config.head_dim))
    return torch.stack(rows)


def key_warning(checkpoint: Checkpoint) -> str | None:
    """What to tell people of a model whose attention 4-bit keys would blur, with the setting that works; else None."""
    errors = score_errors(checkpoint)
    worst = errors.max().item()
    if worst <= HARMLESS or math.isnan(worst):
        return None
    layer, head = divmod(int(errors.argmax()), errors.shape[1])
    count = int((errors > HARMLESS).sum())
    return (
        f"This model's keys are too large for 4 bits: {count} of {errors.numel()} KV heads, most of all head {head} of "
        f"layer {layer} (error of an attention score about {worst:.1f}; up to {HARMLESS:g} is harmless). "
        "Start with --kv kv8."
    )
