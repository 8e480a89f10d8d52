"""What keys have in common, which is taken off before they are rounded; and whether they fit 4 bits all the same."""

from __future__ import annotations

import math

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


def key_centres(means: Tensor, config: ModelConfig) -> Tensor:
    """What is subtracted from the rotated keys of heads whose keys have these `means`, both fp32 [..., head_dim].

    A vector that all keys of a head share adds the same to all its scores, and softmax does not see it; rounded to 4
    bits it costs as much as what tells keys apart. Only pairs that hardly turn over the whole context share one.
    means: without positions, pairs as neighbours. As SageAttention (Zhang et al., 2024) does inside a kernel.
    """
    still = Rope(config.rope, config.head_dim, config.max_positions).still().to(means.device)
    pairs = torch.view_as_complex(means.float().unflatten(-1, (-1, 2)).contiguous()) * still
    return torch.view_as_real(pairs).flatten(-2) @ kv4.rotation(means.shape[-1]).to(means.device)


def score_errors(checkpoint: Checkpoint) -> Tensor:
    """The error [layers, kv_heads] of an attention score that 4-bit keys cause, estimated for normed inputs.

    A key's rounding error grows with its length, that of a score with the query's too: error * |q| |k| / d. Lengths are
    those that weights and biases give to inputs whose channels are alike; a bias as large as Qwen's dominates them,
    where `key_centres` leaves it.
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
