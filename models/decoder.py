"""The model: dense decoders of the Llama, Mistral, Qwen2 and Qwen3 families."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.norm_rope import PLACE, rms_norm
from models.cache.sequence import StepCache
from models.config import ModelConfig
from models.rope import EndlessRope, Rope
from models.turn import gated_turn, narrow_turn
from models.upload import upload
from quant import kv4
from quant.formats import QuantizedWeight
from quant.w8a8 import Head, Linear, Rows


@dataclass
class Layer:
    """Weights of one block. Heads lie retrieval first, then streaming; rotary pairs are neighbours."""

    qkv: Linear
    output: Linear
    gate_up: Linear
    down: Linear
    attention_norm: Tensor | None  # None where the norm's weight is folded into the layer behind it
    mlp_norm: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    retrieval: int  # KV heads that keep everything
    key_centres: Tensor | None = None  # fp32 [retrieval, d]: taken off their keys where those are rotated


class Decoder:
    """A decoder with its weights: tokens in, hidden states and logits out. Batch size one; the cache holds the past.

    `turn` [hidden, hidden] is the rotation that the layers' weights expect of the residual stream, or None; with it,
    `down` expects its input turned by `gated_turn`.
    """

    def __init__(
        self,
        config: ModelConfig,
        embedding: Tensor | QuantizedWeight,
        layers: list[Layer],
        norm: Tensor,
        head: Head,
        turn: Tensor | None = None,
    ) -> None:
        self.config = config
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.head = head
        self.turn = turn
        self.device = embedding.device
        self.rope: Rope | EndlessRope = Rope(config.rope, config.head_dim, config.max_positions)
        self._rotation = kv4.rotation(config.head_dim).to(self.device)
        self._narrow_turn = None
        narrow = isinstance(embedding, Tensor) and embedding.dtype == torch.bfloat16 and narrow_turn(config.hidden_size)
        if turn is not None and turn.is_cuda and narrow:
            self._narrow_turn = turn.to(torch.bfloat16)
        self._gated_turn = None if turn is None else gated_turn(config.intermediate_size).to(self.device)
        self._heads = config.num_heads + 2 * config.num_kv_heads
        self._placing = PLACE.choose(self.device).backend.run
        # On a CPU a slice of rows stays in the cores' own caches through a whole block; a GPU wants them all.
        self._rows = 512 if self.device.type == "cpu" else 1 << 30

    @property
    def nbytes(self) -> int:
        """Bytes of all weights; what a tied head shares with the embedding counts once."""
        linear = sum(x.nbytes for layer in self.layers for x in (layer.qkv, layer.output, layer.gate_up, layer.down))
        # On a CPU the int8 product has its own arrangement of the codes.
        apart = isinstance(self.embedding, QuantizedWeight) and self.device.type == "cpu"
        shared = self.embedding.nbytes if self.config.tied_embeddings and not apart else 0
        turns = sum(turn.nbytes for turn in (self.turn, self._narrow_turn) if turn is not None)
        return linear + self.embedding.nbytes + self.head.nbytes - shared + turns

    @torch.inference_mode()
    def forward(self, tokens: Tensor, cache: StepCache) -> Tensor:
        """Reads int64 tokens [n] behind what the cache holds; gives the last block's output [n, hidden] in fp32.

        The cache then holds the tokens too. If this raises, the cache's newest tokens are undefined: release it.
        """
        n = tokens.shape[0]
        table = self.rope.table(cache.begin(n), self.device)
        x = self._embed(tokens)
        spans = [slice(i, min(i + self._rows, n)) for i in range(0, n, self._rows)]
        for index, layer in enumerate(self.layers):
            if len(spans) == 1:
                heads = layer.qkv(self._normed(layer, x), cache.heads_dtype).unflatten(1, (-1, self.config.head_dim))
                self._place(layer, heads, table, cache.shape.rotated)
            else:
                heads = torch.empty(n, self._heads, self.config.head_dim, device=self.device)
                for rows in spans:
                    layer.qkv.write_to(heads[rows].flatten(1), self._normed(layer, x[rows]))
                    self._place(layer, heads[rows], table[rows], cache.shape.rotated)
            q, k, v = heads.split((self.config.num_heads, self.config.num_kv_heads, self.config.num_kv_heads), 1)
            attended = cache.attend(index, q, k, v)
            del heads, q, k, v  # the feed-forward part is the widest: nothing else should lie beside it
            for rows in spans:
                layer.output.add_to(x[rows], layer.output.prepare(attended[rows]))
                self._mlp(layer, x[rows])
        cache.commit()
        return x

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [m, vocabulary] of hidden states [m, hidden]; ask for the rows that are needed only."""
        if self.turn is not None:
            hidden = hidden @ self.turn.T
        return self.head(self.head.prepare_normed(hidden, self.norm, self.config.norm_eps))

    def _embed(self, tokens: Tensor) -> Tensor:
        """The residual stream's start, fp32 [n, hidden]."""
        if self._narrow_turn is not None and isinstance(self.embedding, Tensor):
            x = F.embedding(upload(tokens, self.device), self.embedding)
            return torch.mm(x, self._narrow_turn, out_dtype=torch.float32)
        x = self.look_up(tokens)
        return x if self.turn is None else x @ self.turn

    def look_up(self, tokens: Tensor) -> Tensor:
        """The tokens' rows of the embedding, fp32 [n, hidden]."""
        index = upload(tokens, self.device)
        if isinstance(self.embedding, QuantizedWeight):
            return self.embedding.codes[index].float().mul_(self.embedding.scale[index, None])
        return F.embedding(index, self.embedding).float()

    def _normed(self, layer: Layer, x: Tensor) -> Rows:
        return layer.qkv.prepare_normed(x, layer.attention_norm, self.config.norm_eps)

    def _place(self, layer: Layer, heads: Tensor, table: Tensor, rotated: bool) -> None:
        """Positions for q and k of heads [n, heads + 2 kv_heads, d]; retrieval heads rotated and centred; in place."""
        config = self.config
        with_positions = config.num_heads + config.num_kv_heads
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = heads[:, : config.num_heads], heads[:, config.num_heads : with_positions]
            q.copy_(rms_norm(q.float(), layer.q_norm, config.norm_eps))
            k.copy_(rms_norm(k.float(), layer.k_norm, config.norm_eps))
        kept = layer.retrieval * (config.num_heads // config.num_kv_heads)
        # q and k lie next to each other: where every head is rotated they are one stretch
        turned = (
            ((0, with_positions),) if kept == config.num_heads else ((0, kept), (config.num_heads, layer.retrieval))
        )
        if not (rotated and kept):
            self._placing.place(heads, table, with_positions, (), self._rotation)
            return
        keys, centres = config.num_heads, layer.key_centres
        self._placing.place(heads, table, with_positions, turned, self._rotation, keys, centres)

    def _mlp(self, layer: Layer, x: Tensor) -> None:
        """x += down(silu(gate) * up), in place."""
        rows = layer.gate_up.prepare_normed(x, layer.mlp_norm, self.config.norm_eps)
        active = layer.gate_up.gated(rows)
        if active is not None:
            layer.down.add_to(x, layer.down.prepare_turned(active, self._gated_turn))
            return
        if layer.gate_up.bias is None:
            product, scale = layer.gate_up.raw(rows)
        else:
            product, scale = layer.gate_up(rows), None
        layer.down.add_to(x, layer.down.prepare_gated(product, scale, self._gated_turn))
