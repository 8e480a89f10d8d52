"""One row as if it were many: the truth for the fast kernel, which serves where one row has no kernel of its own."""

from __future__ import annotations

from torch import Tensor

ONE_ROW = False  # callers take their product for many rows instead


def multiply(
    x: Tensor,
    weight: Tensor,
    channels: Tensor | None = None,
    token: Tensor | None = None,
    bias: Tensor | None = None,
    total: Tensor | None = None,
) -> Tensor:
    """fp32 [1, out] = x [1, in] weight [out, in]^T * channels [out] * token [1, 1] + bias [out], added to `total`.

    x and weight are both int8 (the sum is exact) or both bf16 (summed in fp32). With `total` [1, out] it is changed in
    place and given back.
    """
    out = (x.double() @ weight.double().T).float()
    for factor in (channels, token):
        out = out if factor is None else out * factor
    out = out if bias is None else out + bias
    return out if total is None else total.add_(out)
