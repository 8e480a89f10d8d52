"""Linear layers: W8A8 within its bound of the float product; folding scales changes nothing."""

import pytest
import torch

from kernels.act_quant.ref import quantize_rows, rms_norm_quantize
from kernels.norm_rope import rms_norm
from quant import kv4
from quant.w8a8 import DenseLinear, Rows, W8A8Head, W8A8Linear, quantize_weight


def test_codes_are_within_half_a_step_and_symmetric():
    x = torch.randn(9, 65)
    x[3] = 0
    codes, scale = quantize_rows(x)
    assert codes.abs().max() == 127 and scale.shape == (9, 1)
    assert ((codes * scale - x).abs() <= scale / 2 * (1 + 1e-5)).all()
    assert (codes[3] == 0).all()


def test_norm_and_quantise_in_one_go_is_the_same_as_one_after_the_other():
    x, weight = torch.randn(7, 96) * 30, torch.rand(96) + 0.5
    codes, scale = rms_norm_quantize(x, weight, 1e-5)
    normed = rms_norm(x, weight, 1e-5)
    assert ((codes * scale - normed).abs() <= scale / 2 * (1 + 1e-4)).all()


@pytest.mark.parametrize("bias", [False, True])
def test_w8a8_is_the_product_of_its_codes(bias):
    weight, x = torch.randn(37, 53), torch.randn(11, 53)
    b = torch.randn(37) if bias else None
    layer = W8A8Linear.from_float(weight, b)
    codes, scale = quantize_weight(weight)
    x_codes, x_scale = quantize_rows(x)
    want = (x_codes.double() * x_scale) @ (codes.double() * scale[:, None]).T + (0 if b is None else b)
    torch.testing.assert_close(layer(layer.prepare(x)).double(), want, rtol=1e-5, atol=1e-4)
    assert (want - (x @ weight.T + (0 if b is None else b))).norm() < 0.02 * want.norm()


@pytest.mark.parametrize("kind", [W8A8Linear.from_float, DenseLinear])
@pytest.mark.parametrize("bias", [False, True])
def test_adding_a_product_equals_the_sum(kind, bias):
    layer = kind(torch.randn(24, 32), torch.randn(24) if bias else None)
    total, rows = torch.randn(5, 24), layer.prepare(torch.randn(5, 32))
    want = total + layer(rows)
    layer.add_to(total, rows)
    torch.testing.assert_close(total, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [W8A8Linear.from_float, DenseLinear])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("block", [0, 16])
def test_a_gated_and_turned_input_gives_the_plain_product(kind, scaled, block):
    weight, product = torch.randn(24, 48) / 7, torch.randn(5, 96) * 3
    scale = torch.rand(5, 1) + 0.5 if scaled else None
    gate, up = (product if scale is None else product * scale).chunk(2, 1)
    want = torch.nn.functional.silu(gate) * up @ weight.T
    turn = kv4.rotation(block) if block else None
    layer = kind(weight if turn is None else (weight.unflatten(1, (-1, block)) @ turn).flatten(1))
    got = layer(layer.prepare_gated(product.clone(), scale, turn))
    assert (got - want).norm() < (0.02 if kind == W8A8Linear.from_float else 1e-5) * want.norm()


def test_the_int8_head_decides_as_the_unquantised_one():
    weight, x = torch.randn(3000, 48), torch.randn(20, 48) * 3
    head = W8A8Head(weight)
    exact = x @ weight.T
    logits = head(Rows(x))
    best = exact.topk(20, -1).indices
    torch.testing.assert_close(logits.gather(-1, best), exact.gather(-1, best), rtol=1e-5, atol=1e-4)
    assert torch.equal(logits.argmax(-1), exact.argmax(-1))
    assert (logits - exact).norm() < 0.02 * exact.norm()
