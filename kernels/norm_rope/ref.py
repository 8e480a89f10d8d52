"""RMSNorm, rotary position embedding and the rotation of heads in plain torch."""

from collections.abc import Sequence

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x [..., d] / sqrt(mean(x^2) + eps) * weight [d] (None: ones) (Zhang and Sennrich, 2019)."""
    inverse = (torch.linalg.vector_norm(x, 2, -1, keepdim=True).square_() / x.shape[-1] + eps).rsqrt_()
    return x * inverse if weight is None else x * inverse * weight


def apply_rope(x: Tensor, table: Tensor) -> None:
    """Rotates adjacent pairs of x [n, heads, d] (fp32) by table [n, d / 2] (complex64), in place (Su et al., 2021)."""
    torch.view_as_complex(x.unflatten(-1, (-1, 2))).mul_(table[:, None])


def place(
    heads: Tensor,
    table: Tensor,
    placed: int,
    turned: Sequence[tuple[int, int]],
    turn: Tensor,
    keys: int = 0,
    centre: Tensor | None = None,
) -> None:
    """Positions for the first `placed` of heads [n, h, d] (fp32), then some heads times turn [d, d]; in place.

    table as for `apply_rope`; turned: first head and number of each stretch to turn. centre [m, d] (fp32) is then
    subtracted from the m heads from number `keys` on, all of which are turned.
    """
    apply_rope(heads[:, :placed], table)
    for start, count in turned:
        part = heads[:, start : start + count]
        part.copy_(part @ turn)
    if centre is not None:
        heads[:, keys : keys + len(centre)] -= centre
