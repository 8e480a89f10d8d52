"""Positions and rotation in C, in one pass over a token's heads."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from kernels import native
from kernels.norm_rope import ref

SOURCE = Path(__file__).with_name("native.c")


def declines(device: torch.device) -> str | None:
    """Serves x86 processors with AVX-512 where there is a C compiler."""
    return native.declines(SOURCE, device)


@cache
def _function():  # type: ignore[no-untyped-def]
    where, size = c_void_p, c_int64
    return native.function(
        SOURCE, "place", where, size, where, size, size, c_int, *[size] * 4, where, size, size, c_int
    )


def place(
    heads: Tensor,
    table: Tensor,
    placed: int,
    turned: Sequence[tuple[int, int]],
    turn: Tensor,
    keys: int = 0,
    centre: Tensor | None = None,
) -> None:
    """As `ref.place`."""
    n, _, d = heads.shape
    assert heads.dtype == torch.float32 and heads.stride()[1:] == (d, 1) and table.is_contiguous() and len(turned) <= 2
    assert centre is None or centre.is_contiguous()
    if turned and not native.is_hadamard(turn):
        ref.place(heads, table, placed, turned, turn, keys, centre)
        return
    a, b = (*turned, (0, 0), (0, 0))[:2]
    threads = torch.get_num_threads()
    moved = (0, keys, 0) if centre is None else (centre.data_ptr(), keys, len(centre))
    _function()(heads.data_ptr(), heads.stride(0), table.data_ptr(), n, placed, d, *a, *b, *moved, threads)
