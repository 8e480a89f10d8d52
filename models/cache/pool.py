"""Reference-counted blocks of packed KV, shared by every sequence."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from kernels.attention_decode import Packed
from kernels.attention_decode.ref import stretches
from kernels.kv4_pack import KV4_LAYOUT, fragment, native
from models.cache import history
from models.cache.shape import BLOCK, CacheShape
from models.errors import PoolExhausted
from quant import kv4


class BlockPool:
    """All history of all retrieval heads, allocated once.

    A block is BLOCK tokens over every retrieval head of every layer, under one id. Within a head, blocks with
    neighbouring ids lie next to each other, so a run of ids is one view.
    """

    def __init__(self, shape: CacheShape, blocks: int, device: torch.device) -> None:
        self.shape = shape
        self.blocks = blocks
        self.device = device
        self.layout = KV4_LAYOUT.choose(device, head_dim=shape.head_dim, group=shape.group).backend.run
        heads, d = sum(shape.retrieval_heads), shape.head_dim
        if shape.bits == 16:
            self._keys = torch.empty(heads, blocks, BLOCK, d, dtype=shape.exact_dtype, device=device)
            self._values = torch.empty_like(self._keys)
        else:
            width = d * shape.bits // 8
            panels = self.layout.value_panels(d) if shape.bits == 4 else 1
            self._keys = torch.empty(heads, blocks, BLOCK * width, dtype=torch.uint8, device=device)
            self._values = torch.empty(heads, panels, blocks, BLOCK * width // panels, dtype=torch.uint8, device=device)
            self._scales = torch.empty(heads, blocks, BLOCK, 4, dtype=torch.float16, device=device)
        self._uses = np.zeros(blocks, dtype=np.int64)
        self._counting = threading.Lock()  # snapshots are written, and let go of, by a thread of their own

    @cached_property
    def history(self) -> history.HistoryReader:
        """What reads chunks on a GPU."""
        return history.HistoryReader(self)

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
                raise PoolExhausted(
                    f"This needs {count * BLOCK:,} more tokens of cache; {have * BLOCK:,} are free. "
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

    def write(self, slots: slice, ids: Sequence[int], keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Stores whole blocks and returns them as later reads will see them, in the compute dtype.

        keys, values [heads, len(ids) * BLOCK, d] of the heads in `slots`; returns two tensors of that shape.
        """
        shape = self.shape
        index = torch.tensor(ids, device=self.device)
        if shape.bits == 16:
            self._keys[slots, index] = keys.unflatten(1, (-1, BLOCK))
            self._values[slots, index] = values.unflatten(1, (-1, BLOCK))
            return keys.to(shape.compute_dtype), values.to(shape.compute_dtype)
        k_codes, k_scales = kv4.quantize(keys, shape.bits)
        v_codes, v_scales = kv4.quantize(values, shape.bits)
        if shape.bits == 4:
            k_bytes, v_bytes = self.layout.pack_keys(k_codes), self.layout.pack_values(v_codes)
        else:
            k_bytes, v_bytes = k_codes.flatten(1), v_codes.flatten(1)[:, None]
        scales = torch.cat((k_scales, v_scales), -1)
        n = len(ids)
        self._keys[slots, index] = k_bytes.unflatten(1, (n, -1))
        self._values[slots].index_copy_(2, index, v_bytes.unflatten(2, (n, -1)))
        self._scales[slots, index] = scales.unflatten(1, (n, -1))
        return self._restore(k_codes, v_codes, scales)

    def store(self, slots: slice, ids: Tensor, keys: Tensor, values: Tensor) -> None:
        """As `write`, in one pass of C where `kernels.kv4_pack.native` serves; ids int32."""
        share = kv4.step_share(self.shape.head_dim, 4)
        native.write_blocks(keys, values, share, ids, self._keys[slots], self._values[slots], self._scales[slots])

    def _restore(self, k_codes: Tensor, v_codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        shape = self.shape
        k_step, k_middle, v_step, v_middle = scales.split(1, -1)
        return (
            kv4.dequantize(k_codes, k_step, k_middle, shape.bits, shape.compute_dtype),
            kv4.dequantize(v_codes, v_step, v_middle, shape.bits, shape.compute_dtype),
        )

    def read(self, slots: slice, ids: Sequence[int], most: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values [heads, tokens, d] in the compute dtype, run by run, at most `most` tokens at a time."""
        d = self.shape.head_dim
        for start, end in stretches(ids, most // BLOCK):
            if self.shape.bits == 16:
                keys, values = (x[slots, start:end].flatten(1, 2) for x in (self._keys, self._values))
                yield keys.to(self.shape.compute_dtype), values.to(self.shape.compute_dtype)
                continue
            packed = self._keys[slots, start:end].flatten(1), self._values[slots, :, start:end].flatten(2)
            if self.shape.bits == 4:
                k_codes, v_codes = self.layout.unpack_keys(packed[0], d), self.layout.unpack_values(packed[1], d)
            else:
                k_codes, v_codes = packed[0].unflatten(1, (-1, d)), packed[1][:, 0].unflatten(1, (-1, d))
            yield self._restore(k_codes, v_codes, self._scales[slots, start:end].flatten(1, 2))

    def write_exact(self, slots: slice, table: Tensor, keys: Tensor, values: Tensor) -> None:
        """Stores whole blocks of an unpacked pool [heads, blocks * BLOCK, d] without waiting for the device."""
        index = table.long()
        self._keys[slots].index_copy_(1, index, keys.unflatten(1, (-1, BLOCK)))
        self._values[slots].index_copy_(1, index, values.unflatten(1, (-1, BLOCK)))

    def packed(self, slots: slice, table: Tensor) -> Packed:
        """The blocks in `table` (int32, on the pool's device) as they are stored, for a decode kernel."""
        return Packed(self._keys[slots], self._values[slots], self._scales[slots], table)

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
        if self.shape.bits == 16:
            return [(self._keys, 1), (self._values, 1)]
        return [(self._keys, 1), (self._values, 2), (self._scales, 1)]

    def pack_full(self, keys: Tensor, values: Tensor, table: Tensor, full: Tensor) -> None:
        """Packs the newest block of a sequence's retrieval heads if it is full: keys, values [heads, 2 BLOCK, d].

        full: int32 [1] on the device, the block's place in `table`, below 0 for none.
        """
        if self.layout is fragment:
            packed = self._keys, self._values, self._scales
            share = kv4.step_share(self.shape.head_dim, self.shape.bits)
            fragment.pack_full((keys, values), packed, table, full, share)
        elif (place := int(full)) >= 0:
            self.write(slice(None), [int(table[place])], keys[:, BLOCK:], values[:, BLOCK:])
