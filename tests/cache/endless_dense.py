"""Endless attention written down as it is defined, in float64: for each query the kept tokens, numbered afresh."""

import math

import torch

from models.cache.shape import CacheShape


def attend(shape: CacheShape, table, q, k, v):
    """q [n, heads, d], k, v [n, kv_heads, d] without positions -> [n, heads * d] in float64.

    `table(positions)` gives the rotations [L, d / 2] of places inside the cache.
    """
    n, heads, d = q.shape
    rotations = table(torch.arange(min(n, shape.sink + shape.recent))).to(torch.complex128)
    q, k = (torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous()) for x in (q, k))
    out = torch.empty(n, heads, d, dtype=torch.float64)
    for i in range(n):
        kept = torch.tensor([j for j in range(i + 1) if j < shape.sink or j > i - shape.recent])
        places = rotations[: len(kept)]
        keys = torch.view_as_real(k[kept] * places[:, None]).flatten(-2).repeat_interleave(shape.group, 1)
        values = v[kept].double().repeat_interleave(shape.group, 1)
        query = torch.view_as_real(q[i] * places[-1]).flatten(-2)
        scores = torch.einsum("hd,mhd->hm", query, keys) / math.sqrt(d)
        out[i] = torch.einsum("hm,mhd->hd", scores.softmax(-1), values)
    return out.flatten(1)
