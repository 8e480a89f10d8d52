"""One sequence's cache that never fills: every head keeps sinks and a recent window (StreamingLLM, Xiao et al., 2024).

Query i sees key j <= i when j < sink or j > i - recent; `recent` counts the query's own token. Positions are those
inside the cache: with s sinks and r recent tokens the query is never further out than s + r - 1, so a model stays
within what it was trained for. Only distances matter to rotary positions, and within the window the distance inside
the cache is the distance in the text. So keys keep the rotation of their place in the text for good, and only the
query is rotated a second time, to its place inside the cache, for the few sinks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.attention_prefill import ATTENTION, merge_
from kernels.attention_window import WINDOW_STEP
from kernels.norm_rope.ref import apply_rope
from models.cache.shape import CacheShape
from models.rope import EndlessRope

_TILE = 512  # queries that share one stretch of the window in prefill: long enough for full speed


class EndlessCache:
    """Keys and values [layers, kv_heads, sink + recent, d]: sinks in fixed slots, a ring behind them.

    Its memory is all there is from the first token on. A token is written once and never moved; the one that it
    replaces is `recent` older. `length` counts committed tokens, also those that are forgotten.
    """

    def __init__(self, shape: CacheShape, rope: EndlessRope, device: torch.device) -> None:
        self.shape = shape
        self.rope = rope
        self.device = device
        self.length = 0
        slots = shape.sink + shape.recent
        self.keys = torch.empty(
            len(shape.streaming_heads),
            shape.streaming_heads[0],
            slots,
            shape.head_dim,
            dtype=shape.exact_dtype,
            device=device,
        )
        self.values = torch.empty_like(self.keys)
        self._slots = slots
        self._scale = shape.head_dim**-0.5
        self._attend = ATTENTION.choose(device, head_dim=shape.head_dim, dtype=shape.compute_dtype).backend.run.attend
        self._step = WINDOW_STEP.choose(
            device, head_dim=shape.head_dim, group=shape.group, dtype=shape.exact_dtype
        ).backend.run.step
        self._clock = torch.zeros(2, dtype=torch.int64, device=device)  # slots that count, and the new token's
        self._chunk = 0
        self._back: Tensor | None = None

    @property
    def heads_dtype(self) -> torch.dtype:
        """dtype in which `attend` wants the chunk's heads."""
        return torch.float32

    def reserve(self, length: int) -> None:
        """Nothing to do: any length fits."""

    def begin(self, n: int) -> Tensor:
        """Makes ready for a chunk of n tokens behind `length`."""
        self._chunk = n
        # Queries behind a full cache; before that a token's place in the text is its place in the cache.
        first, end = max(self.length, self._slots), self.length + n
        self._back = None
        if self.shape.sink and first < end:
            self._back = self.rope.back(torch.arange(first, end) - (self._slots - 1), self.device)
        if n == 1:
            held = min(self.length + 1, self._slots)
            self._clock.copy_(torch.tensor([held, self._slot(self.length)]))
        return torch.arange(self.length, end)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Appends the chunk's k, v [n, kv_heads, d] of a layer and attends: q [n, heads, d] -> fp32 [n, heads * d].

        q and k are rotated by their positions in the text, by `rope`.
        """
        n = q.shape[0]
        keys, values = self.keys[layer], self.values[layer]
        if n == 1:
            grouped, near = (x.view(k.shape[1], -1, q.shape[-1]) for x in (q, self._near(q)))
            out = self._step(grouped, near, k[0], v[0], keys, values, self.shape.sink, self._clock, self._scale)
            return out.view(1, -1)
        k, v = (x.transpose(0, 1).to(self.shape.exact_dtype) for x in (k, v))
        filling = min(max(self._slots - self.length, 0), n)
        parts = []
        if filling:
            parts.append(self._fill(keys, values, q[:filling], k[:, :filling], v[:, :filling]))
        if filling < n:
            parts.append(self._slide(keys, values, q[filling:], k[:, filling:], v[:, filling:]))
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(n, -1)

    def commit(self) -> None:
        """Publishes the chunk: every layer has it now."""
        self.length += self._chunk
        self._chunk = 0

    def fork(self) -> EndlessCache:
        """An independent continuation from here, with windows of its own."""
        twin = EndlessCache(self.shape, self.rope, self.device)
        twin.keys.copy_(self.keys)
        twin.values.copy_(self.values)
        twin.length = self.length
        return twin

    def release(self) -> None:
        """Gives the memory back; the cache must not be used after it."""
        self.keys = self.values = self.keys.new_empty(0)
        self.length = 0

    @property
    def retrieval_bytes(self) -> int:
        """No head keeps everything."""
        return 0

    @property
    def streaming_bytes(self) -> int:
        """Bytes of the windows: the same from the first token on."""
        return self.keys.nbytes + self.values.nbytes

    def _fill(self, keys: Tensor, values: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The part of a chunk that still finds free slots: plain causal attention over all tokens so far."""
        start, end = self.length, self.length + q.shape[0]
        keys[:, start:end] = k
        values[:, start:end] = v
        dtype = self.shape.compute_dtype
        queries = q.transpose(0, 1)[None].to(dtype)
        seen_k, seen_v = (x[None, :, :end].to(dtype) for x in (keys, values))
        out, lse = self._attend(queries, seen_k[:, :, start:], seen_v[:, :, start:], scale=self._scale, causal=True)
        out = out.float()
        if start:
            merge_(out, lse, *self._attend(queries, seen_k[:, :, :start], seen_v[:, :, :start], scale=self._scale))
        return out[0].transpose(0, 1)

    def _slide(self, keys: Tensor, values: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The part of a chunk behind a full cache, in tiles of queries.

        A tile's queries all see the middle of their windows. At its new end a tile's own tokens are seen by the causal
        rule, at its old end by the same rule read backwards. So no call needs a mask.
        """
        sink, recent = self.shape.sink, self.shape.recent
        (m, heads, d), dtype = q.shape, self.shape.compute_dtype
        tile = max(1, min(_TILE, recent - 1, m))
        tiles = -(-m // tile)
        padding = tiles * tile - m
        oldest = (max(self.length, self._slots) - sink) % recent  # the ring's slot of the token that goes next
        run_k = _in_order(keys[:, sink:], oldest, k, padding, dtype)
        run_v = _in_order(values[:, sink:], oldest, v, padding, dtype)
        queries = F.pad(q, (0, 0, 0, 0, 0, padding)).view(tiles, tile, heads, d).transpose(1, 2).to(dtype)

        def stretch(offset: int, size: int) -> tuple[Tensor, Tensor]:
            """[tiles, kv_heads, size, d] of keys and values, each tile's `offset` behind its oldest key."""
            part = slice(offset, offset + (tiles - 1) * tile + size)
            spans = (run[:, part].unfold(1, size, tile).permute(1, 0, 3, 2) for run in (run_k, run_v))
            return next(spans), next(spans)

        out, lse = self._attend(queries, *stretch(recent - 1, tile), scale=self._scale, causal=True)
        out = out.float()
        if recent > 1:
            backwards = (x.flip(2) for x in (queries, *stretch(0, tile)))
            other, other_lse = self._attend(*backwards, scale=self._scale, causal=True)
            merge_(out, lse, other.flip(2), other_lse.flip(2))
        if recent - 1 > tile:
            merge_(out, lse, *self._attend(queries, *stretch(tile, recent - 1 - tile), scale=self._scale))
        out = out.transpose(1, 2).reshape(1, tiles * tile, heads, d)[:, :m].transpose(1, 2)
        if sink:
            lse = lse.transpose(1, 2).reshape(1, tiles * tile, heads)[:, :m].transpose(1, 2)
            near = self._near(q).transpose(0, 1)[None].to(dtype)
            sinks = (x[None, :, :sink].to(dtype) for x in (keys, values))
            merge_(out, lse, *self._attend(near, *sinks, scale=self._scale))
        self._replace(keys, values, k, v, oldest)
        return out[0].transpose(0, 1)

    def _near(self, q: Tensor) -> Tensor:
        """Queries [n, heads, d] as the sinks see them: at their places inside the cache."""
        if self._back is None:
            return q
        near = q.float().clone()
        apply_rope(near, self._back)
        return near

    def _slot(self, position: int) -> int:
        sink = self.shape.sink
        return position if position < sink else sink + (position - sink) % self.shape.recent

    def _replace(self, keys: Tensor, values: Tensor, k: Tensor, v: Tensor, oldest: int) -> None:
        """Writes a chunk's last tokens over the oldest of the ring, in at most two stretches."""
        sink, recent, m = self.shape.sink, self.shape.recent, k.shape[1]
        kept = min(m, recent)
        at = (oldest + m - kept) % recent
        first = min(kept, recent - at)
        for held, new in ((keys, k), (values, v)):
            held[:, sink + at : sink + at + first] = new[:, m - kept : m - kept + first]
            held[:, sink : sink + kept - first] = new[:, m - kept + first :]


def _in_order(ring: Tensor, oldest: int, new: Tensor, padding: int, dtype: torch.dtype) -> Tensor:
    """[heads, recent - 1 + n + padding, d]: the ring's tokens without the oldest, new [heads, n, d], zeros."""
    (heads, recent, d), n = ring.shape, new.shape[1]
    run = new.new_empty(heads, recent - 1 + n + padding, d, dtype=dtype)
    late = recent - 1 - oldest
    run[:, :late] = ring[:, oldest + 1 :]
    run[:, late : recent - 1] = ring[:, :oldest]
    run[:, recent - 1 : recent - 1 + n] = new
    run[:, recent - 1 + n :] = 0
    return run
