"""The packed history of one kind of retrieval heads: how they are stored, written and read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from kernels.attention_decode import Packed
from kernels.attention_decode.ref import stretches
from kernels.kv4_pack import KV4_LAYOUT, fragment, native
from models.cache import history
from models.cache.shape import CacheShape
from quant import kv4


class HeadStore:
    """Blocks of the heads of all layers. Vectors of 8-bit heads are two 4-bit halves, [.., 2 d] (quant/kv4.py).

    Within a head, blocks with neighbouring ids lie next to each other, so a run of ids is one view.
    """

    def __init__(self, shape: CacheShape, blocks: int, device: torch.device) -> None:
        """shape: of one kind of heads, see `CacheShape.parts`."""
        self.shape = shape
        self.blocks = blocks
        self.device = device
        self.layout = KV4_LAYOUT.choose(device, head_dim=shape.width, group=shape.group).backend.run
        heads, width, block = sum(shape.retrieval_heads), shape.width, shape.block
        if shape.bits == 16:
            self._keys = torch.empty(heads, blocks, block, width, dtype=shape.exact_dtype, device=device)
            self._values = torch.empty_like(self._keys)
        else:
            size, panels = block * width // 2, self.layout.value_panels(width)
            self._keys = torch.empty(heads, blocks, size, dtype=torch.uint8, device=device)
            self._values = torch.empty(heads, panels, blocks, size // panels, dtype=torch.uint8, device=device)
            self._scales = torch.empty(heads, blocks, block, 4, dtype=torch.float16, device=device)

    @cached_property
    def history(self) -> history.HistoryReader:
        """What reads chunks on a GPU."""
        return history.HistoryReader(self)

    def write(self, slots: slice, ids: Sequence[int] | Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Stores whole blocks and returns them as later reads will see them, in the compute dtype.

        keys, values [heads, len(ids) * block, width] of the heads in `slots`; returns two tensors of that shape.
        """
        shape = self.shape
        index = torch.as_tensor(ids, device=self.device).long()
        n = len(index)
        if shape.bits == 16:
            self._keys[slots, index] = keys.unflatten(1, (-1, self.shape.block))
            self._values[slots, index] = values.unflatten(1, (-1, self.shape.block))
            return keys.to(shape.compute_dtype), values.to(shape.compute_dtype)
        k_codes, k_scales = kv4.quantize(keys[..., -shape.head_dim :], shape.bits)
        v_codes, v_scales = kv4.quantize(values[..., -shape.head_dim :], shape.bits)
        k_bytes, v_bytes = self.layout.pack_keys(k_codes), self.layout.pack_values(v_codes)
        scales = torch.cat((k_scales, v_scales), -1)
        self._keys[slots, index] = k_bytes.unflatten(1, (n, -1))
        self._values[slots].index_copy_(2, index, v_bytes.unflatten(2, (n, -1)))
        self._scales[slots, index] = scales.unflatten(1, (n, -1))
        return self._restore(k_codes, v_codes, scales)

    def write_in_c(self, slots: slice, ids: Tensor, keys: Tensor, values: Tensor) -> None:
        """As `write`, in one pass of C where `kernels.kv4_pack.native` serves; ids int32."""
        shape = self.shape
        share = kv4.step_share(shape.head_dim, shape.bits)
        packed = self._keys[slots], self._values[slots], self._scales[slots]
        native.write_blocks(keys, values, shape.bits == 8, share, ids, *packed)

    def _restore(self, k_codes: Tensor, v_codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        k_step, k_middle, v_step, v_middle = scales.split(1, -1)
        return (
            kv4.dequantize(k_codes, k_step, k_middle, self.shape.compute_dtype),
            kv4.dequantize(v_codes, v_step, v_middle, self.shape.compute_dtype),
        )

    def read(self, slots: slice, ids: Sequence[int], most: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values [heads, tokens, width] in the compute dtype, run by run, at most `most` tokens at a time."""
        width = self.shape.width
        for start, end in stretches(ids, most // self.shape.block):
            if self.shape.bits == 16:
                keys, values = (x[slots, start:end].flatten(1, 2) for x in (self._keys, self._values))
                yield keys.to(self.shape.compute_dtype), values.to(self.shape.compute_dtype)
                continue
            k_codes = self.layout.unpack_keys(self._keys[slots, start:end].flatten(1), width)
            v_codes = self.layout.unpack_values(self._values[slots, :, start:end].flatten(2), width)
            yield self._restore(k_codes, v_codes, self._scales[slots, start:end].flatten(1, 2))

    def write_exact(self, slots: slice, table: Tensor, keys: Tensor, values: Tensor) -> None:
        """Stores whole blocks of an unpacked pool [heads, blocks * block, d] without waiting for the device."""
        index = table.long()
        self._keys[slots].index_copy_(1, index, keys.unflatten(1, (-1, self.shape.block)))
        self._values[slots].index_copy_(1, index, values.unflatten(1, (-1, self.shape.block)))

    def packed(self, slots: slice, table: Tensor) -> Packed:
        """The blocks in `table` (int32, on the pool's device) as they are stored, for a decode kernel."""
        return Packed(self._keys[slots], self._values[slots], self._scales[slots], table)

    def stored(self) -> list[tuple[Tensor, int]]:
        """Each kind of storage and its axis of blocks."""
        if self.shape.bits == 16:
            return [(self._keys, 1), (self._values, 1)]
        return [(self._keys, 1), (self._values, 2), (self._scales, 1)]

    def pack_full(self, keys: Tensor, values: Tensor, table: Tensor, full: Tensor) -> None:
        """Packs the newest block of a sequence's heads if it is full: keys, values [heads, exact_tokens, width].

        full: int32 [1] on the device, the block's place in `table`, below 0 for none.
        """
        shape = self.shape
        if self.layout is fragment:
            packed = self._keys, self._values, self._scales
            share = kv4.step_share(shape.head_dim, shape.bits)
            fragment.pack_full((keys, values), packed, table, full, share, shape.bits == 8)
        elif (place := int(full)) >= 0:
            self.write(slice(None), [int(table[place])], keys[:, shape.front :], values[:, shape.front :])
