"""What is measured of each KV head on a text: the form of its keys, what 4 bits cost it; which heads get 8 bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from models import kv_bits
from models.build import Build, layer_from
from models.cache.duo import DuoCache
from models.cache.pool import BlockPool
from models.cache.shape import CacheShape
from models.checkpoint import Checkpoint
from models.config import EMBEDDING, ModelConfig
from models.decoder import Decoder, Layer
from models.errors import UnsupportedModel
from models.files import writing
from models.keys import WIDEST_SCALE, KeyForm, key_scales, shared_part
from models.rope import Rope
from quant import kv4
from quant.formats import QuantizedWeight, as_float
from quant.w8a8 import DenseLinear

_LARGEST = 60_000.0  # of a key: more does not fit the fp16 of what stays unpacked
# In a checkpoint of our own, and beside a head pattern that comes along. The format is that of safetensors, the name is
# not: what is named so in a checkpoint are its weights.
FILE = "heads.measured"


@dataclass(frozen=True)
class MeasuredHeads:
    """Of each KV head in the model's order, in fp32.

    losses [layers, kv_heads]: how far rounding its keys and values to 4 bits moves the residual stream, the squared
    length of that over the stream's own, mean over the tokens; key_means [layers, kv_heads, head_dim]: the mean of its
    keys without their positions, rotary pairs as neighbours; key_scales [layers, kv_heads, head_dim / 2]: see
    models/keys.py.
    """

    losses: Tensor
    key_means: Tensor
    key_scales: Tensor

    @classmethod
    def join(cls, layers: Sequence[MeasuredHeads]) -> MeasuredHeads:
        """Of a model whose layers were measured one by one, each without the first dimension."""
        return cls(*(torch.stack(each) for each in zip(*(vars(layer).values() for layer in layers), strict=True)))

    def form(self, config: ModelConfig) -> KeyForm:
        """How the keys of these heads are kept."""
        return KeyForm.of(self.key_means, self.key_scales, config)

    def save(self, path: Path) -> None:
        """Writes safetensors; raises OSError."""
        with writing(path) as file:
            file.write(save({name: tensor.contiguous() for name, tensor in vars(self).items()}))

    @classmethod
    def load(cls, path: Path, config: ModelConfig) -> MeasuredHeads | None:
        """What `save` wrote for such a model; None where there is nothing of the kind."""
        try:
            found = load_file(path)
        except (OSError, SafetensorError):
            return None
        each = (config.num_layers, config.num_kv_heads)
        shapes = {"losses": each, "key_means": (*each, config.head_dim), "key_scales": (*each, config.head_dim // 2)}
        if {name: tuple(tensor.shape) for name, tensor in found.items()} != shapes:
            return None
        if any(tensor.dtype != torch.float32 for tensor in found.values()):
            return None
        heads = cls(**found)
        return heads if heads._sensible() else None

    def _sensible(self) -> bool:
        """Whether such heads can have been measured; NaN is in no range."""
        ranges = (
            (self.losses, 0.0, torch.inf),
            (self.key_means, -_LARGEST, _LARGEST),
            (self.key_scales, 1 / WIDEST_SCALE, WIDEST_SCALE),
        )
        return all(bool(((low <= part) & (part <= high)).all()) for part, low, high in ranges)


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
        self._config = config
        self._layer = layer
        self._sizes = states.square().sum(-1)
        self.measured: MeasuredHeads

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = super().attend(layer, q, k, v)
        self._packed.begin(len(q))
        config, q, k = self._config, q.float(), k.float()
        table = Rope(config.rope, config.head_dim, config.max_positions).table(torch.arange(len(k)), k.device)
        # The first tokens stay as they are, and the very first is like no other.
        packed = slice(min(self._packed.shape.front, len(k) // 2), None)
        unplaced = torch.view_as_complex(k.unflatten(-1, (-1, 2))[packed]) / table[packed, None]
        means = torch.view_as_real(unplaced.mean(0)).flatten(-2)
        scales = key_scales(q[packed], k[packed] - shared_part(means, config).flatten(-2), config.qk_norm)
        form = KeyForm.of(means, scales, config)
        both = scales.repeat_interleave(2, -1)
        k = (k / both) @ self._turn - form.centres
        q = (q * both.repeat_interleave(q.shape[1] // k.shape[1], 0)) @ self._turn
        turned = self._packed.attend(layer, q, k, v.float().contiguous())  # of one layout, as the kernels take them
        losses = torch.zeros(config.num_kv_heads)
        apart = (turned.float() - out.float()).unflatten(1, (len(losses), -1))
        for head in range(len(losses)):
            alone = torch.zeros_like(apart)
            alone[:, head] = apart[:, head]
            moved = self._layer.output(self._layer.output.prepare(alone.flatten(1)))
            losses[head] = (moved.square().sum(-1) / self._sizes).mean().item()
        self.measured = MeasuredHeads(losses, means.cpu(), scales.cpu())
        return out


def measure_layer(
    config: ModelConfig, layer: Layer, states: Tensor, turn: Tensor | None
) -> tuple[MeasuredHeads, Tensor]:
    """The heads of a layer all of which keep everything, and the hidden states [n, hidden] behind it.

    states: those in front of it; turn: as `Decoder`.
    """
    alone = replace(config, num_layers=1)
    ones = torch.ones(states.shape[1], device=states.device)
    decoder = Decoder(alone, states, [layer], ones, DenseLinear(states), turn)
    cache = _Compared(alone, layer, states)
    behind = decoder.forward(torch.arange(len(states)), cache)
    behind = behind if turn is None else kv4.rotate(behind, back=True)
    return cache.measured, behind


def measure_heads(
    checkpoint: Checkpoint, ids: Tensor, device: torch.device, progress: Callable[[float], None] = lambda done: None
) -> MeasuredHeads:
    """The heads of a checkpoint on token ids [n] with unquantised weights; one layer at a time is in memory."""
    config, form = checkpoint.config, checkpoint.int8_format
    turned = form is not None and form.turned

    def linear(weight: Tensor | QuantizedWeight, bias: Tensor | None) -> DenseLinear:
        return DenseLinear(as_float(weight).float(), bias)

    every = np.ones((config.num_layers, config.num_kv_heads), dtype=bool)
    how = Build(every, linear, DenseLinear, lambda t: t.to(device), form is None, False, device, turned)
    states = checkpoint.load_float(EMBEDDING)[ids].to(device).float()
    turn = kv4.rotation(config.hidden_size).to(device) if turned else None
    heads = []
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        names = [name for name in checkpoint.names() if name.startswith(prefix)]
        parts = {name.removeprefix(prefix): checkpoint.load(name).to(device) for name in names}
        measured, states = measure_layer(config, layer_from(config, how, index, parts), states, turn)
        heads.append(measured)
        progress((index + 1) / config.num_layers)
    return MeasuredHeads.join(heads)


def choose_wide(
    mask: np.ndarray, losses: Tensor | None, bits: float, head_dim: int, said_by: str = "--kv-bits"
) -> np.ndarray:
    """As many of the retrieval heads in `mask` as `bits` allow, by the largest losses: bool [layers, kv_heads].

    bits: of an element of the history, mean over the retrieval heads, scales included. Without losses the heads are
    spread evenly, which takes the same memory. Raises UnsupportedModel for a budget that cannot be met.
    """
    least, most = (8 * kv4.bytes_per_token(head_dim, each) / (2 * head_dim) for each in (4, 8))
    allowed = min(most, kv_bits.MOST)
    if not least <= bits <= allowed:
        range_ = f"{least:g} to {allowed:g}" if least <= allowed else "none"
        raise UnsupportedModel(said_by, bits, f"{range_} at this model's head size, {head_dim}")
    heads = np.flatnonzero(mask)
    count = int((bits - least) / (most - least) * len(heads) + 1e-6)
    if losses is None:
        chosen = heads[np.arange(count) * len(heads) // max(1, count)]
    else:
        chosen = heads[np.argsort(-losses.numpy().flatten()[heads], kind="stable")[:count]]
    wide = np.zeros(mask.size, dtype=bool)
    wide[chosen] = True
    return wide.reshape(mask.shape)
