"""The only model definition: dense decoders of the Llama, Mistral, Qwen2 and Qwen3 families."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.norm_rope import apply_rope, rms_norm
from models.cache.duo import DuoCache
from models.config import ModelConfig
from models.errors import BadCheckpoint
from models.rope import Rope
from quant import kv4
from quant.w8a8 import Linear, Rows, add_product


@dataclass
class Layer:
    """Weights of one block. Heads lie retrieval first, then streaming; rotary pairs are neighbours."""

    qkv: Linear
    output: Linear
    gate_up: Linear
    down: Linear
    attention_norm: Tensor
    mlp_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    retrieval: int  # KV heads that keep everything


class Decoder:
    """A decoder with its weights: tokens in, hidden states and logits out. Batch size one; the cache holds the past."""

    def __init__(self, config: ModelConfig, embedding: Tensor, layers: list[Layer], norm: Tensor, head: Linear) -> None:
        self.config = config
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.head = head
        self.device = embedding.device
        self.rope = Rope(config.rope, config.head_dim, config.max_positions)
        self._rotation = kv4.rotation(config.head_dim).to(self.device)
        # On a CPU a slice of rows stays in the cores' own caches through a whole block; a GPU wants them all.
        self._rows = 512 if self.device.type == "cpu" else 1 << 30

    @property
    def nbytes(self) -> int:
        """Bytes of all weights; a tied head counts once."""
        linear = sum(x.nbytes for layer in self.layers for x in (layer.qkv, layer.output, layer.gate_up, layer.down))
        tied = 0 if self.config.tied_embeddings else self.head.nbytes
        return linear + self.embedding.nbytes + tied

    @torch.inference_mode()
    def forward(self, tokens: Tensor, cache: DuoCache) -> Tensor:
        """Reads int64 tokens [n] behind what the cache holds; gives the last block's output [n, hidden] in fp32.

        The cache then holds the tokens too. If this raises, the cache's newest tokens are undefined: release it.
        """
        n = tokens.shape[0]
        positions = torch.arange(cache.length, cache.length + n)
        table = self.rope.table(positions, self.device)
        cache.begin(n)
        x = F.embedding(tokens.to(self.device), self.embedding).float()
        spans = [slice(i, min(i + self._rows, n)) for i in range(0, n, self._rows)]
        for index, layer in enumerate(self.layers):
            heads = torch.cat([self._project(layer, x[rows], table[rows], cache.shape.rotated) for rows in spans])
            q, k, v = heads.split((self.config.num_heads, self.config.num_kv_heads, self.config.num_kv_heads), 1)
            attended = cache.attend(index, q, k, v)
            for rows in spans:
                add_product(x[rows], layer.output, layer.output.prepare(attended[rows]))
                self._mlp(layer, x[rows])
        cache.commit()
        return x

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [m, vocabulary] of hidden states [m, hidden]; ask for the rows that are needed only."""
        return self.head(self.head.prepare_normed(hidden, self.norm, self.config.norm_eps))

    def _project(self, layer: Layer, x: Tensor, table: Tensor, rotated: bool) -> Tensor:
        """q, k and v heads [n, heads + 2 kv_heads, d] with positions, retrieval heads of q and k rotated."""
        config = self.config
        product = layer.qkv(layer.qkv.prepare_normed(x, layer.attention_norm, config.norm_eps))
        heads = product.unflatten(1, (-1, config.head_dim))
        with_positions = config.num_heads + config.num_kv_heads
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = heads[:, : config.num_heads], heads[:, config.num_heads : with_positions]
            q.copy_(rms_norm(q, layer.q_norm, config.norm_eps))
            k.copy_(rms_norm(k, layer.k_norm, config.norm_eps))
        heads[:, :with_positions] = apply_rope(heads[:, :with_positions], table)
        if rotated and layer.retrieval:
            group = config.num_heads // config.num_kv_heads
            for start, count in ((0, layer.retrieval * group), (config.num_heads, layer.retrieval)):
                part = heads[:, start : start + count]
                part.copy_(part @ self._rotation)
        return heads

    def _mlp(self, layer: Layer, x: Tensor) -> None:
        """x += down(silu(gate) * up), in place. The up half's scale a token joins the next layer's input scale."""
        rows = layer.gate_up.prepare_normed(x, layer.mlp_norm, self.config.norm_eps)
        if layer.gate_up.bias is None:
            product, scale = layer.gate_up.raw(rows)
        else:
            product, scale = layer.gate_up(rows), None
        gate, up = product.chunk(2, 1)
        if scale is not None:
            gate.mul_(scale)
        active = layer.down.prepare(F.silu(gate, inplace=True).mul_(up))
        if scale is not None and active.scale is not None:
            active = Rows(active.values, active.scale * scale)
        add_product(x, layer.down, active)


