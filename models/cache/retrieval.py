"""Retrieval heads: the whole history, packed, with the first tokens and the newest block kept as they are.

What a query sees depends on its position alone, never on how the prompt was cut into chunks: the first tokens and its
own block as they are, every block between them packed. So a chunked prefill equals an unchunked one, and a
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
from models.cache.store import HeadStore
from quant import kv4

_STEP = 512  # tokens: enough rows a product for full speed (measured: 512 tokens 700 GFLOP/s, 128 tokens 450)
TILE = 8192  # tokens of history unpacked at a time: scratch does not grow with the context


class RetrievalHeads:
    """One sequence's unpacked tokens [heads of all layers, exact_tokens, d] (first and newest), and attention."""

    def __init__(self, store: HeadStore) -> None:
        self.store = store
        shape = self.shape = store.shape
        heads = sum(shape.retrieval_heads)
        self.keys = torch.empty(heads, shape.exact_tokens, shape.width, dtype=shape.exact_dtype, device=store.device)
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

        ids: the sequence's blocks, in the order of their tokens.
        """
        shape, slots, n = self.shape, self.shape.retrieval_slots[layer], q.shape[0]
        wide = shape.bits == 8
        if wide:
            q, k, v = kv4.widen_queries(q), kv4.widen(k), kv4.widen(v)
        parts = []
        if n == 1:
            parts.append(self._one(slots, q, k, v, length, ids))
        else:
            many = self._many if self._blocks is None else self._many_in_c
            early = min(max(shape.front - length, 0), n)
            if early:
                parts.append(self._first(slots, q[:early], k[:early], v[:early], length))
            if early < n:
                parts.append(many(slots, q[early:], k[early:], v[early:], length + early, ids))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return kv4.join(out) if wide else out

    def attend_into(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, length: int, ids: Sequence[int], out: Tensor
    ) -> None:
        """As `attend`, for a chunk whose heads come in the cache's own dtype, into out [n, heads, d]; GPU only."""
        slots = self.shape.retrieval_slots[layer]
        n = q.shape[0]
        shape, start = self.shape, length < self.shape.front
        before = length if start else (length - shape.front) % shape.block
        narrow = out
        if shape.bits == 8:
            q, k, v = kv4.widen_queries(q), kv4.widen(k), kv4.widen(v)
            out = torch.empty_like(q)
        k, v = k.transpose(0, 1), v.transpose(0, 1)
        if before:
            held = slice(0, before) if start else slice(shape.front, shape.front + before)
            k = torch.cat((self.keys[slots, held], k), 1)
            v = torch.cat((self.values[slots, held], v), 1)
        front = None if start else (self.keys[slots, : shape.front], self.values[slots, : shape.front])
        blocks = shape.packed_blocks(length + n)
        table = self._listing(ids, blocks)
        self.store.history.attend(slots, q, (k, v), front, ids[:blocks], table, before, out)
        if out is not narrow:
            narrow.copy_(kv4.join(out))
        filled, inside = before + n, 0
        if start:
            inside = min(filled, shape.front)
            self.keys[slots, before:inside] = k[:, before:inside]
            self.values[slots, before:inside] = v[:, before:inside]
        self._keep(slots, k, v, (filled - inside) % shape.block)

    def _one(self, slots: slice, q: Tensor, k: Tensor, v: Tensor, length: int, ids: Sequence[int]) -> Tensor:
        """A single token: the first ones and its own block as they are, the rest packed."""
        shape = self.shape
        blocks = shape.packed_blocks(length)
        at = length - blocks * shape.block
        self.keys[slots, at] = k[0].to(shape.exact_dtype)
        self.values[slots, at] = v[0].to(shape.exact_dtype)
        exact_k, exact_v = self.keys[slots, : at + 1], self.values[slots, : at + 1]
        grouped = q.view(k.shape[1], -1, q.shape[-1])
        if shape.bits < 16:
            packed = self.store.packed(slots, self._listing(ids, blocks))
            out = self._decode(grouped, exact_k, exact_v, packed, self.store.layout, self._scale)
        else:
            rows = grouped[None].to(shape.compute_dtype)
            exact = (x[None].to(rows.dtype) for x in (exact_k, exact_v))
            out, lse = self._attend(rows, *exact, scale=self._scale)
            out = out.float()
            for keys, values in self.store.read(slots, ids[:blocks], TILE):
                merge_(out, lse, *self._attend(rows, keys[None], values[None], scale=self._scale))
        if at == shape.exact_tokens - 1:
            newest = (x[slots, shape.front :] for x in (self.keys, self.values))
            self.store.write(slots, ids[blocks : blocks + 1], *newest)
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

    def _first(self, slots: slice, q: Tensor, k: Tensor, v: Tensor, length: int) -> Tensor:
        """Tokens among the first `front`, which see all as it is."""
        n, heads, d = k.shape
        end, dtype = length + n, self.shape.compute_dtype
        self.keys[slots, length:end] = k.transpose(0, 1).to(self.shape.exact_dtype)
        self.values[slots, length:end] = v.transpose(0, 1).to(self.shape.exact_dtype)
        queries = q.view(n, heads, -1, d).permute(1, 2, 0, 3).to(dtype)
        seen = (_cast(x[slots, None, :end], dtype) for x in (self.keys, self.values))
        out, _ = self._attend(F.pad(queries, (0, 0, length, 0)), *seen, scale=self._scale, causal=True)
        return out[:, :, length:].permute(2, 0, 1, 3).flatten(1, 2).float()

    def _many_in_c(self, slots: slice, q: Tensor, k: Tensor, v: Tensor, length: int, ids: Sequence[int]) -> Tensor:
        """A chunk behind the first tokens, by a kernel that reads packed blocks itself: they are written first."""
        shape = self.shape
        full, before = divmod(length - shape.front, shape.block)
        held = slice(shape.front, shape.front + before)
        k, v = join_exact(k, v, self.keys[slots, held], self.values[slots, held])
        new, tail = divmod(before + q.shape[0], shape.block)
        table = self._listing(ids, full + new)
        if new:
            self.store.write_in_c(slots, table[full:], k[:, : new * shape.block], v[:, : new * shape.block])
        first = self.keys[slots, : shape.front], self.values[slots, : shape.front]
        packed = self.store.packed(slots, table)
        out: Tensor = self._blocks.attend(q, (k, v), first, packed, length - shape.front, self._scale)
        self._keep(slots, k, v, tail)
        return out

    def _many(self, slots: slice, q: Tensor, k: Tensor, v: Tensor, length: int, ids: Sequence[int]) -> Tensor:
        """A chunk behind the first tokens, laid out in whole blocks from the start of the one that it begins in."""
        shape, dtype, block = self.shape, self.shape.compute_dtype, self.shape.block
        n, heads, d = k.shape
        full, before = divmod(length - shape.front, block)
        held = slice(shape.front, shape.front + before)
        k = torch.cat((self.keys[slots, held], k.transpose(0, 1).to(shape.exact_dtype)), 1)
        v = torch.cat((self.values[slots, held], v.transpose(0, 1).to(shape.exact_dtype)), 1)
        filled = before + n
        blocks = -(-filled // block)
        new, tail = divmod(filled, block)
        # Zeros around the chunk: rows in front of it are not used, keys behind it are in nobody's past.
        own_k, own_v = (F.pad(_cast(x, dtype), (0, 0, 0, blocks * block - filled)) for x in (k, v))
        # Rows of one KV head lie together, block by block, so that any stretch of blocks is one product's queries.
        queries = q.new_empty(heads, blocks, shape.group, block, d, dtype=dtype)
        padded = F.pad(q, (0, 0, 0, 0, before, blocks * block - filled))
        queries.permute(1, 3, 0, 2, 4).copy_(padded.view(blocks, block, heads, shape.group, d))
        rows = shape.group * block

        diagonal, lse = self._attend(
            queries.flatten(0, 1),
            *(x.reshape(heads * blocks, 1, block, d) for x in (own_k, own_v)),
            scale=self._scale,
            causal=True,
        )
        out = diagonal.float().view(heads, blocks * rows, d)
        sums = _Sums(self._attend, self._scale, queries.view(heads, blocks * rows, d), out, lse.reshape(heads, -1))

        seen = _Scratch(heads, d, TILE + shape.front + blocks * block, own_k)
        seen.add(self.keys[slots, : shape.front], self.values[slots, : shape.front])
        for keys, values in self.store.read(slots, ids[:full], TILE):
            if seen.used + keys.shape[1] > TILE + shape.front:
                sums.add(0, blocks * rows, *seen.between(0, seen.used))
                seen.used = 0
            seen.add(keys, values)
        history = seen.used
        if new:  # the chunk's own complete blocks, as the queries behind them see them
            own = (x[:, : new * block] for x in (k, v))
            seen.add(*self.store.write(slots, ids[full : full + new], *own))
        # Queries in steps of _STEP tokens over all keys before the step, then block by block within the step.
        for step in range(0, blocks, _STEP // block):
            end = min(step + _STEP // block, blocks)
            if history + step:
                sums.add(step * rows, end * rows, *seen.between(0, history + step * block))
            for j in range(step + 1, end):
                sums.add(j * rows, (j + 1) * rows, *seen.between(history + step * block, history + j * block))

        self._keep(slots, k, v, tail)
        out = out.view(heads, blocks, shape.group, block, d).permute(1, 3, 0, 2, 4).reshape(blocks * block, -1, d)
        return out[before:filled]

    def _keep(self, slots: slice, k: Tensor, v: Tensor, tail: int) -> None:
        """Stores the last `tail` of a chunk's tokens [heads, n, d], which do not fill their block."""
        if tail:
            held = slice(self.shape.front, self.shape.front + tail)
            self.keys[slots, held], self.values[slots, held] = k[:, -tail:], v[:, -tail:]


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
