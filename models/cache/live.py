"""The cache of the answer that is being written: its length lives on the device.

Nothing about a step depends on the host then, so that one captured graph serves every length and every sequence.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from kernels.attention_decode import KV4_STEP, Held
from models.cache.duo import DuoCache
from models.cache.pool import BlockPool
from models.cache.shape import CacheShape
from quant import kv4


class LiveCache:
    """Unpacked tokens and windows of one sequence at a time, in buffers that never move.

    Use: `take` a cache, then `begin(1)`, `attend` once a layer and `commit` for each token, and `give` it back. The
    host lists the blocks that a token will fill (`catch_up`) before its step; everything else is counted on the
    device.
    """

    def __init__(self, pool: BlockPool, watched: Iterable[tuple[int, int]] = ()) -> None:
        """watched: (layer, query head) whose newest query is kept, see `queries`."""
        self.pool = pool
        self.shape = pool.shape
        self.position = torch.zeros(1, dtype=torch.int64, device=pool.device)  # tokens in front of the next one
        self._exact = DuoCache(pool).exact()
        self._table = torch.zeros(max(pool.blocks, 1), dtype=torch.int32, device=pool.device)
        self._listed = 0
        chosen: dict[int, list[int]] = {}
        for layer, head in sorted(watched):
            chosen.setdefault(layer, []).append(head)
        self._watched = {layer: torch.tensor(heads, device=pool.device) for layer, heads in chosen.items()}
        self._queries = {
            layer: torch.zeros(len(heads), pool.shape.head_dim, device=pool.device) for layer, heads in chosen.items()
        }
        self._clock = clock_at(self.position, self.shape)
        self._step, *self._steps = (
            KV4_STEP.choose(pool.device, head_dim=width, group=self.shape.group).backend.run.step
            for width in (self.shape.head_dim, *(part.width for part in self.shape.parts))
        )

    @property
    def heads_dtype(self) -> torch.dtype:
        """dtype in which `attend` wants the token's heads."""
        return torch.float32

    def take(self, cache: DuoCache) -> None:
        """Continues behind what `cache` holds, which must not be used until `give`."""
        for own, theirs in zip(self._exact, cache.exact(), strict=True):
            own.copy_(theirs)
        self.position.fill_(cache.length)
        self._listed = 0
        self.catch_up(cache)

    def give(self, cache: DuoCache, length: int) -> None:
        """Gives the sequence back with `length` tokens: all of them, or all but the last one.

        The last one can be taken back, because the token that it pushed out of a window is in nobody's sight from
        its own place on.
        """
        for theirs, own in zip(cache.exact(), self._exact, strict=True):
            theirs.copy_(own)
        cache.length = length

    @staticmethod
    def serves(pool: BlockPool) -> bool:
        """Whether a step can be captured: a packed cache, on a GPU that the fused kernels serve."""
        shape = pool.shape
        if pool.device.type != "cuda" or shape.bits == 16:
            return False
        widths = {shape.head_dim, *(part.width for part in shape.parts)}
        chosen = [KV4_STEP.choose(pool.device, head_dim=width, group=shape.group) for width in widths]
        return all(choice.backend.name == "fragment" for choice in chosen)

    def catch_up(self, cache: DuoCache) -> None:
        """Tells the device the blocks of the sequence that it does not know yet; a few cost no wait for it."""
        ids = cache.reserved
        new = ids[self._listed :]
        if len(new) > 8:
            self._table[self._listed : len(ids)] = torch.tensor(new, dtype=torch.int32).to(self._table.device)
        else:
            for at, block in enumerate(new, self._listed):
                self._table[at : at + 1].fill_(block)
        self._listed = len(ids)

    def queries(self) -> dict[int, Tensor]:
        """The last token's queries of the watched heads by layer, as they are now: fp32 [1, heads, d]."""
        return {layer: rows[None].clone() for layer, rows in self._queries.items()}

    def begin(self, n: int) -> Tensor:
        """Makes ready for one token; its position, int64 [1] on the device."""
        assert n == 1
        self._clock = clock_at(self.position, self.shape)
        return self.position

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Appends k, v [1, kv_heads, d] of a layer and attends: q [1, heads, d] -> fp32 [1, heads * d]."""
        if layer in self._watched:
            torch.index_select(q[0], 0, self._watched[layer], out=self._queries[layer])
        *kept, window_keys, window_values = self._exact
        slots = self.shape.streaming_slots[layer]
        windows = window_keys[slots], window_values[slots]
        rows, k, v, outs = q[0].unflatten(0, (-1, self.shape.group)), k[0], v[0], []
        # Where there are 8-bit heads they have a launch of their own; windows share one with the 4-bit heads.
        for store, keys, values, step in zip(self.pool.stores, kept[::2], kept[1::2], self._steps, strict=True):
            slots = store.shape.retrieval_slots[layer]
            exact, packed = (keys[slots], values[slots]), store.packed(slots, self._table)
            if store.shape.bits < 8:
                break
            count, d = slots.stop - slots.start, self.shape.head_dim
            if count:
                none = (window_keys.new_empty(0, self.shape.sink + self.shape.recent, store.shape.width),) * 2
                new = kv4.widen_queries(rows[:count]), kv4.widen(k[:count]), kv4.widen(v[:count])
                out = step(*new, self._clock, Held(exact, packed, none), store.layout, store.shape.scale)
                outs.append(kv4.join(out))
            rows, k, v = rows[count:], k[count:], v[count:]
            exact, packed = (keys[:0, :, :d], values[:0, :, :d]), store.packed(slice(0, 0), self._table[:0])
        if len(rows):
            held = Held(exact, packed, windows)
            outs.append(self._step(rows, k, v, self._clock, held, store.layout, self.shape.head_dim**-0.5))
        return (torch.cat(outs) if len(outs) > 1 else outs[0]).reshape(1, -1)

    def commit(self) -> None:
        """Packs the newest block if the token filled it, in all layers at once; the next token is the first to see it
        packed."""
        if any(self.shape.retrieval_heads):
            for at, store in enumerate(self.pool.stores):
                keys, values = self._exact[2 * at : 2 * at + 2]
                store.pack_full(keys, values, self._table, self._clock[5:])
        self.position.add_(1)


def clock_at(position: Tensor, shape: CacheShape) -> Tensor:
    """The `Clock` of a token at `position` (int64 [1]), on its device: int32 [6]."""
    packed = ((position - shape.front) // shape.block).clamp_min(0)
    row = position - packed * shape.block
    window = torch.where(position < shape.sink, position, shape.sink + (position - shape.sink) % shape.recent)
    held = (position + 1).clamp_max(shape.sink + shape.recent)
    full = (row == shape.exact_tokens - 1) * (packed + 1) - 1
    return torch.cat((row + 1, packed, row, held, window, full)).to(torch.int32)
