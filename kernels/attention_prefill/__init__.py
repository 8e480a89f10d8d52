"""Attention that also returns its log-sum-exp, so that parts over disjoint keys can be merged."""

import torch
from torch import Tensor

from kernels.attention_prefill import blocks, cpu_flash, cuda_flash, ref
from kernels.registry import Backend, Kernel, always

ATTENTION = Kernel(
    "attention_prefill",
    (
        Backend("cpu_flash", cpu_flash, cpu_flash.declines),
        Backend("cuda_flash", cuda_flash, cuda_flash.declines),
        Backend("reference", ref, always),
    ),
)

BLOCKS = Kernel("attention_blocks", (Backend("native", blocks, blocks.declines), Backend("merged parts", None, always)))
WINDOW = Kernel(
    "attention_chunk_window",
    (Backend("native", blocks, blocks.declines_window), Backend("masked tiles", None, always)),
)


def merge_(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Joins, in place, two attentions of the same queries over disjoint keys: out [..., n, d], lse [..., n] natural."""
    out.lerp_(other.to(out.dtype), torch.sigmoid(other_lse - lse).to(out.dtype)[..., None])
    torch.logaddexp(lse, other_lse, out=lse)
