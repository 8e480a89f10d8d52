"""The layout of the CUDA decode kernel: a 32-bit word is a lane's operand of one tensor-core product.

A tile is 32 tokens. A word holds eight codes, four in each half, of one row pair and two column pairs of a 16 x 16
operand of mma.m16n8k16 (rows are tokens for keys and channels for values); a lane's words of a tile lie in pieces of 16
bytes, the 32 lanes' pieces side by side. Blocks of whole tiles laid end to end are a longer run.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from kernels import nvrtc

HEAD_DIMS = (64, 96, 128, 256)
LARGEST_GROUP = 8
TILE = 32
SOURCE = Path(__file__).with_name("pack.cu")
PACK_THREADS = 512  # as in the source


class _Params(ctypes.Structure):
    """`Params` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values", "packed_keys", "packed_values", "scales")),
        *((name, ctypes.c_void_p) for name in ("table", "full")),
        ("blocks", ctypes.c_int64),
        ("share", ctypes.c_float),
    )


def declines(device: torch.device, head_dim: int, group: int = 1) -> str | None:
    """Serves CUDA from compute capability 8.0 on where it compiles, usual head sizes, up to 8 query heads a KV head."""
    if device.type != "cuda":
        return f"CUDA only, not {device.type}"
    if head_dim not in HEAD_DIMS:
        return f"head size {head_dim} is not one of {HEAD_DIMS}"
    if group > LARGEST_GROUP:
        return f"{group} query heads share a KV head, more than {LARGEST_GROUP}"
    return nvrtc.cannot_load(device, lambda: _kernel(nvrtc.indexed(device), head_dim, False))


def value_panels(head_dim: int) -> int:
    """Values lie in one panel."""
    return 1


def _to_words(operands: Tensor) -> Tensor:
    """[heads, tile, words, row, column, half, far, upper] codes -> bytes [heads, tokens * d / 2].

    half: of a word; far: the column pair 8 further on; upper: the row 8 further down, in a byte's high nibble.
    """
    pieces = operands.unflatten(2, (-1, 4)).permute(0, 1, 2, 4, 5, 3, 6, 7, 8)
    return (pieces[..., 0] | (pieces[..., 1] << 4)).flatten(1)


def _from_words(packed: Tensor, head_dim: int) -> Tensor:
    """The inverse of `_to_words`."""
    pieces = packed.unflatten(1, (-1, head_dim // 32, 8, 4, 4, 2, 2))
    return torch.stack((pieces & 15, pieces >> 4), -1).permute(0, 1, 2, 5, 3, 4, 6, 7, 8).flatten(2, 3)


def pack_keys(codes: Tensor) -> Tensor:
    """codes [heads, tokens, d] -> bytes [heads, tokens * d / 2]; tokens are whole tiles."""
    # tokens: tile, sixteen, upper, row; channels: segment of 32, column, step, far, half
    split = codes.unflatten(1, (-1, 2, 2, 8)).unflatten(-1, (-1, 4, 2, 2, 2))
    return _to_words(split.permute(0, 1, 2, 5, 7, 4, 6, 9, 8, 3).flatten(2, 4))


def unpack_keys(packed: Tensor, head_dim: int) -> Tensor:
    """bytes [heads, tokens * d / 2] -> codes [heads, tokens, d]."""
    split = _from_words(packed, head_dim).unflatten(2, (2, head_dim // 32, 2))
    return split.permute(0, 1, 2, 9, 5, 3, 6, 4, 8, 7).flatten(5).flatten(1, 4)


def pack_values(codes: Tensor) -> Tensor:
    """codes [heads, tokens, d] -> bytes [heads, 1, tokens * d / 2]; tokens are whole tiles."""
    # tokens: tile, sixteen, far, column, half; channels: sixteen, upper, row
    split = codes.unflatten(1, (-1, 2, 2, 4, 2)).unflatten(-1, (-1, 2, 8))
    return _to_words(split.permute(0, 1, 2, 6, 8, 4, 5, 3, 7).flatten(2, 3))[:, None]


def unpack_values(packed: Tensor, head_dim: int) -> Tensor:
    """bytes [heads, 1, tokens * d / 2] -> codes [heads, tokens, d]."""
    split = _from_words(packed[:, 0], head_dim).unflatten(2, (2, head_dim // 16))
    return split.permute(0, 1, 2, 7, 5, 6, 3, 8, 4).flatten(6).flatten(1, 5)


@cache
def _kernel(device: torch.device, head_dim: int, wide: bool) -> nvrtc.Kernel:
    return nvrtc.Program(SOURCE, {"HEAD_DIM": head_dim, "WIDE": int(wide)}, device).kernel("kv4_pack", PACK_THREADS)


def pack_full(
    exact: tuple[Tensor, Tensor],
    packed: tuple[Tensor, Tensor, Tensor],
    table: Tensor,
    full: Tensor,
    share: float,
    wide: bool = False,
) -> None:
    """Packs the newest block of every head, where the device finds that it is full; the host need not know.

    exact: keys and values fp16 [heads, 2 blocks, d]; packed: keys, values and scales of all blocks; full: int32, place
    in `table` of the block, below 0 for none; share: of a token's range, for a step (`quant.kv4`). wide: the upper half
    of the channels is packed, in 8 bits, as two halves.
    """
    heads, _, d = exact[0].shape
    blocks = packed[0].shape[1]
    pointers = (x.data_ptr() for x in (*exact, *packed, table, full))
    _kernel(exact[0].device, d, wide).launch(heads, 2, _Params(*pointers, blocks, share), early=True)
