"""Linear layers: W8A8 (int8 weights per output channel, int8 activations per token) and unquantised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.act_quant import ACT_QUANT
from kernels.act_quant.ref import gated, quantize_rows, turned
from kernels.gemv import GEMV
from kernels.int8_gemm import INT8_GEMM
from kernels.norm_rope import rms_norm
from quant import kv4
from quant.formats import QuantizedWeight


@dataclass(frozen=True)
class Rows:
    """Activations as a linear layer takes them: codes with a scale a token, or plain values (scale None)."""

    values: Tensor
    scale: Tensor | None = None


class Head(Protocol):
    """What the decoder needs of the output head."""

    nbytes: int

    def prepare_normed(self, x: Tensor, weight: Tensor | None, eps: float) -> Rows:
        """RMSNorm(x) of activations x [n, in] (fp32) in this layer's input format."""

    def __call__(self, rows: Rows, dtype: torch.dtype = torch.float32) -> Tensor:
        """[n, out] in `dtype`."""


class Linear(Head, Protocol):
    """What the decoder needs of a linear layer."""

    bias: Tensor | None

    def prepare(self, x: Tensor) -> Rows:
        """Activations x [n, in] (fp32) in this layer's input format; layers with the same input may share them."""

    def prepare_gated(self, product: Tensor, scale: Tensor | None, turn: Tensor | None) -> Rows:
        """As `prepare` of silu(gate) * up, every b channels rotated by turn [b, b]; product [n, 2 in] is used up.

        scale [n, 1]: the product's factor a token, where `raw` left it out.
        """

    def gated(self, rows: Rows) -> Tensor | None:
        """silu(gate) * up [n, out / 2] of the halves of the output, where that is one pass; else None."""

    def prepare_turned(self, x: Tensor, turn: Tensor | None) -> Rows:
        """As `prepare` of x [n, in], which is used up, with every b channels rotated by turn [b, b]."""

    def write_to(self, out: Tensor, rows: Rows) -> None:
        """out [n, out] = the layer's output."""

    def raw(self, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """The product before its scale a token [n, 1] and the bias, and that scale, for callers that fold it."""

    def add_to(self, total: Tensor, rows: Rows) -> None:
        """total [n, out] += the layer's output."""


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes [out, in] and fp32 scale [out] of a weight [out, in], symmetric, nearest."""
    codes, scale = quantize_rows(weight.float())
    return codes, scale[:, 0].contiguous()


class W8A8Linear:
    """y = x W^T + b with both sides in int8 and an exact int32 sum; W8A8 as in SmoothQuant (Xiao et al., 2023)."""

    def __init__(self, codes: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        self._gemm = INT8_GEMM.choose(codes.device).backend.run
        self._gemv = GEMV.choose(codes.device, dtype=codes.dtype, width=codes.shape[1]).backend.run
        self._quant = ACT_QUANT.choose(codes.device).backend.run
        self._narrow = codes.is_cuda and hasattr(self._gemm, "product")  # a GPU's product need not be in fp32
        self._weight = self._gemm.prepack(codes)
        self._scale = scale
        self.bias = None if bias is None else bias.float()
        self.nbytes = codes.numel() + 4 * scale.numel() + (0 if bias is None else 4 * bias.numel())

    @classmethod
    def from_float(cls, weight: Tensor | QuantizedWeight, bias: Tensor | None = None) -> W8A8Linear:
        """Quantises a float weight [out, in]; one that is in int8 already stays as it is."""
        if isinstance(weight, QuantizedWeight):
            return cls(weight.codes, weight.scale, bias)
        return cls(*quantize_weight(weight), bias)

    def prepare(self, x: Tensor) -> Rows:
        return Rows(*self._quant.quantize_rows(x))

    def prepare_normed(self, x: Tensor, weight: Tensor | None, eps: float) -> Rows:
        return Rows(*self._quant.rms_norm_quantize(x, weight, eps))

    def prepare_gated(self, product: Tensor, scale: Tensor | None, turn: Tensor | None) -> Rows:
        return Rows(*self._quant.gated_quantize(product, scale, turn))

    def gated(self, rows: Rows) -> Tensor | None:
        if (
            self._one(rows)
            or not hasattr(self._gemm, "gated_product")
            or self.bias is not None
            or self._scale.shape[0] % 32
        ):
            return None
        out: Tensor | None = self._gemm.gated_product(rows.values, rows.scale, self._weight, self._scale)
        return out

    def prepare_turned(self, x: Tensor, turn: Tensor | None) -> Rows:
        return Rows(*self._quant.turned_quantize(x, turn))

    def write_to(self, out: Tensor, rows: Rows) -> None:
        if hasattr(self._gemm, "write_product_"):
            self._gemm.write_product_(out, rows.values, rows.scale, self._weight, self._scale, self.bias)
        else:
            out.copy_(self(rows))

    def raw(self, rows: Rows) -> tuple[Tensor, Tensor | None]:
        if self._one(rows):
            return self._gemv.multiply(rows.values, self._weight, self._scale, rows.scale), None
        if self._narrow:
            return self._gemm.product(rows.values, rows.scale, self._weight, self._scale, None, torch.bfloat16), None
        return self._gemm.matmul(rows.values, self._weight, self._scale), rows.scale

    def _one(self, rows: Rows) -> bool:
        """Whether the kernel for one row serves; it reads the weight as `prepack` leaves it on a GPU, row by row."""
        return self._gemv.ONE_ROW and rows.values.shape[0] == 1

    def add_to(self, total: Tensor, rows: Rows) -> None:
        if self._one(rows):
            self._gemv.multiply(rows.values, self._weight, self._scale, rows.scale, self.bias, total)
        elif hasattr(self._gemm, "add_product_"):
            self._gemm.add_product_(total, rows.values, rows.scale, self._weight, self._scale, self.bias)
        else:
            _add(total, *self.raw(rows), self.bias)

    def __call__(self, rows: Rows, dtype: torch.dtype = torch.float32) -> Tensor:
        product: Tensor
        if self._one(rows):
            product = self._gemv.multiply(rows.values, self._weight, self._scale, rows.scale, self.bias)
            return product.to(dtype)
        if hasattr(self._gemm, "product"):
            wanted = () if dtype == torch.float32 else (dtype,)
            product = self._gemm.product(rows.values, rows.scale, self._weight, self._scale, self.bias, *wanted)
            return product
        out, scale = self.raw(rows)
        if scale is not None:
            out.mul_(scale)
        return (out if self.bias is None else out.add_(self.bias)).to(dtype)


class W8A8Head:
    """The output head in int8, with the likeliest tokens computed again from the unquantised weight.

    What decides an answer is then exact, at a quarter of the bytes read.
    """

    _AGAIN = 64  # tokens a row; int8 moves a logit by far less than what separates the first from the 64th

    def __init__(self, weight: Tensor) -> None:
        self._exact = weight
        # Turned as the layers are: what is read here has a few large channels, which would take the others' codes.
        turned = (kv4.rotate(rows.float()) for rows in weight.split(8192))
        codes = QuantizedWeight.join([QuantizedWeight(*quantize_weight(rows)) for rows in turned])
        self._coarse = W8A8Linear.from_float(codes)
        self.nbytes = weight.nbytes + self._coarse.nbytes

    def prepare_normed(self, x: Tensor, weight: Tensor | None, eps: float) -> Rows:
        return Rows(rms_norm(x, weight, eps))

    def __call__(self, rows: Rows, dtype: torch.dtype = torch.float32) -> Tensor:
        logits = self._coarse(self._coarse.prepare(kv4.rotate(rows.values)))
        best = logits.topk(min(self._AGAIN, logits.shape[-1]), -1, sorted=False).indices
        again = torch.einsum("nki,ni->nk", self._exact[best].float(), rows.values)
        return logits.scatter_(-1, best, again).to(dtype)


class DenseLinear:
    """y = x W^T + b in the weight's own dtype, given back in fp32."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = weight
        self._gemv = GEMV.choose(weight.device, dtype=weight.dtype, width=weight.shape[1]).backend.run
        self.bias = None if bias is None else bias.float()
        self.nbytes = weight.nbytes + (0 if bias is None else 4 * bias.numel())

    def prepare(self, x: Tensor) -> Rows:
        return Rows(x.to(self._weight.dtype))

    def prepare_normed(self, x: Tensor, weight: Tensor | None, eps: float) -> Rows:
        return Rows(rms_norm(x, weight, eps).to(self._weight.dtype))

    def prepare_gated(self, product: Tensor, scale: Tensor | None, turn: Tensor | None) -> Rows:
        out = gated(product, scale, turn)
        return Rows((out if scale is None else out.mul_(scale)).to(self._weight.dtype))

    def gated(self, rows: Rows) -> Tensor | None:
        return None

    def prepare_turned(self, x: Tensor, turn: Tensor | None) -> Rows:
        return self.prepare(turned(x, turn))

    def write_to(self, out: Tensor, rows: Rows) -> None:
        out.copy_(self(rows))

    def raw(self, rows: Rows) -> tuple[Tensor, Tensor | None]:
        if self._gemv.ONE_ROW and rows.values.shape[0] == 1 and not rows.values.requires_grad:  # it has no backward
            return self._gemv.multiply(rows.values, self._weight), None
        out = F.linear(rows.values, self._weight)
        return out if out.is_cuda else out.float(), None

    def add_to(self, total: Tensor, rows: Rows) -> None:
        _add(total, *self.raw(rows), self.bias)

    def __call__(self, rows: Rows, dtype: torch.dtype = torch.float32) -> Tensor:
        out = self.raw(rows)[0].to(dtype)
        return out if self.bias is None else out.add_(self.bias)


def _add(total: Tensor, product: Tensor, scale: Tensor | None, bias: Tensor | None) -> None:
    if scale is None:
        total += product
    else:
        total.addcmul_(product, scale)
    if bias is not None:
        total += bias


def dense_dtype(device: torch.device) -> torch.dtype:
    """dtype of embedding and head: fp32 on a CPU, where bf16 logits would tie and gain no time."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def int8_head(device: torch.device) -> bool:
    """Whether W8A8 has an int8 head beside the unquantised one: on a CPU time is short, on a GPU memory is."""
    return device.type == "cpu"
