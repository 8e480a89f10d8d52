"""The plain layout: token-major, two neighbouring channels a byte, the even one in the low nibble."""

import torch
from torch import Tensor


def pack(codes: Tensor) -> Tensor:
    """uint8 codes 0..15 [..., 2m] -> uint8 [..., m], element 2i in the low nibble of byte i."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """The inverse of `pack`: uint8 [..., m] -> codes [..., 2m]."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def value_panels(head_dim: int) -> int:
    """Values lie in one panel, all channels of a token together."""
    return 1


def pack_keys(codes: Tensor) -> Tensor:
    """codes [heads, tokens, d] -> bytes [heads, tokens * d / 2]."""
    return pack(codes).flatten(1)


def unpack_keys(packed: Tensor, head_dim: int) -> Tensor:
    """bytes [heads, tokens * d / 2] -> codes [heads, tokens, d]."""
    return unpack(packed.unflatten(1, (-1, head_dim // 2)))


def pack_values(codes: Tensor) -> Tensor:
    """codes [heads, tokens, d] -> bytes [heads, 1, tokens * d / 2]."""
    return pack(codes).flatten(1)[:, None]


def unpack_values(packed: Tensor, head_dim: int) -> Tensor:
    """bytes [heads, 1, tokens * d / 2] -> codes [heads, tokens, d]."""
    return unpack(packed[:, 0].unflatten(1, (-1, head_dim // 2)))
