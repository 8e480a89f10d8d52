"""A decode step over sinks and ring, written out: the truth for the fast kernels."""

import torch
from torch import Tensor


def step(
    q: Tensor, near: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, sink: int, clock: Tensor, scale: float
) -> Tensor:
    """Stores the new token's k, v [kv_heads, d] and attends; fp32 [kv_heads, group, d].

    q [kv_heads, group, d] (fp32) is the query as the ring's keys see it, `near` the same query as the first `sink`
    slots see it. clock, int64 [2]: how many slots of keys and values [kv_heads, slots, d] are seen, the new token's
    included, and its slot. The order of the ring's tokens does not matter: their positions are in them.
    """
    held, at = clock.tolist()
    keys[:, at] = k.to(keys.dtype)
    values[:, at] = v.to(values.dtype)
    seen_k, seen_v = keys[:, :held].float(), values[:, :held].float()
    scores = torch.cat((near @ seen_k[:, :sink].transpose(1, 2), q @ seen_k[:, sink:].transpose(1, 2)), -1)
    return (scores * scale).softmax(-1) @ seen_v
