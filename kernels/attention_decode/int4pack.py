"""Decode attention that multiplies by packed codes as they lie, with torch's CPU int4 product.

Scale and middle are folded out of the product, so that it runs over bare codes n = code - 8:
q.k = step (q.n) + middle sum(q), and sum p v = (p step).n + sum(p middle).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.attention_decode.ref import Packed
from kernels.kv4_pack import int4pack as layout

_product = torch.ops.aten._weight_int4pack_mm_for_cpu
# The product's own scales and zeros, all one and zero, by `_unit_scales`' key; they grow as needed.
_units: dict[tuple[int, int], Tensor] = {}


def declines(device: torch.device, head_dim: int, group: int = 1) -> str | None:
    """Serves what the int4pack layout serves."""
    return layout.declines(device, head_dim, group)


def _unit_scales(groups: int, rows: int) -> Tensor:
    """fp32 [groups, rows, 2] of (1, 0)."""
    key = (1, 0) if groups == 1 else (0, rows)
    have = _units.get(key)
    size = rows if groups == 1 else groups
    if have is None or have.shape[0] < size:
        have = torch.zeros(max(2 * size, 1024), 1 if groups == 1 else rows, 2)
        have[..., 0] = 1
        _units[key] = have
    return have[:rows].view(1, rows, 2) if groups == 1 else have[:groups]


def decode(q: Tensor, exact_k: Tensor, exact_v: Tensor, packed: Packed, _: Any, scale: float) -> Tensor:
    """As `ref.decode`, in fp32: in bf16 the product would round its result, a score's error of 1 % of the output."""
    heads, _group, d = q.shape
    q = q * scale
    total = q.sum(-1, keepdim=True)
    runs = [(keys, values, scales.float()) for keys, values, scales in packed.runs()]
    scores = [torch.bmm(q, exact_k.float().transpose(1, 2))]
    for keys, _values, scales in runs:
        tokens = scales.shape[1]
        unit = _unit_scales(1, tokens)
        rows = keys.view(heads, tokens, d // 2)
        raw = torch.stack([_product(q[h], rows[h], d, unit) for h in range(heads)])
        scores.append(torch.addcmul(total * scales[:, None, :, 1], raw, scales[:, None, :, 0]))
    weights = torch.cat(scores, -1).softmax(-1)
    exact = exact_k.shape[1]
    out = torch.bmm(weights[..., :exact], exact_v.float())
    start = exact
    for _keys, values, scales in runs:
        tokens = scales.shape[1]
        part = weights[..., start : start + tokens]
        stepped = part * scales[:, None, :, 2]
        panels = values.shape[1]
        width = d // panels
        unit = _unit_scales(tokens // width, width)
        columns = values.view(heads, panels, width, tokens // 2)
        sums = torch.stack(
            [_product(stepped[h], columns[h, p], width, unit) for h in range(heads) for p in range(panels)]
        )
        # [heads * panels, group, width] -> [heads, group, d]
        out += sums.unflatten(0, (heads, panels)).transpose(1, 2).flatten(2)
        out += torch.bmm(part, scales[:, :, 3:4])
        start += tokens
    return out
