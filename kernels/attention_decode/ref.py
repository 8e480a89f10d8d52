"""Decode attention over packed runs, by unpacking them: the truth for the fast kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedRun:
    """A run of tokens as the pool holds it, for the retrieval heads of one layer.

    keys: bytes [heads, n]; values: bytes [heads, panels, m]; scales: fp16 [heads, tokens, 4] with the step and the
    middle of the key, then of the value: x = (code - 8) * step + middle.
    """

    keys: Tensor
    values: Tensor
    scales: Tensor


def decode(q: Tensor, exact_k: Tensor, exact_v: Tensor, runs: Sequence[PackedRun], layout: Any, scale: float) -> Tensor:
    """Out [heads, group, d] in fp32.

    q [heads, group, d] fp32, rotated as the keys are; exact_k, exact_v [heads, n, d]; runs packed by `layout`.
    """
    d = q.shape[-1]
    keys, values = [exact_k.float()], [exact_v.float()]
    for run in runs:
        scales = run.scales.float()
        keys.append((layout.unpack_keys(run.keys, d).float() - 8) * scales[..., 0:1] + scales[..., 1:2])
        values.append((layout.unpack_values(run.values, d).float() - 8) * scales[..., 2:3] + scales[..., 3:4])
    weights = (q @ torch.cat(keys, 1).transpose(1, 2) * scale).softmax(-1)
    return weights @ torch.cat(values, 1)
