"""Norms and rotations folded into a layer's weights (QuaRot, Ashkboos et al., 2024); the model's output stays the same.

All functions work in place on one layer's tensors by their names behind "model.layers.N.", in the Hugging Face layout.
"""

from __future__ import annotations

import math

from torch import Tensor

from models.config import ModelConfig
from quant import kv4

Parts = dict[str, Tensor]

_GATED_BLOCK = 64  # channels: enough to spread an outlier, few enough to cost nothing
_READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
FOLDED = tuple(f"{norm}.weight" for norm in _READERS)  # what `turn_residual` takes out


def gated_turn(channels: int) -> Tensor:
    """The rotation [b, b] of every b of `down`'s input channels (QuaRot turns them too, all at once)."""
    return kv4.rotation(math.gcd(channels, _GATED_BLOCK))


def narrow_turn(hidden_size: int) -> bool:
    """Whether bf16 holds the residual stream's rotation exactly: its entries are +-1 / sqrt(hidden_size)."""
    return hidden_size.bit_count() == 1 and hidden_size.bit_length() % 2 == 1  # a power of 4


def turn_gated(x: Tensor, channels: int, back: bool = False) -> Tensor:
    """x [..., channels] with every block of channels turned by `gated_turn`, or back."""
    turn = gated_turn(channels).to(x.device)
    return (x.unflatten(-1, (-1, turn.shape[0])) @ (turn.T if back else turn)).flatten(-2)


def rotate_values(config: ModelConfig, parts: Parts) -> None:
    """Turns each head's values by rotation(head_dim), and the output projection back."""
    d = config.head_dim
    turn = kv4.rotation(d).to(parts["self_attn.v_proj.weight"].device)
    for name in ("self_attn.v_proj.weight", "self_attn.v_proj.bias"):
        if name in parts:
            rows = parts[name].float().unflatten(0, (-1, d))
            parts[name] = (turn.T @ (rows if rows.dim() == 3 else rows[..., None])).reshape(parts[name].shape)
    out = parts["self_attn.o_proj.weight"].float()
    parts["self_attn.o_proj.weight"] = (out.unflatten(1, (-1, d)) @ turn).flatten(1)


def turn_residual(config: ModelConfig, parts: Parts) -> None:
    """Layers read W diag(norm) R and write R^T W, R being rotation(hidden_size); `down` reads turned blocks."""
    for norm, readers in _READERS.items():
        factor = parts.pop(f"{norm}.weight").float()
        for name in readers:
            parts[f"{name}.weight"] = kv4.rotate(parts[f"{name}.weight"].float() * factor)
    down = parts["mlp.down_proj.weight"].float()
    parts["mlp.down_proj.weight"] = turn_gated(down, config.intermediate_size)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        parts[f"{name}.weight"] = kv4.rotate(parts[f"{name}.weight"].float().T).T.contiguous()
        if f"{name}.bias" in parts:
            parts[f"{name}.bias"] = kv4.rotate(parts[f"{name}.bias"].float())


def scale_values(config: ModelConfig, parts: Parts, factor: Tensor) -> None:
    """Each KV head's values times factor [kv_heads], undone in the output projection."""
    rows = factor.repeat_interleave(config.head_dim)
    for name in ("self_attn.v_proj.weight", "self_attn.v_proj.bias"):
        if name in parts:
            parts[name] = parts[name] * (rows[:, None] if parts[name].dim() == 2 else rows)
    columns = factor.repeat_interleave(config.head_dim * (config.num_heads // config.num_kv_heads))
    parts["self_attn.o_proj.weight"] = parts["self_attn.o_proj.weight"] / columns


def scale_gated(config: ModelConfig, parts: Parts, factor: Tensor) -> None:
    """Each channel in front of `down` times factor [intermediate], undone in turned `down` (SmoothQuant's scales)."""
    for name in ("mlp.up_proj.weight", "mlp.up_proj.bias"):
        if name in parts:
            parts[name] = parts[name] * (factor[:, None] if parts[name].dim() == 2 else factor)
    plain = turn_gated(parts["mlp.down_proj.weight"], config.intermediate_size, back=True) / factor
    parts["mlp.down_proj.weight"] = turn_gated(plain, config.intermediate_size)
