"""Streaming heads: attention sink and a recent window, exact for every query (Xiao et al., 2024, both papers).

Query i sees key j <= i when j < sink or j > i - recent: `recent` counts the query's own token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention_prefill import ATTENTION, WINDOW, chunk
from kernels.attention_window import WINDOW_DECODE
from kernels.kv4_pack.native import join_exact
from models.cache.shape import CacheShape

_TILE = 256  # queries a tile; 64 and 128 see fewer keys in vain and were no faster


@dataclass(frozen=True)
class Tile:
    """Some queries of a chunk and the keys that one of them sees at least."""

    queries: slice  # of the chunk
    sinks: int
    keys: slice  # of the previous window and the chunk behind it
    mask: Tensor  # [queries, sinks + keys], 0 or -inf


@dataclass(frozen=True)
class ChunkMasks:
    """What the layers of one chunk share: its tiles, and where old and new tokens lie."""

    previous: Tensor  # slots of the previous window's tokens, oldest first
    tiles: tuple[Tile, ...]  # none where the kernel knows the window itself
    new_sinks: int  # chunk tokens that are sinks
    kept: Tensor  # chunk indices that stay in the window
    kept_slots: Tensor


class StreamingHeads:
    """One sequence's windows [heads of all layers, sink + recent, d]: sinks in fixed slots, a ring behind them."""

    def __init__(self, shape: CacheShape, device: torch.device) -> None:
        self.shape = shape
        self.device = device
        heads = sum(shape.streaming_heads)
        self.keys = torch.empty(
            heads, shape.sink + shape.recent, shape.head_dim, dtype=shape.exact_dtype, device=device
        )
        self.values = torch.empty_like(self.keys)
        self._scale = shape.head_dim**-0.5
        traits = {"head_dim": shape.head_dim, "dtype": shape.compute_dtype}
        self._window = WINDOW.choose(device, **traits, exact=shape.exact_dtype).backend.run
        self._decode = WINDOW_DECODE.choose(device, head_dim=shape.head_dim, dtype=shape.exact_dtype).backend.run.decode
        self._attend = ATTENTION.choose(device, **traits).backend.run.attend

    def copy(self) -> StreamingHeads:
        """The same windows in buffers of their own."""
        twin = StreamingHeads(self.shape, self.device)
        twin.keys.copy_(self.keys)
        twin.values.copy_(self.values)
        return twin

    def _slots(self, positions: Tensor) -> Tensor:
        sink, recent = self.shape.sink, self.shape.recent
        return torch.where(positions < sink, positions, sink + (positions - sink) % recent)

    def plan(self, length: int, n: int, masked: bool = True) -> ChunkMasks:
        """Everything about a chunk of n tokens behind `length` that does not depend on the layer."""
        sink, total, device = self.shape.sink, length + n, self.device
        held = min(self.shape.recent - 1, max(length - sink, 0))
        kept = torch.arange(min(max(length, sink, total - self.shape.recent), total), total, device=device)
        masked = masked and self._window is None
        return ChunkMasks(
            self._slots(torch.arange(length - held, length, device=device)),
            tuple(
                self._tile(length, start, min(start + _TILE, n), held) for start in range(0, n if masked else 0, _TILE)
            ),
            max(0, min(sink, total) - length),
            kept - length,
            self._slots(kept),
        )

    def _tile(self, length: int, start: int, stop: int, held: int) -> Tile:
        """Queries `start` to `stop` of a chunk behind `length` tokens, of which the newest `held` are at hand."""
        sink, recent, device = self.shape.sink, self.shape.recent, self.device
        sinks, end = min(sink, length + stop), length + stop
        first = min(max(length - held, sink, length + start - recent + 1), end)
        queries = torch.arange(length + start, end, device=device)[:, None]
        keys = torch.arange(first, end, device=device)
        seen = ((keys <= queries) & (keys > queries - recent), torch.arange(sinks, device=device) <= queries)
        mask = torch.zeros(stop - start, sinks + end - first, dtype=self.shape.compute_dtype, device=device)
        mask.masked_fill_(~torch.cat((seen[1], seen[0]), -1), float("-inf"))
        return Tile(slice(start, stop), sinks, slice(first - length + held, end - length + held), mask)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, length: int, plan: ChunkMasks | None) -> Tensor:
        """Appends k, v [n, heads, d] behind `length` tokens and attends with q [n, heads * group, d]; fp32 as q.

        `plan` may be None for a single token.
        """
        slots = self.shape.streaming_slots[layer]
        if plan is not None and self._window is not None:
            return self._many_in_c(slots, q, k, v, length, plan)
        k, v = (x.transpose(0, 1).to(self.shape.exact_dtype) for x in (k, v))
        if plan is None:
            return self._one(slots, q, k, v, length)
        return self._many(slots, q, k, v, length, plan)

    def attend_into(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, length: int, plan: ChunkMasks, out: Tensor
    ) -> None:
        """As `attend`, for a chunk whose heads come in the cache's own dtype, into out [n, heads, d]; GPU only."""
        slots = self.shape.streaming_slots[layer]
        sink, recent = self.shape.sink, self.shape.recent
        held, runs = (self.keys[slots], self.values[slots]), []
        for kept, new in zip(held, (k.transpose(0, 1), v.transpose(0, 1)), strict=True):
            kept[:, length : length + plan.new_sinks] = new[:, : plan.new_sinks]
            runs.append(torch.cat((kept[:, plan.previous], new), 1))
            kept.index_copy_(1, plan.kept_slots, new[:, plan.kept])
        run_from = length - plan.previous.numel()
        chunk.attend_window(q, held, (runs[0], runs[1]), length, run_from, sink, recent, self._scale, out)

    def _one(self, slots: slice, q: Tensor, k: Tensor, v: Tensor, length: int) -> Tensor:
        sink, recent = self.shape.sink, self.shape.recent
        at = length if length < sink else sink + (length - sink) % recent
        self.keys[slots, at] = k[:, 0]
        self.values[slots, at] = v[:, 0]
        held = min(length + 1, sink + recent)
        grouped = q.view(k.shape[0], -1, q.shape[-1])
        out: Tensor = self._decode(grouped, grouped, self.keys[slots], self.values[slots], 0, held, self._scale)
        return out.view(1, -1, q.shape[-1])

    def _many_in_c(self, slots: slice, q: Tensor, k: Tensor, v: Tensor, length: int, plan: ChunkMasks) -> Tensor:
        """A chunk, by a kernel that knows the window."""
        kept = self.keys[slots], self.values[slots]
        run = join_exact(k, v, *(x[:, plan.previous] for x in kept))
        held, sinks = plan.previous.numel(), slice(length, length + plan.new_sinks)
        for old, new in zip(kept, run, strict=True):
            old[:, sinks] = new[:, held : held + plan.new_sinks]
        out: Tensor = self._window.attend_window(q, run, kept, self.shape.sink, self.shape.recent, length, self._scale)
        for old, new in zip(kept, run, strict=True):
            old.index_copy_(1, plan.kept_slots, new[:, held + plan.kept])
        return out

    def _many(self, slots: slice, q: Tensor, k: Tensor, v: Tensor, length: int, plan: ChunkMasks) -> Tensor:
        dtype, kept, runs = self.shape.compute_dtype, (self.keys[slots], self.values[slots]), []
        for held, new in zip(kept, (k, v), strict=True):
            held[:, length : length + plan.new_sinks] = new[:, : plan.new_sinks]
            runs.append(torch.cat((held[:, plan.previous], new), 1).to(dtype))
        queries, out = q.to(dtype).transpose(0, 1)[None], torch.empty_like(q, dtype=torch.float32)
        for tile in plan.tiles:
            keys, values = (
                torch.cat((held[:, : tile.sinks].to(dtype), run[:, tile.keys]), 1)[None]
                for held, run in zip(kept, runs, strict=True)
            )
            part, _ = self._attend(
                queries[:, :, tile.queries], keys, values, scale=self._scale, mask=tile.mask[None, None]
            )
            out[tile.queries] = part[0].transpose(0, 1)
        for held, new in zip(kept, (k, v), strict=True):
            held.index_copy_(1, plan.kept_slots, new[:, plan.kept])
        return out
