"""KV quantisation: asymmetric, a step and a middle per token and head; keys rotated first.

x ~ (code - 8) * step + middle, with step and middle in fp16. An 8-bit vector is two 4-bit halves side by side, its
high and its low nibbles, with one step and middle, and x = 16 high + low: every 4-bit layout and kernel serves it as a
vector of twice the length, q . k being 16 [q, q / 16] . [high, low]. At 4 bits the range is clipped by a factor of the
head size (`kept_range`), near the least squared error of rotated heads: it depends on the vector's ends alone, so that
every kernel finds the same codes whatever the order of its sums. The rotation (an orthonormal Hadamard matrix) spreads
outlier channels, as in QuaRot (Ashkboos et al., 2024); q and k are both rotated, so q.k does not change.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

_SEVENTEENTH = 1 / 17
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


def width(head_dim: int, bits: int) -> int:
    """4-bit codes of a stored vector, or numbers of one that is stored as it is."""
    return 2 * head_dim if bits == 8 else head_dim


def widen_queries(q: Tensor) -> Tensor:
    """q [..., d] as 8-bit keys take it, [..., 2 d]; their scores are then 16 times too small."""
    return torch.cat((q, q * 0.0625), -1)


def widen(x: Tensor) -> Tensor:
    """Exact keys or values [..., d] beside 8-bit ones, [..., 2 d]: all in the low half."""
    return torch.nn.functional.pad(x, (x.shape[-1], 0))


def join(x: Tensor) -> Tensor:
    """Halves [..., 2 d] as they are read back, or what attention made of them, to vectors [..., d]."""
    high, low = x.chunk(2, -1)
    return torch.add(low, high, alpha=16)


def score_scale(head_dim: int, bits: int) -> float:
    """What a product of a query with a stored key is times, before softmax."""
    return (16 if bits == 8 else 1) * head_dim**-0.5


def quantize(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes uint8 [..., width] and fp16 [..., 2] (step, middle) of x [..., d] (fp32 or narrower)."""
    x = x.float()
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)  # aminmax is not vectorised along rows
    half = 1 << (bits - 1)
    step = ((high - low) * step_share(x.shape[-1], bits)).clamp_min_(_MIN_STEP).to(torch.float16)
    centre = (low + high) * 0.5  # the codes' own centre is half a step lower
    if bits == 4:
        middle = (centre + step.float() * 0.5).to(torch.float16)
        centre = middle.float()
    else:  # the halves' middle m, from x = 16 (high step + m) + low step + m
        middle = ((centre + step.float() * 8.5) * _SEVENTEENTH).to(torch.float16)
        centre = middle.float() * 17 - step.float() * 8  # both products are exact
    # A difference and then a product: no compiler can fuse them, so the codes are the same everywhere.
    codes = (x - centre).mul_(step.float().reciprocal_()).round_().clamp_(-half, half - 1)
    codes = codes.to(torch.int8).view(torch.uint8).add_(half)
    if bits == 8:
        codes = torch.cat((codes >> 4, codes & 15), -1)
    return codes, torch.cat((step, middle), -1)


def dequantize(codes: Tensor, step: Tensor, middle: Tensor, dtype: torch.dtype) -> Tensor:
    """4-bit codes [..., width] with step and middle [..., 1] -> numbers of that shape in `dtype`, computed in it.

    Those of an 8-bit vector are still to be joined.
    """
    step, middle = step.float(), middle.float()
    return codes.to(dtype).mul_(step.to(dtype)).add_((middle - 8 * step).to(dtype))


def bytes_per_token(head_dim: int, bits: int) -> int:
    """Bytes of one token of one head, key and value, with their scales."""
    return 2 * (head_dim * bits // 8 + (4 if bits < 16 else 0))
