"""A naive cache: every key and value, and the full mask. The truth for the real one."""

import torch

from models.cache.shape import CacheShape
from quant import kv4


def attend(shape: CacheShape, layer: int, q, k, v):
    """All tokens at once: q [n, heads, d], k, v [n, kv_heads, d] -> [n, heads * d] in float64."""
    n, _, d = q.shape
    position = torch.arange(n)
    i, j = position[:, None], position[None]
    outs = []
    for head in range(k.shape[1]):
        keys, values = (x[:, head].to(shape.exact_dtype).double() for x in (k, v))
        seen_as_is = j <= i
        packed_keys, packed_values = keys, values
        if head >= shape.retrieval_heads[layer]:
            seen_as_is = seen_as_is & ((j < shape.sink) | (j > i - shape.recent))
            packed = torch.zeros(n, n, dtype=torch.bool)
        else:
            i_block, j_block = ((x - shape.front) // shape.block for x in (i, j))
            packed = seen_as_is & (j >= shape.front) & (i_block != j_block) & (shape.bits < 16)
            seen_as_is = seen_as_is & ~packed
            if shape.bits < 16:
                bits = 8 if shape.wide_heads and head < shape.wide_heads[layer] else shape.bits
                packed_keys, packed_values = (_rounded(x, bits) for x in (keys, values))
        for member in range(shape.group):
            query = q[:, head * shape.group + member].double() * d**-0.5
            scores = torch.full((n, n), -torch.inf, dtype=torch.float64)
            scores = torch.where(seen_as_is, query @ keys.T, scores)
            scores = torch.where(packed, query @ packed_keys.T, scores)
            weights = scores.softmax(-1)
            outs.append((weights * seen_as_is) @ values + (weights * packed) @ packed_values)
    return torch.cat(outs, 1)


def _rounded(x, bits):
    codes, scales = kv4.quantize(x, bits)
    halves = (codes.double() - 8) * scales[..., :1].double() + scales[..., 1:].double()
    return kv4.join(halves) if bits == 8 else halves
