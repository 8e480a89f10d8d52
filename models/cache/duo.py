"""One sequence's KV cache: retrieval heads over the pool, streaming heads in windows (DuoAttention, 2024)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from models.cache import history
from models.cache.pool import BlockPool
from models.cache.retrieval import RetrievalHeads
from models.cache.streaming import ChunkMasks, StreamingHeads
from models.errors import PoolExhausted
from quant import kv4


class Watch(Protocol):
    """Is shown the queries of every layer."""

    def add(self, layer: int, q: Tensor) -> None:
        """q [n, heads, d] as the cache attends with them."""

    def add_chosen(self, rows: dict[int, Tensor]) -> None:
        """By layer, what it would have kept of them: [n, chosen heads, d]."""


class DuoCache:
    """Use: `reserve`, then for every chunk `begin`, `attend` once a layer, `commit`.

    `length` counts committed tokens only. A fork shares the packed blocks and copies the small unpacked rest; it is
    also the snapshot to go back to, since a token that left a window cannot be brought back.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.shape = pool.shape
        self.length = 0
        self._ids: list[int] = []
        self._retrieval = tuple(map(RetrievalHeads, pool.stores))
        self._streaming = StreamingHeads(pool.shape, pool.device)
        self._chunk = 0
        self._masks: ChunkMasks | None = None
        self.watch: Watch | None = None
        self._direct = history.declines(pool.shape, pool.device) is None

    @property
    def direct(self) -> bool:
        """Whether the chunk's heads are read as the cache keeps them, by kernels that know what each query sees."""
        return self._direct and self._chunk > 1

    @property
    def heads_dtype(self) -> torch.dtype:
        """dtype in which `attend` wants the chunk's heads."""
        return self.shape.exact_dtype if self.direct else torch.float32

    def reserve(self, length: int) -> None:
        """Takes the blocks that `length` tokens will need; raises PoolExhausted and takes none if they are too many."""
        missing = self.shape.packed_blocks(length) - len(self._ids) if any(self.shape.retrieval_heads) else 0
        if missing > 0:
            self._ids += self.pool.allocate(missing, self._ids[-1] if self._ids else None)

    @property
    def reserved(self) -> list[int]:
        """Ids of the blocks taken so far, those included that are not filled yet."""
        return self._ids

    def begin(self, n: int) -> Tensor:
        """Makes ready for a chunk of n tokens behind `length`; their positions."""
        self.reserve(self.length + n)
        self._chunk = n
        streams = n > 1 and any(self.shape.streaming_heads)
        self._masks = self._streaming.plan(self.length, n, not self.direct) if streams else None
        return torch.arange(self.length, self.length + n)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Appends the chunk's k, v [n, kv_heads, d] of a layer and attends: q [n, heads, d] -> [n, heads * d].

        fp32 comes in and goes out; a `direct` chunk is best given in `heads_dtype`, in which it goes out. Heads lie
        retrieval first, then streaming; q and k carry their positions already; retrieval heads are rotated.
        """
        n = q.shape[0]
        if self.watch is not None:
            self.watch.add(layer, q)
        if self.direct:
            return self._attend_direct(layer, q, k, v).view(n, -1)
        parts = []
        for heads, rows, kv_rows in self._kinds(layer):
            parts.append(heads.attend(layer, q[:, rows], k[:, kv_rows], v[:, kv_rows], self.length, self._ids))
        if self.shape.streaming_heads[layer]:
            kept = self.shape.retrieval_heads[layer]
            split = kept * self.shape.group
            parts.append(
                self._streaming.attend(layer, q[:, split:], k[:, kept:], v[:, kept:], self.length, self._masks)
            )
        return (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).reshape(n, -1)

    def _kinds(self, layer: int) -> Iterator[tuple[RetrievalHeads, slice, slice]]:
        """Each kind of retrieval heads that the layer has, with its query heads and its KV heads there."""
        start = 0
        for heads in self._retrieval:
            end = start + heads.shape.retrieval_heads[layer]
            if end > start:
                yield heads, slice(start * self.shape.group, end * self.shape.group), slice(start, end)
            start = end

    def keys(self, layer: int, head: int, most: int, block: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """(first token, keys [m, d]) of a retrieval head in order: of every committed token, or of one block's.

        Block 0 is the first `shape.front` tokens, the others follow in their order.

        Packed keys come at most `most` tokens at a time, in the compute dtype; the others as they are.
        """
        kept, rows = next((heads, rows) for heads, _, rows in self._kinds(layer) if rows.start <= head < rows.stop)
        slot = kept.shape.retrieval_slots[layer].start + head - rows.start
        for at, keys in self._stored_keys(kept, slot, most, block):
            yield at, kv4.join(keys) if kept.shape.bits == 8 else keys

    def _stored_keys(
        self, kept: RetrievalHeads, slot: int, most: int, block: int | None
    ) -> Iterator[tuple[int, Tensor]]:
        shape, packed = self.shape, self.shape.packed_blocks(self.length)
        if block in (None, 0):
            yield 0, kept.keys[slot, : min(shape.front, self.length)]
        first, last = (0, packed) if block is None else (max(block - 1, 0), min(block, packed))
        at = shape.front + first * shape.block
        for keys, _ in kept.store.read(slice(slot, slot + 1), self._ids[first:last], most):
            yield at, keys[0]
            at += keys.shape[1]
        newest = shape.front + packed * shape.block
        if newest < self.length and block in (None, packed + 1):
            yield newest, kept.keys[slot, shape.front : shape.front + self.length - newest]

    def _attend_direct(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.to(self.shape.exact_dtype) for x in (q, k, v))
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for heads, rows, kv_rows in self._kinds(layer):
            heads.attend_into(layer, q[:, rows], k[:, kv_rows], v[:, kv_rows], self.length, self._ids, out[:, rows])
        if self.shape.streaming_heads[layer]:
            kept = self.shape.retrieval_heads[layer]
            split = kept * self.shape.group
            assert self._masks is not None
            self._streaming.attend_into(
                layer, q[:, split:], k[:, kept:], v[:, kept:], self.length, self._masks, out[:, split:]
            )
        return out

    def commit(self) -> None:
        """Publishes the chunk: every layer has it now."""
        self.length += self._chunk
        self._chunk = 0

    def trim(self) -> None:
        """Gives back blocks that were reserved and not filled, where a prompt was not read to its end."""
        held = self.blocks
        self.pool.release(self._ids[len(held) :])
        self._ids = held

    def fork(self) -> DuoCache:
        """An independent continuation from here; packed blocks are shared, whole ones only."""
        twin = DuoCache(self.pool)
        twin.length = self.length
        twin._retrieval = tuple(heads.copy() for heads in self._retrieval)
        twin._streaming = self._streaming.copy()
        twin._ids = self.blocks
        self.pool.retain(twin._ids)  # last: where there is no memory for the copies nothing is held
        return twin

    @property
    def blocks(self) -> list[int]:
        """Ids of the packed blocks, which never change: the tokens behind the first `shape.front`."""
        return self._ids[: self.shape.packed_blocks(self.length)]

    def exact(self) -> list[Tensor]:
        """What is not packed, in buffers that change with every token: keys and values of each kind of heads."""
        kept = [x for heads in self._retrieval for x in (heads.keys, heads.values)]
        return [*kept, self._streaming.keys, self._streaming.values]

    @classmethod
    def empty(cls, pool: BlockPool, length: int, shared: Sequence[int] = ()) -> DuoCache:
        """A cache of `length` tokens whose first packed blocks are `shared`; the rest is for the caller to fill in.

        Raises PoolExhausted, and has taken nothing then.
        """
        cache = cls(pool)
        pool.retain(shared)
        cache._ids = list(shared)
        try:
            cache.reserve(length)
        except PoolExhausted:
            cache.release()
            raise
        cache.length = length
        return cache

    def release(self) -> None:
        """Gives the blocks back; the cache must not be used after it."""
        self.pool.release(self._ids)
        self._ids = []
        self.length = 0

    @property
    def retrieval_bytes(self) -> int:
        """Bytes of the retrieval heads' tokens, shared blocks counted here too."""
        return len(self._ids) * self.shape.block * self.shape.bytes_per_token + self.shape.exact_bytes

    @property
    def streaming_bytes(self) -> int:
        """Bytes of the streaming heads' windows."""
        return self.shape.window_bytes
