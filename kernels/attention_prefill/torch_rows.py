"""torch's cuDNN and flash attention with their log-sum-exp, for rows of queries over a long stretch of keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kernels.attention_prefill import cuda_flash
from kernels.attention_prefill.ref import merge_


@dataclass(frozen=True)
class TorchRows:
    """One of the two. Queries of a group are only more rows of their KV head: nothing is expanded."""

    kernel: Literal["cudnn", "flash"]

    def declines(self, device: torch.device, head_dim: int, dtype: torch.dtype) -> str | None:
        """As `cuda_flash`; cuDNN from sm_90 on, where it is the faster one, and for head sizes up to 128."""
        if self.kernel == "cudnn" and device.type == "cuda":
            if not torch.backends.cudnn.is_available():
                return "torch has no cuDNN"
            if torch.cuda.get_device_capability(device) < (9, 0):
                return "torch's flash attention is as fast below sm_90"
            if head_dim > 128:
                return f"head size {head_dim} is above 128"
        return cuda_flash.declines(device, head_dim, dtype)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool = False) -> tuple[Tensor, Tensor]:
        """As `ref.attend_rows`; a causal mask counts from the end of k, where these kernels count from its start."""
        n, m = q.shape[0], k.shape[1]
        if not causal:
            return self._whole(q, k, v, scale)
        assert m >= n
        out, lse = self._corner(q, k[:, m - n :], v[:, m - n :], scale)
        if m > n:
            older, older_lse = self._whole(q, k[:, : m - n], v[:, : m - n], scale)
            joined = out.float()
            merge_(joined, lse, older, older_lse)
            out = joined.to(q.dtype)
        return out, lse

    def _whole(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        (n, heads, d), kv_heads = q.shape, k.shape[0]
        group = heads // kv_heads
        rows = q.view(n, kv_heads, group, d).permute(1, 0, 2, 3).reshape(1, kv_heads, n * group, d)
        out, lse = self._run(rows, k[None], v[None], scale, False)
        out = out[0].view(kv_heads, n, group, d).transpose(0, 1).reshape(n, heads, d)
        return out, lse.reshape(kv_heads, -1)[:, : n * group].view(kv_heads, n, group).transpose(0, 1).reshape(n, heads)

    def _corner(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """As many queries as keys, causal: each query head of a group with its KV head in turn."""
        (n, heads, d), kv_heads = q.shape, k.shape[0]
        split = q.view(n, kv_heads, heads // kv_heads, d)
        out = torch.empty_like(split, memory_format=torch.contiguous_format)
        lse = q.new_empty(n, kv_heads, heads // kv_heads, dtype=torch.float32)
        for member in range(heads // kv_heads):
            part, part_lse = self._run(split[:, :, member].transpose(0, 1)[None], k[None], v[None], scale, True)
            out[:, :, member] = part[0].transpose(0, 1)
            lse[:, :, member] = part_lse.reshape(kv_heads, -1)[:, :n].T
        return out.view(n, heads, d), lse.view(n, heads)

    def _run(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        if self.kernel == "cudnn":
            made = torch.ops.aten._scaled_dot_product_cudnn_attention(
                q, k, v, None, True, 0.0, causal, False, scale=scale
            )
        else:
            made = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
        return made[0], made[1]
