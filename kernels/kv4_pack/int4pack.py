"""The layout of torch's CPU int4 product, so that decode multiplies by packed codes as they lie.

torch takes a weight [N, K] in panels of 64 rows (AVX-512; 32 with AVX2): byte [panel, k, j] holds row j in its low
nibble and row j + 32 in its high one. Keys are such a weight with N = tokens, K = channels; values with N = channels,
K = tokens, one panel for each 64 channels. A longer run of blocks is then just a longer weight, without a copy.
"""

from functools import cache

import torch
from torch import Tensor

from kernels import cpu


@cache
def panel() -> int:
    """Rows of a panel on this processor; 0 where the product has no fast form."""
    return {"AVX512": 64, "AVX2": 32}.get(cpu.vector_width(), 0)


@cache
def _self_check() -> str | None:
    width = panel()
    if not width:
        return f"needs AVX2 or AVX-512, this processor has {cpu.vector_width()}"
    codes = torch.randint(0, 16, (2 * width, 64), dtype=torch.uint8)
    theirs = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
    if not torch.equal(theirs.flatten(), pack_keys(codes[None]).flatten()):
        return "torch packs int4 weights in another order than expected here"
    return None


def declines(device: torch.device, head_dim: int, group: int = 1) -> str | None:
    """Serves the CPU for head sizes that are whole panels."""
    if device.type != "cpu":
        return f"CPU only, not {device.type}"
    if head_dim % 64:
        return f"head size {head_dim} is not a multiple of 64"
    return _self_check()


def _to_panels(rows: Tensor) -> Tensor:
    """[..., K, panel] codes -> [..., K, panel / 2] bytes."""
    half = panel() // 2
    return rows[..., :half] | (rows[..., half:] << 4)


def _from_panels(packed: Tensor) -> Tensor:
    return torch.cat((packed & 15, packed >> 4), -1)


def value_panels(head_dim: int) -> int:
    """Panels of a head's values."""
    return head_dim // panel()


def pack_keys(codes: Tensor) -> Tensor:
    """codes [heads, tokens, d] -> bytes [heads, tokens * d / 2]; tokens are a multiple of the panel."""
    return _to_panels(codes.unflatten(1, (-1, panel())).transpose(-1, -2)).flatten(1)


def unpack_keys(packed: Tensor, head_dim: int) -> Tensor:
    """bytes [heads, tokens * d / 2] -> codes [heads, tokens, d]."""
    return _from_panels(packed.unflatten(1, (-1, head_dim, panel() // 2))).transpose(-1, -2).flatten(1, 2)


def pack_values(codes: Tensor) -> Tensor:
    """codes [heads, tokens, d] -> bytes [heads, panels, tokens * panel / 2]."""
    return _to_panels(codes.unflatten(-1, (-1, panel())).transpose(1, 2)).flatten(2)


def unpack_values(packed: Tensor, head_dim: int) -> Tensor:
    """bytes [heads, panels, tokens * panel / 2] -> codes [heads, tokens, d]."""
    return _from_panels(packed.unflatten(-1, (-1, panel() // 2))).transpose(1, 2).flatten(2)
