"""KV quantisation: the error is within half a step, rotation is orthonormal, extremes stay finite."""

import pytest
import torch

from quant import kv4


@pytest.mark.parametrize("size", [2, 16, 64, 80, 96, 128, 256, 576])
def test_rotation_is_orthonormal_and_spreads(size):
    matrix = kv4.rotation(size)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size), rtol=0, atol=1e-5)
    if size & (size - 1) == 0:
        torch.testing.assert_close(matrix.abs(), torch.full((size, size), size**-0.5), rtol=0, atol=1e-6)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", ["normal", "outlier", "constant", "zero", "tiny", "large", "offset"])
def test_error_is_within_half_a_step(bits, kind):
    x = torch.randn(5, 7, 64)
    x = {
        "normal": x,
        "outlier": torch.where(torch.arange(64) == 3, 100.0, x),
        "constant": torch.full_like(x, 3.7),
        "zero": torch.zeros_like(x),
        "tiny": x * 1e-7,
        "large": x * 5000,
        "offset": x + 1000,
    }[kind]
    codes, scales = kv4.quantize(x, bits)
    step, middle = scales.float().split(1, -1)
    assert codes.dtype == torch.uint8 and codes.int().max() < 2**bits
    back = kv4.dequantize(codes, scales[..., :1], scales[..., 1:], bits, torch.float32)
    assert back.isfinite().all()
    # half a step, and what rounding step and middle to fp16 can move the ends of the range
    half = 2 ** (bits - 1)
    bound = step / 2 + middle.abs() * 2**-10 + half * step * 2**-10 + 2.0**-20
    assert ((back - x).abs() <= bound).all()


def test_rotation_helps_where_one_channel_is_an_outlier():
    x = torch.randn(200, 64)
    x[:, 5] *= 40
    turned = x @ kv4.rotation(64)

    def error(t):
        codes, s = kv4.quantize(t, 4)
        return (kv4.dequantize(codes, s[..., :1], s[..., 1:], 4, torch.float32) - t).norm()

    assert error(turned) < 0.6 * error(x)


def test_bytes_per_token_of_the_stated_shape():
    assert kv4.bytes_per_token(128, 4) * 128 == 17_408
