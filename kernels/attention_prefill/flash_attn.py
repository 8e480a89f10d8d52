"""The flash-attn package, where someone has built it."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from kernels.attention_prefill.check import wrong


def declines(device: torch.device, head_dim: int, dtype: torch.dtype) -> str | None:
    """Serves fp16 and bf16 on sm_80 and newer, head sizes up to 256 in steps of 8, where it gives the right result."""
    if device.type != "cuda":
        return f"CUDA only, not {device.type}"
    if importlib.util.find_spec("flash_attn") is None:
        return "flash-attn is not installed"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "needs sm_80 or newer"
    if head_dim > 256 or head_dim % 8:
        return f"head size {head_dim} is above 256 or not a multiple of 8"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"{dtype} is not fp16 or bf16"
    return wrong(attend, device, head_dim, dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool = False) -> tuple[Tensor, Tensor]:
    """As `ref.attend_rows`."""
    keys, values = (x.transpose(0, 1)[None] for x in (k, v))
    out, lse, _ = _function()(
        q[None], keys, values, softmax_scale=scale, causal=causal, return_attn_probs=True
    )  # bottom-right since 2.1
    return out[0], lse[0, :, : q.shape[0]].T.contiguous()


def _function() -> Any:
    from flash_attn import flash_attn_func

    return flash_attn_func
