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