def build_decoder(
    config: ModelConfig,
    tensors: Iterable[tuple[str, Tensor]],
    retrieval_mask: np.ndarray,
    *,
    make_linear: Callable[[Tensor, Tensor | None], Linear],
    make_head: Callable[[Tensor, Tensor | None], Linear],
    place: Callable[[Tensor], Tensor],
    rotate_values: bool,
    progress: Callable[[float], None] = lambda done: None,
) -> Decoder:
    """Builds a decoder from named float tensors, one at a time: each is laid out, converted and let go.

    retrieval_mask bool [layers, kv_heads]; `make_linear` turns a float weight [out, in] and bias into a layer,
    `make_head` the output head; `place` puts unquantised tensors in their dtype and device. `rotate_values` folds the
    rotation of the retrieval heads' values into their projections. Raises BadCheckpoint when tensors are missing.
    """
    builder = _Builder(config, retrieval_mask, make_linear, rotate_values)
    top: dict[str, Tensor] = {}
    expected = len(config.tensor_shapes())
    for count, (name, tensor) in enumerate(tensors):
        if name.startswith("model.layers."):
            _, _, index, rest = name.split(".", 3)
            builder.add(int(index), rest, tensor)
        else:
            top[name] = tensor
        progress((count + 1) / expected)
    missing = {"model.embed_tokens.weight", "model.norm.weight"} - top.keys()
    if missing or not builder.complete:
        raise BadCheckpoint(f"The checkpoint lacks tensors: {', '.join(sorted(missing) or builder.missing())}.")
    embedding = place(top["model.embed_tokens.weight"])
    head = make_head(embedding if config.tied_embeddings else place(top["lm_head.weight"]), None)
    return Decoder(config, embedding, builder.layers(), builder.norm(top["model.norm.weight"]), head)


_JOINED = {
    "self_attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj": ("self_attn.o_proj",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj": ("mlp.down_proj",),
}


class _Builder:
    """Collects a layer's tensors and makes each linear layer as soon as its parts are there."""

    def __init__(
        self,
        config: ModelConfig,
        mask: np.ndarray,
        make_linear: Callable[[Tensor, Tensor | None], Linear],
        rotate_values: bool,
    ) -> None:
        self._config = config
        self._mask = mask
        self._make = make_linear
        self._rotate = rotate_values
        self._parts: list[dict[str, Tensor]] = [{} for _ in range(config.num_layers)]
        self._linear: list[dict[str, Linear]] = [{} for _ in range(config.num_layers)]
        self._device: torch.device | None = None

    @property
    def complete(self) -> bool:
        return not self.missing()

    def missing(self) -> list[str]:
        """Names of joined layers that are not there."""
        return [f"layer {i}: {name}" for i, have in enumerate(self._linear) for name in _JOINED if name not in have]

    def add(self, layer: int, name: str, tensor: Tensor) -> None:
        parts = self._parts[layer]
        parts[name] = self._arrange(layer, name, tensor)
        joined = next((j for j, names in _JOINED.items() if name.rsplit(".", 1)[0] in names), None)
        if joined is None:
            return
        config = self._config
        biased = {"self_attn.qkv": config.qkv_bias, "self_attn.o_proj": config.o_bias}.get(joined, config.mlp_bias)
        names = [f"{part}.{kind}" for kind in ("weight", "bias")[: 1 + biased] for part in _JOINED[joined]]
        if all(n in parts for n in names):
            values = [parts.pop(n) for n in names]
            half = len(_JOINED[joined])
            weight = torch.cat(values[:half]) if half > 1 else values[0]
            bias = torch.cat(values[half:]) if biased else None
            self._linear[layer][joined] = self._make(weight, bias)

    def norm(self, tensor: Tensor) -> Tensor:
        """A norm's weight, in fp32 beside the layers."""
        return tensor.float().to(self._device or "cpu")

    def layers(self) -> list[Layer]:
        return [self._layer(i) for i in range(self._config.num_layers)]

    def _layer(self, i: int) -> Layer:
        linear, parts = self._linear[i], self._parts[i]

        def norm(name: str) -> Tensor | None:
            return self.norm(parts[f"{name}.weight"]) if f"{name}.weight" in parts else None

        first, second = norm("input_layernorm"), norm("post_attention_layernorm")
        q_norm, k_norm = norm("self_attn.q_norm"), norm("self_attn.k_norm")
        if first is None or second is None or (self._config.qk_norm and (q_norm is None or k_norm is None)):
            raise BadCheckpoint(f"The checkpoint lacks a norm of layer {i}.")
        return Layer(
            linear["self_attn.qkv"],
            linear["self_attn.o_proj"],
            linear["mlp.gate_up"],
            linear["mlp.down_proj"],
            first,
            second,
            q_norm,
            k_norm,
            int(self._mask[i].sum()),
        )

    def _arrange(self, layer: int, name: str, tensor: Tensor) -> Tensor:
        """Heads retrieval first; rotary pairs as neighbours; values of retrieval heads rotated."""
        part, kind = name.removeprefix("self_attn.").split(".", 1) if "." in name else (name, "")
        d, group = self._config.head_dim, self._config.num_heads // self._config.num_kv_heads
        if part in ("q_norm", "k_norm"):
            return tensor[_pairs(d)]
        if part not in ("q_proj", "k_proj", "v_proj", "o_proj") or (part == "o_proj" and kind == "bias"):
            return tensor
        order = torch.from_numpy(np.argsort(~self._mask[layer], kind="stable"))
        kept = int(self._mask[layer].sum()) if self._rotate else 0
        if part == "o_proj":
            heads = tensor.unflatten(1, (-1, group, d))[:, order]
            if kept:
                heads = heads.float()
                heads[:, :kept] = heads[:, :kept] @ kv4.rotation(d).to(heads.device)
            return heads.flatten(1)
        rows = tensor[:, None] if tensor.dim() == 1 else tensor
        heads = rows.unflatten(0, (len(order), -1, d))[order]  # [kv_heads, group or 1, d, in]
        if part != "v_proj":
            heads = heads[:, :, _pairs(d)]
        elif kept:
            heads = heads.float()
            heads[:kept] = kv4.rotation(d).to(heads.device).T @ heads[:kept]
        return heads.flatten(0, 2).reshape(-1, *tensor.shape[1:])


def _pairs(d: int) -> Tensor:
    """Index that makes channels i and i + d / 2 neighbours."""
    return torch.arange(d).view(2, d // 2).T.flatten()
