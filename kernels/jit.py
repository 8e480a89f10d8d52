"""Triton where it is installed: it comes with torch's CUDA builds and with no other."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from kernels.registry import first_line

try:
    import triton
    import triton.language as tl
    from triton import jit
except ImportError:
    triton = tl = None

    def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
        """Leaves a kernel that nobody will launch as it is."""
        return function if function is not None else lambda kernel: kernel


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # kernels run as plain Python, on a CPU too: for tests

__all__ = ["INTERPRETED", "jit", "missing", "tl", "triton"]


def missing(device: torch.device, trial: Callable[..., object] | None = None, *shape: int) -> str | None:
    """Why Triton kernels cannot serve on a device, or None. `trial(device, *shape)` launches them: once, to see."""
    if triton is None:
        return "Triton is not installed"
    if INTERPRETED:
        return None
    if device.type != "cuda":
        return f"CUDA only, not {device.type}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "needs sm_80 or newer"
    return None if trial is None else _failure(trial, device, *shape)


@cache
def _failure(trial: Callable[..., object], device: torch.device, *shape: int) -> str | None:
    try:
        trial(device, *shape)
        torch.cuda.synchronize(device)
    except Exception as error:  # a compiler, a missing header or the driver: each fails in its own way
        return f"does not run here ({first_line(error)})"
    return None
