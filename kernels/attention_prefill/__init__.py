"""Attention that also returns its log-sum-exp, so that parts over disjoint keys can be merged."""

import torch
from torch import Tensor

from kernels.attention_prefill import cpu_flash, cuda_flash, ref
from kernels.registry import Backend, Kernel, always

ATTENTION = Kernel(
    "attention_prefill",
    (
        Backend("cpu_flash", cpu_flash, cpu_flash.declines),
        Backend("cuda_flash", cuda_flash, cuda_flash.declines),
        Backend("reference", ref, always),
    ),
)


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> Tensor:
    """Joins two attentions of the same queries over disjoint keys: out [..., n, d], lse [..., n] in natural log."""
    weight = torch.sigmoid(other_lse - lse).to(out.dtype)
    return torch.lerp(out, other, weight[..., None])
