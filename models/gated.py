"""A decoder's forward pass for finding retrieval heads: any attention can be put in its place, and gradients flow.

The decoder itself writes in place and runs on kernels that have no backward; here the same weights are used by plain
torch operations. The tests hold both to the same hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from models.decoder import Decoder
from quant.w8a8 import Linear

_TILE = 256  # queries that share one stretch of keys in windowed attention

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Layer, q [heads, n, d], k and v [kv_heads, n, d] -> [heads, n, d]."""


def run_layers(decoder: Decoder, tokens: Tensor, attend: Attend) -> Tensor:
    """Final hidden states, normed, fp32 [n, hidden], of int64 tokens [n]; needs unquantised weights, heads unordered.

    Only each layer's input is kept for the backward pass; the rest is computed again.
    """
    table = decoder.rope.table(torch.arange(len(tokens)), decoder.device)
    x = decoder.look_up(tokens)
    return finish_layers(decoder, x, table, attend, 0)


def finish_layers(
    decoder: Decoder,
    x: Tensor,
    table: Tensor,
    attend: Attend,
    start: int,
    visit: Callable[[int, Tensor], None] | None = None,
) -> Tensor:
    """As `run_layers` from the input x [n, hidden] of layer `start` on; `visit` is shown every layer's input."""
    for index in range(start, len(decoder.layers)):
        if visit is not None:
            visit(index, x)
        if torch.is_grad_enabled():
            x = checkpoint(_layer, decoder, index, x, table, attend, use_reentrant=False)
        else:
            x = _layer(decoder, index, x, table, attend)
    return F.rms_norm(x, x.shape[-1:], decoder.norm, decoder.config.norm_eps)


def _layer(decoder: Decoder, index: int, x: Tensor, table: Tensor, attend: Attend) -> Tensor:
    config, layer = decoder.config, decoder.layers[index]
    heads = _linear(layer.qkv, _norm(x, layer.attention_norm, decoder)).unflatten(1, (-1, config.head_dim))
    q, k, v = heads.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), 1)
    q, k = (_rope(_norm(part, norm, decoder), table) for part, norm in ((q, layer.q_norm), (k, layer.k_norm)))
    attended = attend(index, *(part.transpose(0, 1) for part in (q, k, v)))
    x = x + _linear(layer.output, attended.transpose(0, 1).flatten(1).float())
    gate, up = _linear(layer.gate_up, _norm(x, layer.mlp_norm, decoder)).chunk(2, 1)
    return x + _linear(layer.down, F.silu(gate) * up)


def _linear(linear: Linear, x: Tensor) -> Tensor:
    return linear(linear.prepare(x))


def _norm(x: Tensor, weight: Tensor | None, decoder: Decoder) -> Tensor:
    return x if weight is None else F.rms_norm(x, x.shape[-1:], weight, decoder.config.norm_eps)


def _rope(x: Tensor, table: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * table[:, None]).flatten(-2)


def _dtype(device: torch.device) -> torch.dtype:
    """fp16 on a GPU: its rounding is an eighth of bf16's, and small effects of heads are compared here."""
    return torch.float16 if device.type == "cuda" else torch.float32


def full_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of q [heads, n, d] over k, v [kv_heads, n, d]; on a GPU in fp16."""
    q, k, v = (x.to(_dtype(q.device))[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0]


def windowed_attention(q: Tensor, k: Tensor, v: Tensor, sink: int, recent: int) -> Tensor:
    """As `full_attention`, but query i sees key j <= i only when j < sink or j > i - recent."""
    dtype = _dtype(q.device)
    (heads, n, d), kv_heads = q.shape, k.shape[0]
    sink, tile = min(sink, n), min(_TILE, n)
    tiles = -(-n // tile)
    before = min(-(-(recent - 1) // tile), tiles - 1)  # whole tiles of keys in front of a tile's own

    def stretches(x: Tensor) -> Tensor:
        """[tiles, kv_heads, sink + (before + 1) * tile, d]: the sinks, then all that a tile's queries can see."""
        x = x.to(dtype)
        blocks = F.pad(x, (0, 0, before * tile, tiles * tile - n)).unflatten(1, (-1, tile)).transpose(0, 1)
        sinks = x[:, :sink].expand(tiles, -1, -1, -1)
        return torch.cat((sinks, *(blocks[i : i + tiles] for i in range(before + 1))), 2)

    group = heads // kv_heads
    rows = F.pad(q.to(dtype), (0, 0, 0, tiles * tile - n)).view(kv_heads, group, tiles, tile, d)
    rows = rows.permute(2, 0, 1, 3, 4).reshape(tiles, kv_heads, group * tile, d)
    mask = _window_mask(tiles, tile, before, group, sink, recent, dtype, q.device)
    out = F.scaled_dot_product_attention(rows, stretches(k), stretches(v), attn_mask=mask)
    out = out.view(tiles, kv_heads, group, tile, d).permute(1, 2, 0, 3, 4)
    return out.reshape(heads, tiles * tile, d)[:, :n]


@lru_cache(maxsize=2)
def _window_mask(
    tiles: int, tile: int, before: int, group: int, sink: int, recent: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """[tiles, 1, group * tile, sink + (before + 1) * tile], 0 where seen, else -inf; the same for every layer."""
    at = torch.arange(tiles * tile, device=device).view(tiles, tile, 1)
    keys = torch.arange((before + 1) * tile, device=device) - before * tile
    keys = keys + torch.arange(tiles, device=device)[:, None, None] * tile
    seen = torch.cat((torch.arange(sink, device=device) <= at, (keys <= at) & (keys > at - recent) & (keys >= sink)), 2)
    width = seen.shape[2]
    aligned = -(-width // 8) * 8  # what the GPU's kernel wants of a mask's rows
    mask = torch.full((tiles, 1, group * tile, aligned), float("-inf"), dtype=dtype, device=device)
    mask[..., :width].masked_fill_(seen.repeat(1, group, 1)[:, None], 0)
    return mask[..., :width]


def gated(gates: Tensor, sink: int, recent: int) -> Attend:
    """Attention that blends by gates [layers, kv_heads]: 1 is full, 0 is sink and recent tokens only."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        gate = gates[layer].to(q.device).repeat_interleave(q.shape[0] // k.shape[0])[:, None, None]
        return gate * full_attention(q, k, v) + (1 - gate) * windowed_attention(q, k, v, sink, recent)

    return attend


def masked(mask: Tensor, sink: int, recent: int) -> Attend:
    """Attention where KV heads with `mask` [layers, kv_heads] true are full and the others are windowed."""
    kept = [tuple(row) for row in mask.tolist()]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        here = kept[layer]
        if all(here):
            return full_attention(q, k, v)
        if not any(here):
            return windowed_attention(q, k, v, sink, recent)
        rows, heads = _indices(here, q.shape[0] // k.shape[0], q.device)
        other_rows, others = _indices(tuple(not keep for keep in here), q.shape[0] // k.shape[0], q.device)
        full = full_attention(q[rows], k[heads], v[heads])
        out = full.new_empty(q.shape)
        out[rows] = full
        out[other_rows] = windowed_attention(q[other_rows], k[others], v[others], sink, recent)
        return out

    return attend


@cache
def _indices(chosen: tuple[bool, ...], group: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Query heads and KV heads of the chosen KV heads."""
    heads = torch.tensor(chosen).nonzero()[:, 0]
    rows = (heads[:, None] * group + torch.arange(group)).flatten()
    return rows.to(device), heads.to(device)
