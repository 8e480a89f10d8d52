"""torch's own flash and memory-efficient attention on CUDA, with their log-sum-exp."""

import torch
from torch import Tensor


def declines(device: torch.device, head_dim: int, dtype: torch.dtype) -> str | None:
    """Serves fp16 and bf16 on sm_80 and newer, head sizes up to 256 in steps of 8."""
    if device.type != "cuda":
        return f"CUDA only, not {device.type}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "needs sm_80 or newer"
    if head_dim > 256 or head_dim % 8:
        return f"head size {head_dim} is above 256 or not a multiple of 8"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"{dtype} is not fp16 or bf16"
    return None


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As `ref.attend`; `causal` needs as many queries as keys.

    Without a causal mask the queries of a group are only more rows of one head, so nothing is expanded.
    """
    assert not causal or q.shape[2] == k.shape[2]
    batch, heads, n, d = q.shape
    kv_heads = k.shape[1]
    if causal:
        k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, scale=scale)[:2]
        return out, lse[..., :n]
    rows = q.reshape(batch, kv_heads, -1, d)
    if mask is None:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(rows, k, v, 0.0, False, scale=scale)[:2]
    else:
        m = k.shape[2]
        padded = -(-m // 8) * 8  # the kernel reads its bias in rows of whole 16 bytes
        bias = torch.nn.functional.pad(mask.to(q.dtype), (0, padded - m))[..., :m]
        bias = bias.expand(batch, heads // kv_heads, n, m).reshape(batch, 1, -1, m)
        bias = torch.nn.functional.pad(bias, (0, padded - m))[..., :m].expand(batch, kv_heads, -1, m)
        out, lse = torch.ops.aten._scaled_dot_product_efficient_attention(rows, k, v, bias, True, scale=scale)[:2]
    return out.reshape(batch, heads, n, d), lse[..., : rows.shape[2]].reshape(batch, heads, n)
