"""Decode attention over packed blocks, by unpacking them: the truth for the fast kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packed:
    """The history of one layer's retrieval heads as the pool holds it: views of the pool, and which blocks to read.

    keys: bytes [heads, blocks, n]; values: bytes [heads, panels, blocks, m]; scales: fp16 [heads, blocks, tokens, 4]
    with the step and the middle of the key, then of the value: x = (code - 8) * step + middle. table: int32 [count],
    the blocks of the history in order, on the same device, so that a launch need not wait for the host.
    """

    keys: Tensor
    values: Tensor
    scales: Tensor
    table: Tensor

    def runs(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Keys [heads, n], values [heads, panels, m] and scales [heads, tokens, 4] of neighbouring blocks, in order."""
        for start, end in stretches(self.table.tolist(), self.table.numel()):
            yield (
                self.keys[:, start:end].flatten(1),
                self.values[:, :, start:end].flatten(2),
                self.scales[:, start:end].flatten(1, 2),
            )


class Clock(NamedTuple):
    """What a decode step needs to know of the sequence's length; int32 [6] on the device.

    Exact tokens of a head with a history, its packed blocks, and the row of the new token among the exact ones; tokens
    of a window, the new one's row there; and the place in the table of the block that the new token fills, or -1.
    """

    exact_tokens: int
    packed_blocks: int
    exact_row: int
    window_tokens: int
    window_row: int
    full_block: int


class Held(NamedTuple):
    """What a layer holds, heads with a history first, then those with a window.

    exact: keys and values [heads with a history, n, d], beside the packed ones; windows: [other heads, n, d].
    """

    exact: tuple[Tensor, Tensor]
    packed: Packed
    windows: tuple[Tensor, Tensor]


def stretches(ids: Sequence[int], longest: int) -> Iterator[tuple[int, int]]:
    """(first, last + 1) of each stretch of consecutive ids, none longer than `longest`."""
    start = 0
    for i in range(1, len(ids) + 1):
        if i == len(ids) or ids[i] != ids[i - 1] + 1 or i - start == longest:
            yield ids[start], ids[i - 1] + 1
            start = i


def decode(q: Tensor, exact_k: Tensor, exact_v: Tensor, packed: Packed, layout: Any, scale: float) -> Tensor:
    """Out [heads, group, d] in fp32.

    q [heads, group, d] fp32, rotated as the keys are; exact_k, exact_v [heads, n, d]; packed by `layout`.
    """
    d = q.shape[-1]
    all_keys, all_values = [exact_k.float()], [exact_v.float()]
    for keys, values, scales in packed.runs():
        k_step, k_middle, v_step, v_middle = scales.float().split(1, -1)
        all_keys.append((layout.unpack_keys(keys, d).float() - 8) * k_step + k_middle)
        all_values.append((layout.unpack_values(values, d).float() - 8) * v_step + v_middle)
    weights = (q @ torch.cat(all_keys, 1).transpose(1, 2) * scale).softmax(-1)
    return weights @ torch.cat(all_values, 1)


def step(q: Tensor, k: Tensor, v: Tensor, clock: Tensor, held: Held, layout: Any, scale: float) -> Tensor:
    """One token through a layer: stores its key and value, then attends; out [heads, group, d] in fp32.

    q [heads, group, d], k, v [heads, d] fp32; clock: a `Clock`, with the new token counted.
    """
    now, packed = Clock(*clock.tolist()), held.packed
    kept = held.exact[0].shape[0]
    outs = []
    for (keys, values), heads, row, tokens, blocks in (
        (held.exact, slice(kept), now.exact_row, now.exact_tokens, now.packed_blocks),
        (held.windows, slice(kept, None), now.window_row, now.window_tokens, 0),
    ):
        keys[:, row], values[:, row] = k[heads].to(keys.dtype), v[heads].to(values.dtype)
        seen = Packed(packed.keys, packed.values, packed.scales, packed.table[:blocks])
        outs.append(decode(q[heads], keys[:, :tokens], values[:, :tokens], seen, layout, scale))
    return torch.cat(outs)
