"""bitsandbytes' LLM.int8 (Dettmers et al., 2022) as a linear layer: int8 with outlier channels in 16 bits; optional."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from kernels.act_quant.ref import gated
from kernels.norm_rope import rms_norm
from quant.formats import QuantizedWeight
from quant.w8a8 import Rows

_THRESHOLD = 6.0  # inputs beyond it count as outliers, as in the paper


def missing() -> str | None:
    """Why it cannot serve, or None."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return "bitsandbytes is not installed"
    return None


class LlmInt8Linear:
    """y = x W^T + b by bitsandbytes; activations stay unquantised until its own product."""

    def __init__(self, weight: Tensor | QuantizedWeight, bias: Tensor | None = None) -> None:
        from bitsandbytes.nn import Int8Params, Linear8bitLt

        plain = weight.dequantize() if isinstance(weight, QuantizedWeight) else weight
        rows, columns = plain.shape
        self._dtype = torch.float16 if plain.is_cuda else torch.float32
        self._layer = Linear8bitLt(columns, rows, bias=False, has_fp16_weights=False, threshold=_THRESHOLD)
        self._layer.weight = Int8Params(plain.half().cpu(), requires_grad=False, has_fp16_weights=False)
        self._layer = self._layer.to(plain.device)
        self.bias = None if bias is None else bias.float()
        self.nbytes = rows * columns + 4 * rows + (0 if bias is None else 4 * bias.numel())

    def prepare(self, x: Tensor) -> Rows:
        """As Linear.prepare."""
        return Rows(x.to(self._dtype))

    def prepare_normed(self, x: Tensor, weight: Tensor | None, eps: float) -> Rows:
        """As Linear.prepare_normed."""
        return Rows(rms_norm(x, weight, eps).to(self._dtype))

    def prepare_gated(self, product: Tensor, scale: Tensor | None, turn: Tensor | None) -> Rows:
        """As Linear.prepare_gated."""
        out = gated(product, scale, turn)
        return Rows((out if scale is None else out.mul_(scale)).to(self._dtype))

    def raw(self, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """As Linear.raw."""
        return self._layer(rows.values).float(), None

    def __call__(self, rows: Rows) -> Tensor:
        """As Linear.__call__."""
        out, _ = self.raw(rows)
        return out if self.bias is None else out + self.bias

    def add_to(self, total: Tensor, rows: Rows) -> None:
        """As Linear.add_to."""
        total += self(rows)
