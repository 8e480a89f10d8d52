"""FlashInfer's prefill kernels (Ye et al., 2025): FA3 for Hopper, FA2 for the rest; grouped heads as they are."""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kernels.attention_prefill.check import wrong

FA3_SERVES = "FA3 is for this GPU"


@dataclass(frozen=True)
class FlashInfer:
    """One of its two kernels. Each is compiled at its first use, which takes a minute, and then kept on disk."""

    kernel: Literal["fa2", "fa3"]

    def declines(self, device: torch.device, head_dim: int, dtype: torch.dtype) -> str | None:
        """Serves fp16 and bf16 for head sizes 64, 128 and 256, where it is installed and can be compiled."""
        if device.type != "cuda":
            return f"CUDA only, not {device.type}"
        capability = torch.cuda.get_device_capability(device)
        if self.kernel == "fa3" and capability[0] != 9:
            return "for compute capability 9.0"
        if self.kernel == "fa2" and capability[0] == 9:
            return FA3_SERVES
        if capability < (8, 0):
            return "needs sm_80 or newer"
        if head_dim not in (64, 128, 256):
            return f"head size {head_dim} is not 64, 128 or 256"
        if dtype not in (torch.float16, torch.bfloat16):
            return f"{dtype} is not fp16 or bf16"
        if importlib.util.find_spec("flashinfer") is None:
            return "flashinfer-python is not installed"
        if not _compiler():
            return "FlashInfer compiles its kernels, and there is no nvcc"
        return wrong(self.attend, device, head_dim, dtype)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool = False) -> tuple[Tensor, Tensor]:
        """As `ref.attend_rows`."""
        out, lse = _single_prefill()(
            q,
            k.transpose(0, 1),  # in its other layout FA3 takes the length from the wrong axis (0.6.4)
            v.transpose(0, 1),
            causal=causal,
            sm_scale=scale,
            backend=self.kernel,
            return_lse=True,
        )
        return out, lse.mul_(math.log(2))  # its log-sum-exp is in powers of two


def _single_prefill() -> Any:
    from flashinfer import single_prefill_with_kv_cache

    return single_prefill_with_kv_cache


def _compiler() -> bool:
    """Whether there is an nvcc, or kernels that were compiled before."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    built = importlib.util.find_spec("flashinfer_jit_cache") is not None
    return built or shutil.which("nvcc") is not None or os.path.exists(os.path.join(home, "bin", "nvcc"))
