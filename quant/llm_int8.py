"""bitsandbytes' LLM.int8 (Dettmers et al., 2022) as a linear layer: int8 with outlier channels in 16 bits; optional."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from quant.formats import QuantizedWeight, as_float
from quant.w8a8 import DenseLinear, Rows

_THRESHOLD = 6.0  # inputs beyond it count as outliers, as in the paper


def missing() -> str | None:
    """Why it cannot serve, or None."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return "bitsandbytes is not installed"
    return None


class LlmInt8Linear(DenseLinear):
    """y = x W^T + b by bitsandbytes; activations stay unquantised until its own product."""

    def __init__(self, weight: Tensor | QuantizedWeight, bias: Tensor | None = None) -> None:
        from bitsandbytes.nn import Int8Params, Linear8bitLt

        plain = as_float(weight)
        rows, columns = plain.shape
        # Of the dense layer only its dtype is used: what this product takes.
        super().__init__(plain.new_empty(0, columns, dtype=torch.float16 if plain.is_cuda else torch.float32), bias)
        self._layer = Linear8bitLt(columns, rows, bias=False, has_fp16_weights=False, threshold=_THRESHOLD)
        self._layer.weight = Int8Params(plain.half().cpu(), requires_grad=False, has_fp16_weights=False)
        self._layer = self._layer.to(plain.device)
        self.nbytes += rows * columns + 4 * rows

    def raw(self, rows: Rows) -> tuple[Tensor, Tensor | None]:
        return self._layer(rows.values).float(), None
