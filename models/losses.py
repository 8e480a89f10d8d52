"""What 4 bits cost each KV head, measured on a text; and which heads get 8 bits in a budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from models.build import Build, layer_from
from models.cache.duo import DuoCache
from models.cache.pool import BlockPool
from models.cache.shape import CacheShape
from models.checkpoint import Checkpoint
from models.config import ModelConfig
from models.decoder import Decoder, Layer
from models.errors import UnsupportedModel
from quant import kv4
from quant.formats import QuantizedWeight, as_float
from quant.w8a8 import DenseLinear

_EMBEDDING = "model.embed_tokens.weight"


class _Compared(DuoCache):
    """A cache of one layer that keeps all as it is, beside one in 4 bits that sees the same."""

    def __init__(self, config: ModelConfig, layer: Layer, states: Tensor) -> None:
        device, every = states.device, np.ones((1, config.num_kv_heads), dtype=bool)
        kv = "fp32" if device.type == "cpu" else "bf16"
        exact, packed = (CacheShape.for_model(config, every, name, 1, 1, device) for name in (kv, "kv4"))
        blocks = -(-len(states) // packed.block)
        super().__init__(BlockPool(exact, blocks, device))
        self._packed = DuoCache(BlockPool(packed, blocks, device))
        self._turn = kv4.rotation(config.head_dim).to(device)
        self._layer = layer
        self._sizes = states.square().sum(-1)
        self.losses = torch.zeros(config.num_kv_heads)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = super().attend(layer, q, k, v)
        self._packed.begin(len(q))
        k, v = k.float() @ self._turn, v.float().contiguous()  # of one layout, as the kernels take them
        turned = self._packed.attend(layer, q.float() @ self._turn, k, v)
        apart = (turned.float() - out.float()).unflatten(1, (len(self.losses), -1))
        for head in range(len(self.losses)):
            alone = torch.zeros_like(apart)
            alone[:, head] = apart[:, head]
            moved = self._layer.output(self._layer.output.prepare(alone.flatten(1)))
            self.losses[head] = (moved.square().sum(-1) / self._sizes).mean().item()
        return out


def layer_losses(config: ModelConfig, layer: Layer, states: Tensor, turn: Tensor | None) -> tuple[Tensor, Tensor]:
    """Losses [kv_heads] of a layer whose heads all keep everything, and the hidden states [n, hidden] behind it.

    states: those in front of it; turn: as `Decoder`. A head's loss is how far rounding its keys and values to 4 bits
    moves the residual stream: the squared length of that, over the stream's own, mean over the tokens.
    """
    alone = replace(config, num_layers=1)
    ones = torch.ones(states.shape[1], device=states.device)
    decoder = Decoder(alone, states, [layer], ones, DenseLinear(states), turn)
    cache = _Compared(alone, layer, states)
    behind = decoder.forward(torch.arange(len(states)), cache)
    return cache.losses, behind if turn is None else kv4.rotate(behind, back=True)


def measure_losses(
    checkpoint: Checkpoint, ids: Tensor, device: torch.device, progress: Callable[[float], None] = lambda done: None
) -> np.ndarray:
    """Losses [layers, kv_heads] on token ids [n] with unquantised weights; one layer at a time is in memory."""
    config, form = checkpoint.config, checkpoint.int8_format
    turned = form is not None and form.turned

    def linear(weight: Tensor | QuantizedWeight, bias: Tensor | None) -> DenseLinear:
        return DenseLinear(as_float(weight).float(), bias)

    every = np.ones((config.num_layers, config.num_kv_heads), dtype=bool)
    how = Build(every, linear, DenseLinear, lambda t: t.to(device), form is None, False, device, turned)
    states = checkpoint.load_float(_EMBEDDING)[ids].to(device).float()
    turn = kv4.rotation(config.hidden_size).to(device) if turned else None
    rows = []
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        names = [name for name in checkpoint.names() if name.startswith(prefix)]
        parts = {name.removeprefix(prefix): checkpoint.load(name).to(device) for name in names}
        losses, states = layer_losses(config, layer_from(config, how, index, parts), states, turn)
        rows.append(losses)
        progress((index + 1) / config.num_layers)
    return torch.stack(rows).numpy()


def choose_wide(mask: np.ndarray, losses: np.ndarray | None, bits: float, head_dim: int) -> np.ndarray:
    """As many of the retrieval heads in `mask` as `bits` allow, by the largest losses: bool [layers, kv_heads].

    bits: of an element of the history, mean over the retrieval heads, scales included. Without losses the heads are
    spread evenly, which takes the same memory. Raises UnsupportedModel for a budget that cannot be met.
    """
    least, most = (8 * kv4.bytes_per_token(head_dim, each) / (2 * head_dim) for each in (4, 8))
    if not least <= bits <= most:
        raise UnsupportedModel("--kv-bits", bits, f"{least:g} to {most:g} at this model's head size")
    heads = np.flatnonzero(mask)
    count = int((bits - least) / (most - least) * len(heads) + 1e-6)
    if losses is None:
        chosen = heads[np.arange(count) * len(heads) // max(1, count)]
    else:
        chosen = heads[np.argsort(-losses.flatten()[heads], kind="stable")[:count]]
    wide = np.zeros(mask.size, dtype=bool)
    wide[chosen] = True
    return wide.reshape(mask.shape)
