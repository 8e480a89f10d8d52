"""From a checkpoint's tensors to a decoder: heads in order, norms and rotations folded in, layers converted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from models.cache.shape import CacheShape
from models.checkpoint import Checkpoint
from models.config import ModelConfig
from models.decoder import Decoder, Layer, gated_turn
from models.errors import BadCheckpoint
from quant import kv4
from quant.w8a8 import DenseLinear, Head, Linear, W8A8Head, W8A8Linear, dense_dtype, int8_head

_EMBEDDING, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@dataclass(frozen=True)
class Build:
    """How to convert a checkpoint.

    mask: bool [layers, kv_heads], True for a retrieval head. `make_linear` turns a float weight [out, in] and bias into
    a layer, `make_head` the output head; `place` puts unquantised tensors in their dtype and device. `rotate_values`
    folds the rotation of the heads' values into their projections; `rotate_residual` turns the whole residual
    stream, which takes the outliers out of what W8A8 layers read (QuaRot, Ashkboos et al., 2024).
    """

    mask: np.ndarray
    make_linear: Callable[[Tensor, Tensor | None], Linear]
    make_head: Callable[[Tensor, Tensor | None], Head]
    place: Callable[[Tensor], Tensor]
    rotate_values: bool
    rotate_residual: bool
    device: torch.device


def build_decoder(
    config: ModelConfig,
    tensors: Iterable[tuple[str, Tensor]],
    how: Build,
    progress: Callable[[float], None] = lambda done: None,
) -> Decoder:
    """A decoder from named float tensors; one layer at most waits unconverted. Raises BadCheckpoint."""
    shapes = config.tensor_shapes()
    parts: list[dict[str, Tensor]] = [{} for _ in range(config.num_layers)]
    wanted = [{n.split(".", 3)[3] for n in shapes if n.startswith(f"model.layers.{i}.")} for i in range(len(parts))]
    layers: list[Layer | None] = [None] * config.num_layers
    top: dict[str, Tensor] = {}
    turn = kv4.rotation(config.hidden_size).to(how.device) if how.rotate_residual else None
    for count, (name, tensor) in enumerate(tensors):
        if name.startswith("model.layers."):
            index, rest = name.removeprefix("model.layers.").split(".", 1)
            i = int(index)
            parts[i][rest] = tensor.to(how.device)
            if parts[i].keys() == wanted[i]:
                layers[i] = _LayerBuild(config, how, turn, how.mask[i], parts[i]).layer()
                parts[i] = {}
        else:
            top[name] = tensor
        progress((count + 1) / len(shapes))
    missing = {_EMBEDDING, _NORM} - top.keys() | {f"layer {i}" for i, layer in enumerate(layers) if layer is None}
    if missing:
        raise BadCheckpoint(f"The checkpoint lacks tensors of: {', '.join(sorted(missing))}.")
    embedding = how.place(top[_EMBEDDING])
    head = how.make_head(embedding if config.tied_embeddings else how.place(top[_HEAD]), None)
    return Decoder(
        config,
        embedding,
        [layer for layer in layers if layer is not None],
        top[_NORM].to(how.device, torch.float32),
        head,
        turn,
    )


def load_decoder(
    checkpoint: Checkpoint,
    mask: np.ndarray,
    weights: str,
    shape: CacheShape,
    device: torch.device,
    progress: Callable[[float], None] = lambda done: None,
) -> Decoder:
    """The decoder of a checkpoint with "w8a8", "bf16" or (for comparisons) "fp32" weights on `device`."""

    def linear(weight: Tensor, bias: Tensor | None) -> Linear:
        if weights == "w8a8":
            return W8A8Linear.from_float(weight, bias)
        return DenseLinear(weight.to(torch.float32 if weights == "fp32" else torch.bfloat16), bias)

    how = Build(
        mask,
        linear,
        W8A8Head if weights == "w8a8" and int8_head(device) else DenseLinear,
        lambda tensor: tensor.to(device=device, dtype=dense_dtype(device)),
        rotate_values=shape.rotated or weights == "w8a8",  # spreads the outliers of `output`'s input too
        rotate_residual=weights == "w8a8",
        device=device,
    )
    return build_decoder(checkpoint.config, checkpoint.tensors(), how, progress)


class _LayerBuild:
    """One layer's tensors on their way."""

    def __init__(
        self, config: ModelConfig, how: Build, turn: Tensor | None, mask: np.ndarray, parts: dict[str, Tensor]
    ) -> None:
        self._config = config
        self._how = how
        self._turn = turn
        self._parts = parts
        self._order = torch.from_numpy(np.argsort(~mask, kind="stable")).to(how.device)  # retrieval heads first
        self._kept = int(mask.sum())
        self._group = config.num_heads // config.num_kv_heads
        self._rotation = kv4.rotation(config.head_dim).to(how.device)

    def layer(self) -> Layer:
        """The converted layer."""
        folded = self._turn is not None
        d = self._config.head_dim
        pairs = (
            torch.arange(d, device=self._how.device).view(2, d // 2).T.flatten()
        )  # channels i and i + d / 2 become neighbours

        def norm(name: str, order: Tensor | None = None) -> Tensor | None:
            weight = self._parts.get(f"{name}.weight")
            return None if weight is None else (weight if order is None else weight[order]).float()

        attention_norm, mlp_norm = norm("input_layernorm"), norm("post_attention_layernorm")
        q, k = (self._heads(f"self_attn.{name}_proj", pairs) for name in ("q", "k"))
        v = self._heads("self_attn.v_proj", None)
        gate, up = (self._get(f"mlp.{name}_proj") for name in ("gate", "up"))
        return Layer(
            self._reads(_join(q, k, v), attention_norm),
            self._writes(self._output()),
            self._reads(_join(gate, up), mlp_norm),
            self._writes(self._down()),
            None if folded else attention_norm,
            None if folded else mlp_norm,
            norm("self_attn.q_norm", pairs),
            norm("self_attn.k_norm", pairs),
            self._kept,
        )

    def _get(self, name: str) -> tuple[Tensor, Tensor | None]:
        return self._parts.pop(f"{name}.weight"), self._parts.pop(f"{name}.bias", None)

    def _down(self) -> tuple[Tensor, Tensor | None]:
        """The down projection, its input channels turned in blocks when the stream is turned."""
        weight, bias = self._get("mlp.down_proj")
        if self._turn is not None:
            turn = gated_turn(self._config.intermediate_size).to(weight.device)
            weight = (weight.float().unflatten(1, (-1, turn.shape[0])) @ turn).flatten(1)
        return weight, bias

    def _reads(self, part: tuple[Tensor, Tensor | None], norm: Tensor | None) -> Linear:
        """A layer that reads the normed residual stream: W diag(norm) R when the stream is turned by R."""
        weight, bias = part
        if self._turn is not None and norm is not None:
            weight = (weight.float() * norm) @ self._turn
        return self._how.make_linear(weight, bias)

    def _writes(self, part: tuple[Tensor, Tensor | None]) -> Linear:
        """A layer that adds to the residual stream: R^T W when the stream is turned by R."""
        weight, bias = part
        if self._turn is not None:
            weight = self._turn.T @ weight.float()
            bias = None if bias is None else self._turn.T @ bias.float()
        return self._how.make_linear(weight, bias)

    def _heads(self, name: str, pairs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """q, k or v with its KV heads in order; rotary pairs as neighbours, or values rotated."""
        weight, bias = self._get(name)

        def arrange(rows: Tensor) -> Tensor:
            heads = rows.unflatten(0, (len(self._order), -1, self._config.head_dim))[self._order]
            if pairs is not None:
                heads = heads[:, :, pairs]
            elif self._how.rotate_values:
                heads = self._rotation.T @ heads.float()
            return heads.flatten(0, 2)

        return arrange(weight), None if bias is None else arrange(bias[:, None])[:, 0]

    def _output(self) -> tuple[Tensor, Tensor | None]:
        """The output projection, its columns in the order of the heads, turned back for rotated values."""
        weight, bias = self._get("self_attn.o_proj")
        d = self._config.head_dim
        heads = weight.unflatten(1, (-1, self._group, d))[:, self._order]
        if self._how.rotate_values:
            heads = heads.float() @ self._rotation
        return heads.flatten(1), bias


def _join(*parts: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """Several layers with one input as one; all of them have a bias or none has."""
    biases = [bias for _, bias in parts if bias is not None]
    return torch.cat([weight for weight, _ in parts]), torch.cat(biases) if biases else None
