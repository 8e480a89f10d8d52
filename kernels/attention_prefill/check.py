"""A library's attention is tried before it serves: it may not load beside this torch, or not compile here."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from kernels.attention_prefill import ref
from kernels.registry import first_line


@cache
def wrong(
    attend: Callable[..., tuple[Tensor, Tensor]], device: torch.device, head_dim: int, dtype: torch.dtype
) -> str | None:
    """Why `attend`, as `ref.attend_rows`, cannot serve, or None.

    Tried with fewer queries than keys under a causal mask, which an older flash-attn aligns elsewhere.
    """
    generator = torch.Generator(device).manual_seed(0)
    q = torch.randn(70, 4, head_dim, device=device, generator=generator).to(dtype)
    k, v = torch.randn(2, 2, 130, head_dim, device=device, generator=generator).to(dtype)
    try:
        out, lse = attend(q, k, v, scale=0.1, causal=True)
        want, want_lse = ref.attend_rows(q, k, v, scale=0.1, causal=True)
        far = (out - want).float().norm() > 0.02 * want.float().norm() or (lse - want_lse).abs().max() > 0.02
    except Exception as error:  # a library and its compiler fail in any way
        return f"does not run here ({first_line(error)})"
    return "gives another result than the reference" if far else None
