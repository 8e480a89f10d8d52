"""Triton where it is installed: it comes with torch's CUDA builds and with no other."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
    from triton import jit
except ImportError:
    triton = tl = None

    def jit(function: Callable[..., Any]) -> Any:
        """Leaves a kernel that nobody will launch as it is."""
        return function


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # kernels run as plain Python, on a CPU too: for tests

__all__ = ["INTERPRETED", "jit", "missing", "tl", "triton"]


def missing(device: torch.device) -> str | None:
    """Why Triton kernels cannot serve on a device, or None."""
    if triton is None:
        return "Triton is not installed"
    if INTERPRETED:
        return None
    if device.type != "cuda":
        return f"CUDA only, not {device.type}"
    return None if torch.cuda.get_device_capability(device) >= (8, 0) else "needs sm_80 or newer"
