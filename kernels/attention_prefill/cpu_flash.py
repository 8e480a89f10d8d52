"""torch's flash attention for the CPU, which takes grouped heads as they are and returns the log-sum-exp."""

import torch
from torch import Tensor


def declines(device: torch.device, head_dim: int, dtype: torch.dtype) -> str | None:
    """Serves every head size on the CPU."""
    return None if device.type == "cpu" else f"CPU only, not {device.type}"


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As `ref.attend`; `causal` needs as many queries as keys (this kernel aligns top-left)."""
    assert not causal or q.shape[2] == k.shape[2]
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
