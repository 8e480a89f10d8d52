"""A chunk's attention of retrieval heads on a GPU: the history tile by tile, then the chunk's own blocks.

A tile of packed history is unpacked into one of two fixed buffers on a stream of its own while the library's kernel
attends to the tile before it; results are merged by log-sum-exp, and the kernel for the chunk's own blocks goes on from
their sum. The buffers' size does not depend on the context: fewer heads make longer tiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.attention_prefill import ROWS, chunk
from kernels.kv4_pack import fragment, fragment_rows
from models.cache.shape import CacheShape
from quant import kv4

if TYPE_CHECKING:
    from models.cache.store import HeadStore

# Tokens times heads of a tile. A merge costs as much as attention to 400 tokens, so 4 heads lose 0.6 % at this size.
TILE = 1 << 18

State = tuple[Tensor, Tensor]


def declines(shape: CacheShape, device: torch.device) -> str | None:
    """Why this way of reading a chunk cannot serve a cache, or None."""
    if device.type != "cuda":
        return f"CUDA only, not {device.type}"
    if reason := unfit(shape):
        return reason
    for width in _packed_widths(shape):
        reason = (
            fragment.declines(device, width, shape.group)
            or fragment_rows.declines(device, width)
            or chunk.declines(device, width, shape.compute_dtype)
        )
        if reason:
            return reason
    return chunk.declines(device, shape.head_dim, shape.compute_dtype)


def unfit(shape: CacheShape) -> str | None:
    """Why no GPU could read chunks of a cache in this way, or None."""
    if (shape.block, shape.front) != (chunk.BLOCK, chunk.BLOCK):
        return f"blocks of {shape.block} behind {shape.front} tokens, not of {chunk.BLOCK} behind as many"
    if shape.exact_dtype != shape.compute_dtype:
        return f"keys are kept in {shape.exact_dtype} and used in {shape.compute_dtype}"
    if shape.compute_dtype.itemsize != 2:
        return f"{shape.compute_dtype} is not fp16 or bf16"
    for width in _packed_widths(shape):
        if width not in fragment_rows.HEAD_DIMS or width not in chunk.HEAD_DIMS:
            return f"packed vectors of {width} channels"
        if shape.group > fragment.LARGEST_GROUP:
            return f"{shape.group} query heads share a KV head, more than {fragment.LARGEST_GROUP}"
    return None if shape.head_dim in chunk.HEAD_DIMS else f"head size {shape.head_dim}"


def _packed_widths(shape: CacheShape) -> set[int]:
    return {part.width for part in shape.parts if part.bits < 16}


def scratch_bytes(shape: CacheShape) -> int:
    """Bytes of the two buffers of each kind of heads."""
    channels = sum(part.width for part in shape.parts if part.bits < 16)
    return 2 * 2 * TILE * channels * shape.compute_dtype.itemsize


class HistoryReader:
    """Reads chunks for every sequence of a pool, one at a time; heads of 8 bits come widened."""

    def __init__(self, store: HeadStore) -> None:
        self.tile = TILE  # a smaller one takes more merging
        self._kept = store
        self._shape = store.shape
        self._scale = store.shape.scale
        traits = {"head_dim": store.shape.width, "dtype": store.shape.compute_dtype}
        self._rows = ROWS.choose(store.device, **traits).backend.run.attend

    @cached_property
    def _buffers(self) -> Tensor:
        """[2, keys and values, TILE * d]."""
        width = TILE * self._shape.width
        return torch.empty(2, 2, width, dtype=self._shape.compute_dtype, device=self._kept.device)

    @cached_property
    def _unpacking(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._kept.device)

    def attend(
        self,
        slots: slice,
        q: Tensor,
        own: State,
        first: State | None,
        ids: Sequence[int],
        table: Tensor,
        before: int,
        out: Tensor,
    ) -> None:
        """Attention of a chunk's queries q [n, heads, d] into out [n, heads, d]; stores its complete blocks.

        own: keys and values [kv_heads, before + n, d] from the start of the block that the chunk starts in; first: the
        sequence's first block, None when the chunk starts in it; ids: the blocks up to the chunk's last complete one,
        and table: the same on the device.
        """
        filled = own[0].shape[1]
        complete = filled // self._shape.block
        new = complete if first is not None else max(complete - 1, 0)
        older = len(ids) - new
        state = self._history(slots, q, ids[:older], table[:older]) if older else None
        past = self._store(slots, own, complete, new, table[older:])
        chunk.attend_chunk(q, own, past, first, state, before, self._scale, out)

    def _store(self, slots: slice, own: State, complete: int, new: int, table: Tensor) -> State:
        """Keeps the last `new` of `complete` blocks; all of them as later queries see them."""
        block = self._shape.block
        if self._shape.bits == 16:
            if new:
                span = slice((complete - new) * block, complete * block)
                self._kept.write_exact(slots, table, own[0][:, span], own[1][:, span])
            return own
        heads, _, d = own[0].shape
        past = own[0].new_empty(2, heads, max(complete, 1) * block, d)
        start = (complete - new) * block
        for kept, x in zip(past, own, strict=True):
            kept[:, : min(start, x.shape[1])] = x[:, :start]
        if new:
            span = slice(start, complete * block)
            packed, share = self._kept.packed(slots, table), kv4.step_share(self._shape.head_dim, self._shape.bits)
            pasts = past[0][:, start:], past[1][:, start:]
            fragment_rows.store(packed, own[0][:, span], own[1][:, span], share, *pasts, wide=self._shape.bits == 8)
        return past[0], past[1]

    def _history(self, slots: slice, q: Tensor, ids: Sequence[int], table: Tensor) -> State:
        """Attention to all blocks in `table`: output [n, heads, d] and log-sum-exp [n, heads]."""
        state: State | None = None
        merged = False
        for keys, values in self._tiles(slots, ids, table):
            part = self._rows(q, keys, values, scale=self._scale)
            if state is None:
                state = part
                continue
            sums = state if merged else (torch.empty_like(part[0], dtype=torch.float32), torch.empty_like(part[1]))
            state = chunk.merge(state, part, sums)
            merged = True
        assert state is not None
        return state

    def _tiles(self, slots: slice, ids: Sequence[int], table: Tensor) -> Iterator[State]:
        if self._shape.bits == 16:
            yield from self._kept.read(slots, ids, len(ids) * self._shape.block)
            return
        heads, d = slots.stop - slots.start, self._shape.width
        step = max(1, self.tile // heads // self._shape.block)
        working = torch.cuda.current_stream(self._kept.device)
        _ = self._buffers  # made on this stream, so before the other one waits for it
        self._unpacking.wait_stream(working)  # what was written before, and who still reads the buffers
        free: list[torch.cuda.Event | None] = [None, None]
        tiles = [table[i : i + step] for i in range(0, table.numel(), step)]
        ready = self._unpack(slots, tiles[0], 0, None)
        for number, tile in enumerate(tiles):
            side = number % 2
            following = None
            if number + 1 < len(tiles):
                following = self._unpack(slots, tiles[number + 1], 1 - side, free[1 - side])
            working.wait_event(ready)
            yield self._views(side, heads, tile.numel() * self._shape.block, d)
            free[side] = working.record_event()
            if following is not None:
                ready = following

    def _unpack(self, slots: slice, ids: Tensor, side: int, free: torch.cuda.Event | None) -> torch.cuda.Event:
        keys, values = self._views(side, slots.stop - slots.start, ids.numel() * self._shape.block, self._shape.width)
        with torch.cuda.stream(self._unpacking):
            if free is not None:
                self._unpacking.wait_event(free)
            fragment_rows.restore(self._kept.packed(slots, ids), keys, values)
            return self._unpacking.record_event()

    def _views(self, side: int, heads: int, tokens: int, d: int) -> State:
        keys, values = (x[: heads * tokens * d].view(heads, tokens, d) for x in self._buffers[side])
        return keys, values
