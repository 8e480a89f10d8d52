"""Reference-counted blocks of packed KV, shared by every sequence."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from models.cache.shape import CacheShape
from models.cache.store import HeadStore
from models.errors import PoolExhausted


class BlockPool:
    """All history of all retrieval heads, allocated once.

    A block is `shape.block` tokens over every retrieval head of every layer, under one id; `stores` hold them, one for
    each of `shape.parts`.
    """

    def __init__(self, shape: CacheShape, blocks: int, device: torch.device) -> None:
        self.shape = shape
        self.blocks = blocks
        self.device = device
        self.stores = tuple(HeadStore(part, blocks, device) for part in shape.parts)
        self._uses = np.zeros(blocks, dtype=np.int64)
        self._counting = threading.Lock()  # snapshots are written, and let go of, by a thread of their own

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return int((self._uses == 0).sum())

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Ids of `count` free blocks, in one run if there is one, right behind block `after` if possible.

        Raises PoolExhausted and takes nothing when there are too few.
        """
        with self._counting:
            free = self._uses == 0
            have = int(free.sum())
            if count > have:
                needed, left = (blocks * self.shape.block for blocks in (count, have))
                raise PoolExhausted(
                    f"This needs {needed:,} more tokens of cache; {left:,} are free. "
                    "Start a new chat or close one, or use a shorter document."
                )
            ids = self._pick(free, count, after)
            self._uses[ids] = 1
        return ids

    @staticmethod
    def _pick(free: np.ndarray, count: int, after: int | None) -> list[int]:
        if after is not None and after + count < len(free) and free[after + 1 : after + 1 + count].all():
            return list(range(after + 1, after + 1 + count))
        edges = np.flatnonzero(np.diff(np.concatenate(([0], free.view(np.int8), [0]))))
        starts, ends = edges[::2], edges[1::2]
        fitting = np.flatnonzero(ends - starts >= count)
        if len(fitting):
            # The longest run, not the tightest: the sequence will probably grow.
            best = fitting[np.argmax((ends - starts)[fitting])]
            return list(range(int(starts[best]), int(starts[best]) + count))
        return [int(i) for i in np.flatnonzero(free)[:count]]

    def retain(self, ids: Sequence[int]) -> None:
        """One more user of each block."""
        with self._counting:
            self._uses[list(ids)] += 1

    def release(self, ids: Sequence[int]) -> None:
        """One user of each block fewer; a block without users is free."""
        with self._counting:
            self._uses[list(ids)] -= 1
            assert (self._uses >= 0).all()

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all heads and layers."""
        return sum(stored.nbytes for stored, _ in self._stored()) // max(1, self.blocks)

    def dump(self, ids: Sequence[int]) -> Tensor:
        """Blocks as they are stored: uint8 [len(ids), block_bytes]."""
        index = torch.tensor(ids, device=self.device)
        rows = [stored.index_select(at, index).movedim(at, 0).flatten(1).contiguous() for stored, at in self._stored()]
        return torch.cat([row.view(torch.uint8).view(len(ids), -1) for row in rows], 1)

    def fill(self, ids: Sequence[int], rows: Tensor) -> None:
        """Puts back what `dump` gave: uint8 [len(ids), block_bytes] on the pool's device."""
        index, start = torch.tensor(ids, device=self.device), 0
        for stored, at in self._stored():
            width = stored.nbytes // self.blocks
            part = rows[:, start : start + width].contiguous().view(stored.dtype)
            shape = [len(ids), *(size for axis, size in enumerate(stored.shape) if axis != at)]
            stored.index_copy_(at, index, part.view(shape).movedim(0, at))
            start += width

    def _stored(self) -> list[tuple[Tensor, int]]:
        """Each kind of storage and its axis of blocks."""
        return [each for store in self.stores for each in store.stored()]
