"""KV quantisation: asymmetric, a step and a middle per token and head; keys rotated first.

x ~ (code - 2^(bits-1)) * step + middle, with step and middle in fp16. At 4 bits the range is clipped by a factor of the
head size (`kept_range`), near the least squared error of rotated heads: it depends on the vector's ends alone, so that
every kernel finds the same codes whatever the order of its sums. The rotation (an orthonormal Hadamard matrix)
spreads outlier channels, as in QuaRot (Ashkboos et al., 2024); q and k are both rotated, so q.k does not change.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

_MIN_STEP = 2.0**-20  # a constant vector has no range; the smallest step that fp16 and its inverse hold well


@cache
def rotation(size: int) -> Tensor:
    """Orthonormal fp32 [size, size]: a Hadamard matrix times, for the odd factor of size, a cosine transform."""
    odd = size
    while odd % 2 == 0:
        odd //= 2
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    for _ in range((size // odd).bit_length() - 1):
        hadamard = torch.cat((torch.cat((hadamard, hadamard), 1), torch.cat((hadamard, -hadamard), 1)))
    k, n = torch.arange(odd, dtype=torch.float64)[:, None], torch.arange(odd, dtype=torch.float64)
    cosine = torch.cos(torch.pi * k * (2 * n + 1) / (2 * odd)) * (2 / odd) ** 0.5
    cosine[0] /= 2**0.5
    full = torch.kron(hadamard / hadamard.shape[0] ** 0.5, cosine)
    return full.to(torch.float32)


def rotate(x: Tensor, back: bool = False) -> Tensor:
    """x [..., n] @ rotation(n), or @ its transpose, through two small factors: n^1.5 steps instead of n^2."""
    n = x.shape[-1]
    powers = (n & -n).bit_length() - 1
    outer, inner = (rotation(size).to(x.device) for size in (1 << powers // 2, n >> powers // 2))
    split = x.unflatten(-1, (outer.shape[0], inner.shape[0]))  # rotation(n) is outer (x) inner; outer is symmetric
    return (outer @ (split @ (inner.T if back else inner))).flatten(-2)


def kept_range(head_dim: int, bits: int) -> float:
    """The share of a vector's range that the codes span; what lies outside goes to the nearest end.

    The longer the vector, the rarer its extremes. On normal vectors the squared error at 4 bits falls by 5 % for 64
    channels, 8 % for 128 and 13 % for 256; a search for each vector's own best gains 3 % more.
    """
    return min(1.0, 1.0 - 0.03 * math.log2(head_dim / 32)) if bits == 4 else 1.0


def step_share(head_dim: int, bits: int) -> float:
    """A step's share of a vector's range."""
    return kept_range(head_dim, bits) / ((1 << bits) - 1)


def quantize(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes uint8 [..., d] and fp16 [..., 2] (step, middle) of x [..., d] (fp32 or narrower)."""
    x = x.float()
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)  # aminmax is not vectorised along rows
    half = 1 << (bits - 1)
    step = ((high - low) * step_share(x.shape[-1], bits)).clamp_min_(_MIN_STEP).to(torch.float16)
    middle = ((low + high) * 0.5 + step.float() * 0.5).to(torch.float16)  # the codes' own centre is half a step lower
    # A difference and then a product: no compiler can fuse them, so the codes are the same everywhere.
    codes = (x - middle.float()).mul_(step.float().reciprocal_()).round_().clamp_(-half, half - 1)
    return codes.to(torch.int8).view(torch.uint8).add_(half), torch.cat((step, middle), -1)


def dequantize(codes: Tensor, step: Tensor, middle: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """The inverse: codes [..., d], step and middle [..., 1] -> values [..., d] in `dtype`, computed in it."""
    half = 1 << (bits - 1)
    step, middle = step.float(), middle.float()
    return codes.to(dtype).mul_(step.to(dtype)).add_((middle - half * step).to(dtype))


def bytes_per_token(head_dim: int, bits: int) -> int:
    """Bytes of one token of one head, key and value, with their scales."""
    return 2 * (head_dim * bits // 8 + (4 if bits < 16 else 0))
