"""The optional bitsandbytes backend, where it is installed."""

import pytest
import torch

from quant import llm_int8
from quant.formats import QuantizedWeight
from quant.llm_int8 import LlmInt8Linear
from quant.w8a8 import W8A8Linear, quantize_weight


@pytest.mark.skipif(llm_int8.missing() is not None, reason="needs bitsandbytes")
@pytest.mark.parametrize("bias", [False, True])
def test_it_is_close_to_the_product_and_takes_outliers_in_16_bits(bias):
    weight, x = torch.randn(48, 64) * 0.1, torch.randn(33, 64)
    b = torch.randn(48) if bias else None
    want = x @ weight.T + (0 if b is None else b)
    layer = LlmInt8Linear(weight, b)
    assert (layer(layer.prepare(x)) - want).norm() < 0.02 * want.norm()
    total = torch.ones(33, 48)
    layer.add_to(total, layer.prepare(x))
    torch.testing.assert_close(total, 1 + layer(layer.prepare(x)))
    x[:, 5] *= 100
    want, ours = x @ weight.T, W8A8Linear.from_float(weight)
    layer = LlmInt8Linear(QuantizedWeight(*quantize_weight(weight)))
    assert (layer(layer.prepare(x)) - want).norm() < (ours(ours.prepare(x)) - want).norm()


def test_it_says_why_it_cannot_serve(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert llm_int8.missing() == "bitsandbytes is not installed"
