"""place.cu: a warp a head; many tokens, and heads in 16 bits, go to the kernel in Triton."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from kernels import nvrtc
from kernels.norm_rope import fused, ref

SOURCE = Path(__file__).with_name("place.cu")
WARPS = 8  # as in the source
HEAD_DIMS = (64, 96, 128, 256)
FEW = 64  # tokens


class _Params(ctypes.Structure):
    """`Params` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("heads", "table", "centre")),
        ("stride", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("n", "placed", "from", "count", "from2", "count2", "keys", "centred")),
    )


def declines(device: torch.device) -> str | None:
    """Serves CUDA from compute capability 8.0 on where it compiles."""
    if device.type != "cuda":
        return f"CUDA only, not {device.type}"
    return nvrtc.cannot_load(device, lambda: _kernel(nvrtc.indexed(device), 128))


@cache
def _kernel(device: torch.device, head_dim: int) -> nvrtc.Kernel:
    return nvrtc.Program(SOURCE, {"HEAD_DIM": head_dim}, device).kernel("place", WARPS * 32)


def place(
    heads: Tensor,
    table: Tensor,
    placed: int,
    turned: Sequence[tuple[int, int]],
    turn: Tensor,
    keys: int = 0,
    centre: Tensor | None = None,
) -> None:
    """As `ref.place`; `turn` is the rotation of its size (`quant.kv4.rotation`)."""
    n, _, d = heads.shape
    if (heads.dtype != torch.float32 or n > FEW) and fused.declines(heads.device) is None:
        fused.place(heads, table, placed, turned, turn, keys, centre)
        return
    if d not in HEAD_DIMS:
        ref.place(heads, table, placed, turned, turn, keys, centre)
        return
    assert heads.stride()[1:] == (d, 1) and table.is_contiguous() and len(turned) <= 2
    assert centre is None or centre.is_contiguous()
    a, b = (*turned, (0, 0), (0, 0))[:2]
    moved = (0, 0) if centre is None else (centre.data_ptr(), len(centre))
    params = _Params(heads.data_ptr(), table.data_ptr(), moved[0], heads.stride(0), n, placed, *a, *b, keys, moved[1])
    _kernel(heads.device, d).launch(-(-n * placed // WARPS), 1, params, early=True)
