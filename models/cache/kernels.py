"""Which backend of each kernel serves a cache of a given shape, and why the others do not."""

from __future__ import annotations

from typing import Any

import torch

from kernels.act_quant import ACT_QUANT
from kernels.attention_decode import KV4_DECODE, KV4_STEP
from kernels.attention_prefill import ATTENTION, BLOCKS, ROWS, WINDOW
from kernels.attention_window import WINDOW_DECODE, WINDOW_STEP
from kernels.gemv import GEMV
from kernels.int8_gemm import INT8_GEMM
from kernels.kv4_pack import KV4_LAYOUT
from kernels.norm_rope import PLACE
from models.cache import history
from models.cache.shape import CacheShape

_WIDE = ", 8-bit heads"  # served by the kernels of 4 bits as heads of twice the size


def chosen_kernels(device: torch.device, shape: CacheShape, endless: bool = False) -> dict[str, str]:
    """The backend that serves by kernel; those behind it are not asked."""
    asked = _asked(device, shape, endless)
    return {kernel.name + kind: kernel.choose(device, **traits).backend.name for kind, kernel, traits in asked}


def kernel_report(device: torch.device, shape: CacheShape, endless: bool = False) -> list[dict[str, Any]]:
    """Rows of kernel, chosen, and declined {backend: reason}."""
    rows = []
    for kind, kernel, traits in _asked(device, shape, endless):
        chosen = kernel.choose(device, **traits).backend
        others = {
            b.name: b.declines(device, **traits) or "a better one serves" for b in kernel.backends if b is not chosen
        }
        rows.append({"kernel": kernel.name + kind, "chosen": chosen.name, "declined": others})
    return rows


def _asked(device: torch.device, shape: CacheShape, endless: bool) -> list[tuple[str, Any, dict[str, Any]]]:
    """What is added to a kernel's name, the kernel, and the traits that its backends are asked about.

    Those of the cache only where it has such heads; where heads have 8 bits, the kernels that serve those too.
    """
    attended = (shape.retrieval_heads[0] + shape.streaming_heads[0]) * shape.group * shape.head_dim
    asked: list[tuple[str, Any, dict[str, Any]]] = [
        ("", INT8_GEMM, {}),
        ("", GEMV, {"dtype": torch.int8, "width": attended}),
        ("", ACT_QUANT, {}),
        ("", PLACE, {}),
        ("", ATTENTION, {"head_dim": shape.head_dim, "dtype": shape.compute_dtype}),
    ]
    direct = not endless and history.declines(shape, device) is None
    window = {"head_dim": shape.head_dim, "dtype": shape.exact_dtype}
    if not endless and not direct:
        chunk = {"head_dim": shape.head_dim, "dtype": shape.compute_dtype, "exact": shape.exact_dtype}
        asked.append(("", WINDOW, chunk))
    if endless:
        asked.append(("", WINDOW_STEP, window | {"group": shape.group}))
    elif any(shape.streaming_heads):
        asked.append(("", WINDOW_DECODE, window))
    for part in () if endless else reversed(shape.parts):
        kind = _WIDE if part.bits == 8 else ""
        chunk = {"head_dim": part.width, "dtype": part.compute_dtype}
        asked.append((kind, ROWS, chunk) if direct else (kind, BLOCKS, chunk | {"packed": part.bits < 16}))
        if part.bits < 16:
            packed = {"head_dim": part.width, "group": part.group}
            asked += [(kind, kernel, packed) for kernel in (KV4_LAYOUT, KV4_DECODE, KV4_STEP)]
    return asked
