"""Retrieval heads: the whole history, packed, with the first and the newest block kept as they are.

What a query sees depends on its position alone, never on how the prompt was cut into chunks: its own block and the
first one as they are, every block between them packed. So a chunked prefill equals an unchunked one, and a
continuation equals a fresh run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.attention_decode import KV4_DECODE
from kernels.attention_prefill import ATTENTION, BLOCKS, merge_
from kernels.kv4_pack.native import join_exact
from models.cache.shape import BLOCK
from models.cache.store import HeadStore
from quant import kv4

_STEP = 4  # blocks: enough rows a product for full speed (measured: 512 tokens 700 GFLOP/s, 128 tokens 450)
TILE = 8192  # tokens of history unpacked at a time: scratch does not grow with the context


class RetrievalHeads:
    """One sequence's unpacked tokens [heads of all layers, 2 BLOCK, d] (first block, newest one) and its attention."""

    def __init__(self, store: HeadStore) -> None:
        self.store = store
        shape = self.shape = store.shape
        heads = sum(shape.retrieval_heads)
        self.keys = torch.empty(heads, 2 * BLOCK, shape.width, dtype=shape.exact_dtype, device=store.device)
        self.values = torch.empty_like(self.keys)
        self._table = torch.empty(store.blocks, dtype=torch.int32, device=store.device)
        self._listed = 0
        self._scale = shape.scale
        traits = {"head_dim": shape.width, "dtype": shape.compute_dtype}
        self._attend = ATTENTION.choose(store.device, **traits).backend.run.attend
        self._blocks = BLOCKS.choose(store.device, **traits, packed=shape.bits < 16).backend.run
        self._decode = KV4_DECODE.choose(store.device, head_dim=shape.width, group=shape.group).backend.run.decode

    def copy(self) -> RetrievalHeads:
        """The same tokens in buffers of their own."""
        twin = RetrievalHeads(self.store)
        twin.keys.copy_(self.keys)
        twin.values.copy_(self.values)
        return twin

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, length: int, ids: Sequence[int]) -> Tensor:
        """Appends k, v [n, heads, d] behind `length` tokens and attends with q [n, heads * group, d]; fp32 as q.

        ids: the sequence's blocks, the first of which holds tokens BLOCK .. 2 BLOCK - 1.
        """
        slots = self.shape.retrieval_slots[layer]
        wide = self.shape.bits == 8
        if wide:
            q, k, v = kv4.widen_queries(q), kv4.widen(k), kv4.widen(v)
        if q.shape[0] > 1 and self._blocks is not None:
            out = self._many_in_c(slots, q, k, v, length, ids)
        else:
            k, v = (x.transpose(0, 1).to(self.shape.exact_dtype) for x in (k, v))
            out = (self._one if q.shape[0] == 1 else self._many)(slots, q, k, v, length, ids)
        return kv4.join(out) if wide else out

    def attend_into(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, length: int, ids: Sequence[int], out: Tensor
    ) -> None:
        """As `attend`, for a chunk whose heads come in the cache's own dtype, into out [n, heads, d]; GPU only."""
        slots = self.shape.retrieval_slots[layer]
        n = q.shape[0]
        first, before = divmod(length, BLOCK)
        narrow = out
        if self.shape.bits == 8:
            q, k, v = kv4.widen_queries(q), kv4.widen(k), kv4.widen(v)
            out = torch.empty_like(q)
        k, v = k.transpose(0, 1), v.transpose(0, 1)
        if before:
            own_at = BLOCK if first else 0
            k = torch.cat((self.keys[slots, own_at : own_at + before], k), 1)
            v = torch.cat((self.values[slots, own_at : own_at + before], v), 1)
        front = (self.keys[slots, :BLOCK], self.values[slots, :BLOCK]) if first else None
        blocks = max((length + n) // BLOCK - 1, 0)
        table = self._listing(ids, blocks)
        self.store.history.attend(slots, q, (k, v), front, ids[:blocks], table, before, out)
        if out is not narrow:
            narrow.copy_(kv4.join(out))
        self._keep(slots, k, v, first, before, n)

    def _one(self, slots: slice, q: Tensor, k: Tensor, v: Tensor, length: int, ids: Sequence[int]) -> Tensor:
        """A single token: its own block and the first as they are, the rest packed."""
        block, within = divmod(length, BLOCK)
        at = within + (BLOCK if block else 0)
        self.keys[slots, at] = k[:, 0]
        self.values[slots, at] = v[:, 0]
        exact_k, exact_v = self.keys[slots, : at + 1], self.values[slots, : at + 1]
        blocks = max(block - 1, 0)
        grouped = q.view(k.shape[0], -1, q.shape[-1])
        if self.shape.bits < 16:
            packed = self.store.packed(slots, self._listing(ids, blocks))
            out = self._decode(grouped, exact_k, exact_v, packed, self.store.layout, self._scale)
        else:
            rows = grouped[None].to(self.shape.compute_dtype)
            exact = (x[None].to(rows.dtype) for x in (exact_k, exact_v))
            out, lse = self._attend(rows, *exact, scale=self._scale)
            out = out.float()
            for keys, values in self.store.read(slots, ids[:blocks], TILE):
                merge_(out, lse, *self._attend(rows, keys[None], values[None], scale=self._scale))
        if within == BLOCK - 1 and block:
            self.store.write(slots, ids[block - 1 : block], self.keys[slots, BLOCK:], self.values[slots, BLOCK:])
        return out.reshape(1, -1, q.shape[-1])

    def _listing(self, ids: Sequence[int], blocks: int) -> Tensor:
        """The first `blocks` ids on the device; a sequence's ids only grow, so each is copied once."""
        if blocks > self._listed:
            # Pinned, so that the copy does not wait for the device: the next chunk is made ready behind this one.
            pinned = self._table.is_cuda
            new = torch.tensor(ids[self._listed : blocks], dtype=torch.int32, pin_memory=pinned)
            self._table[self._listed : blocks].copy_(new, non_blocking=pinned)
            self._listed = blocks
        return self._table[:blocks]

    def _many_in_c(self, slots: slice, q: Tensor, k: Tensor, v: Tensor, length: int, ids: Sequence[int]) -> Tensor:
        """A chunk, by a kernel that reads packed blocks itself: they are written first."""
        first, before = divmod(length, BLOCK)
        held = slice(BLOCK, BLOCK + before) if first else slice(0, before)
        k, v = join_exact(k, v, self.keys[slots, held], self.values[slots, held])
        filled = before + q.shape[0]
        table = self._listing(ids, max(first + -(-filled // BLOCK) - 2, 0))
        start = 0 if first else BLOCK
        whole = slice(start, filled // BLOCK * BLOCK)
        if whole.stop > start:
            at = max(first - 1, 0)
            new = torch.tensor(ids[at : at + (whole.stop - start) // BLOCK], dtype=torch.int32)
            self.store.store(slots, new, k[:, whole], v[:, whole])
        opening = (self.keys[slots, :BLOCK], self.values[slots, :BLOCK]) if first else (k[:, :BLOCK], v[:, :BLOCK])
        out: Tensor = self._blocks.attend(q, (k, v), opening, self.store.packed(slots, table), length, self._scale)
        self._keep(slots, k, v, first, before, q.shape[0])
        return out

    def _many(self, slots: slice, q: Tensor, k: Tensor, v: Tensor, length: int, ids: Sequence[int]) -> Tensor:
        """A chunk, laid out in whole blocks from the start of the block that its first token falls in."""
        shape, dtype = self.shape, self.shape.compute_dtype
        (n, _, d), heads = q.shape, k.shape[0]
        first, before = divmod(length, BLOCK)
        own_at = BLOCK if first else 0
        k = torch.cat((self.keys[slots, own_at : own_at + before], k), 1)
        v = torch.cat((self.values[slots, own_at : own_at + before], v), 1)
        filled = before + n
        blocks = -(-filled // BLOCK)
        complete = filled // BLOCK
        # Zeros around the chunk: rows in front of it are not used, keys behind it are in nobody's past.
        own_k, own_v = (F.pad(_cast(x, dtype), (0, 0, 0, blocks * BLOCK - filled)) for x in (k, v))
        # Rows of one KV head lie together, block by block, so that any stretch of blocks is one product's queries.
        queries = q.new_empty(heads, blocks, shape.group, BLOCK, d, dtype=dtype)
        padded = F.pad(q, (0, 0, 0, 0, before, blocks * BLOCK - filled))
        queries.permute(1, 3, 0, 2, 4).copy_(padded.view(blocks, BLOCK, heads, shape.group, d))
        rows = shape.group * BLOCK

        diagonal, lse = self._attend(
            queries.flatten(0, 1),
            *(x.reshape(heads * blocks, 1, BLOCK, d) for x in (own_k, own_v)),
            scale=self._scale,
            causal=True,
        )
        out = diagonal.float().view(heads, blocks * rows, d)
        sums = _Sums(self._attend, self._scale, queries.view(heads, blocks * rows, d), out, lse.reshape(heads, -1))

        seen = _Scratch(heads, d, TILE + (blocks + 1) * BLOCK, own_k)
        if first:
            seen.add(self.keys[slots, :BLOCK], self.values[slots, :BLOCK])
            for keys, values in self.store.read(slots, ids[: first - 1], TILE):
                if seen.used + keys.shape[1] > TILE + BLOCK:
                    sums.add(0, blocks * rows, *seen.between(0, seen.used))
                    seen.used = 0
                seen.add(keys, values)
        history = seen.used
        # The chunk's own complete blocks, as the queries behind them see them.
        start = 0 if first else BLOCK
        if not first:
            seen.add(own_k[:, :BLOCK], own_v[:, :BLOCK])
        if complete * BLOCK > start:
            at = first - 1 if first else 0
            past = (x[:, start : complete * BLOCK] for x in (k, v))
            seen.add(*self.store.write(slots, ids[at : at + complete - start // BLOCK], *past))
        # Queries in steps of _STEP blocks over all keys before the step, then block by block within the step.
        for step in range(0, blocks, _STEP):
            end = min(step + _STEP, blocks)
            if history + step:
                sums.add(step * rows, end * rows, *seen.between(0, history + step * BLOCK))
            for j in range(step + 1, end):
                sums.add(j * rows, (j + 1) * rows, *seen.between(history + step * BLOCK, history + j * BLOCK))

        self._keep(slots, k, v, first, before, n)
        out = out.view(heads, blocks, shape.group, BLOCK, d).permute(1, 3, 0, 2, 4).reshape(blocks * BLOCK, -1, d)
        return out[before:filled]

    def _keep(self, slots: slice, k: Tensor, v: Tensor, first: int, before: int, n: int) -> None:
        """Stores what stays unpacked: the chunk's part of the first block and the last, unfinished one."""
        filled = before + n
        if not first:
            end = min(filled, BLOCK)
            self.keys[slots, before:end] = k[:, before:end]
            self.values[slots, before:end] = v[:, before:end]
        tail = filled % BLOCK
        if tail and (first or filled > BLOCK):
            self.keys[slots, BLOCK : BLOCK + tail] = k[:, filled - tail :]
            self.values[slots, BLOCK : BLOCK + tail] = v[:, filled - tail :]


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in `dtype`; a CPU goes from fp16 to bf16 six times faster by way of fp32."""
    return x.float().to(dtype) if x.device.type == "cpu" else x.to(dtype)


class _Scratch:
    """Keys and values [heads, capacity, d] that the chunk's queries see, filled from the front."""

    def __init__(self, heads: int, d: int, capacity: int, like: Tensor) -> None:
        self._keys, self._values = like.new_empty(2, heads, capacity, d)
        self.used = 0

    def add(self, keys: Tensor, values: Tensor) -> None:
        end = self.used + keys.shape[1]
        self._keys[:, self.used : end] = keys
        self._values[:, self.used : end] = values
        self.used = end

    def between(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        return self._keys[:, start:end], self._values[:, start:end]


class _Sums:
    """Attention of queries [heads, rows, d] over keys that come piece by piece; out and lse are updated in place."""

    def __init__(self, attend: Callable[..., tuple[Tensor, Tensor]], scale: float, *tensors: Tensor) -> None:
        self._attend = attend
        self._scale = scale
        self._queries, self._out, self._lse = tensors

    def add(self, start: int, end: int, keys: Tensor, values: Tensor) -> None:
        """Rows start..end - 1 also see keys, values [heads, m, d]."""
        other, other_lse = self._attend(self._queries[None, :, start:end], keys[None], values[None], scale=self._scale)
        merge_(self._out[:, start:end], self._lse[:, start:end], other[0], other_lse[0])
