"""Attention written out: the truth for the fast kernels."""

import torch
from torch import Tensor


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Out [b, heads, n, d] in q's dtype and log-sum-exp [b, heads, n] in fp32.

    q [b, heads, n, d]; k, v [b, kv_heads, m, d] with heads a multiple of kv_heads (head i reads KV head i // group).
    `causal` aligns the last query with the last key (bottom-right); `mask` [b or 1, 1, n, m] is added to the scores.
    """
    group = q.shape[1] // k.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    keys = k.to(wide).repeat_interleave(group, 1)
    values = v.to(wide).repeat_interleave(group, 1)
    scores = q.to(wide) @ keys.transpose(-1, -2) * scale
    n, m = scores.shape[-2:]
    if causal:
        future = torch.arange(m, device=q.device) > torch.arange(m - n, m, device=q.device)[:, None]
        scores = scores.masked_fill(future, float("-inf"))
    if mask is not None:
        scores = scores + mask
    lse = scores.logsumexp(-1)
    return ((scores - lse[..., None]).exp() @ values).to(q.dtype), lse.float()


def attend_rows(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool = False) -> tuple[Tensor, Tensor]:
    """As `attend`, tokens first: q [n, heads, d], k, v [kv_heads, m, d] -> out [n, heads, d], lse [n, heads]."""
    out, lse = attend(q.transpose(0, 1)[None], k[None], v[None], scale=scale, causal=causal)
    return out[0].transpose(0, 1).contiguous(), lse[0].T.contiguous()


def merge_(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Joins, in place, two attentions of the same queries over disjoint keys: out [..., n, d], lse [..., n] natural."""
    out.lerp_(other.to(out.dtype), torch.sigmoid(other_lse - lse).to(out.dtype)[..., None])
    torch.logaddexp(lse, other_lse, out=lse)
