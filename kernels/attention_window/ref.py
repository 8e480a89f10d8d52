"""One query a head over sinks and ring, written out: the truth for the fast kernels."""

import torch
from torch import Tensor


def decode(q: Tensor, near: Tensor, keys: Tensor, values: Tensor, sink: int, held: int, scale: float) -> Tensor:
    """fp32 [kv_heads, group, d]; the first `held` slots of keys and values [kv_heads, slots, d] are seen.

    q [kv_heads, group, d] (fp32) is the query as the ring's keys see it, `near` the same query as the first `sink`
    slots see it. The order of the ring's tokens does not matter: their positions are in them.
    """
    keys, values = keys[:, :held].float(), values[:, :held].float()
    scores = torch.cat((near @ keys[:, :sink].transpose(1, 2), q @ keys[:, sink:].transpose(1, 2)), -1)
    return (scores * scale).softmax(-1) @ values


def step(
    q: Tensor, near: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, sink: int, clock: Tensor, scale: float
) -> Tensor:
    """Stores the new token's k, v [kv_heads, d], then as `decode`.

    clock, int64 [2]: how many slots are seen, the new token's included, and its slot.
    """
    return decode(q, near, keys, values, sink, store(k, v, keys, values, clock), scale)


def store(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, clock: Tensor) -> int:
    """Writes the new token where the clock says, and gives the number of slots that are seen."""
    held, at = (int(n) for n in clock.tolist())
    keys[:, at] = k.to(keys.dtype)
    values[:, at] = v.to(values.dtype)
    return held
