"""KV quantisation: the error is within half a step, rotation is orthonormal, extremes stay finite."""

import pytest
import torch

from quant import kv4


def _back(codes, scales, bits):
    """What is read of a vector."""
    x = kv4.dequantize(codes, scales[..., :1], scales[..., 1:], torch.float32)
    return kv4.join(x) if bits == 8 else x


def _whole(codes, scales, bits):
    """Codes of `bits` bits, step and middle, however they are stored."""
    step, middle = scales.split(1, -1)
    if bits == 4:
        return codes, step, middle
    return codes[..., :64] * 16 + codes[..., 64:], step, 17 * middle - 8 * step


@pytest.mark.parametrize("size", [2, 16, 64, 80, 96, 128, 256, 576])
def test_rotation_is_orthonormal_and_spreads(size):
    matrix = kv4.rotation(size)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size), rtol=0, atol=1e-5)
    if size & (size - 1) == 0:
        torch.testing.assert_close(matrix.abs(), torch.full((size, size), size**-0.5), rtol=0, atol=1e-6)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", ["normal", "outlier", "constant", "zero", "tiny", "large", "offset"])
def test_error_is_within_half_a_step_inside_the_range(bits, kind):
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
    assert codes.dtype == torch.uint8 and codes.int().max() < 16 and codes.shape[-1] == kv4.width(64, bits)
    back = _back(codes, scales, bits)
    assert back.isfinite().all()
    codes, step, middle = _whole(codes, scales.float(), bits)
    # half a step, and what rounding step and middle to fp16 can move the ends of the range
    half = 2 ** (bits - 1)
    bound = step / 2 + middle.abs() * 2**-10 + half * step * 2**-10 + 2.0**-20
    clipped = (x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)) * (1 - kv4.kept_range(64, bits)) / 2
    inside = (codes > 0) & (codes < 2 * half - 1)
    assert ((back - x).abs() <= bound + torch.where(inside, 0, clipped)).all()


@pytest.mark.parametrize("d", [64, 96, 128, 256])
def test_clipping_lowers_the_error_of_rotated_heads(d):
    x = torch.randn(2000, d)

    def error(share):
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        step, centre = (high - low) * share / 15, (low + high) / 2
        return (((x - centre) / step - 0.5).round().clamp(-8, 7) * step + centre + step / 2 - x).square().mean()

    ours = (_back(*kv4.quantize(x, 4), 4) - x).square().mean()
    assert ours < 0.97 * error(1.0)
    assert ours < 1.05 * min(error(share / 100) for share in range(80, 101))
    assert kv4.kept_range(16, 4) == 1 and kv4.kept_range(d, 8) == 1


def test_codes_are_the_nearest_to_the_stored_scales():
    """Bit for bit what float64 says of the stored step and middle: fast kernels are held to the same codes."""
    x = torch.randn(300, 64) * torch.rand(300, 1) * 50 + torch.randn(300, 1) * 20
    for bits in (4, 8):
        codes, s = kv4.quantize(x, bits)
        codes, step, middle = _whole(codes, s.double(), bits)
        place = (x.double() - middle) / step
        tie = ((place - place.floor()) - 0.5).abs() < 1e-4
        want = (place.round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) + 2 ** (bits - 1)).to(torch.uint8)
        assert torch.equal(codes[~tie], want[~tie])
        assert tie.float().mean() < 0.001


def test_rotation_helps_where_one_channel_is_an_outlier():
    x = torch.randn(200, 64)
    x[:, 5] *= 40
    turned = x @ kv4.rotation(64)

    def error(t):
        return (_back(*kv4.quantize(t, 4), 4) - t).norm()

    assert error(turned) < 0.6 * error(x)


def test_bytes_per_token_of_the_stated_shape():
    assert kv4.bytes_per_token(128, 4) * 128 == 17_408


@pytest.mark.parametrize("d", [16, 64, 128])
def test_scores_and_sums_of_halves_are_those_of_whole_vectors(d):
    x, q = torch.randn(50, d) * 3 + 1, torch.randn(7, d)
    codes, s = kv4.quantize(x, 8)
    halves = kv4.dequantize(codes, s[..., :1], s[..., 1:], torch.float32)
    back = kv4.join(halves)
    assert (back - x).norm() < 0.006 * x.norm()
    scores = kv4.widen_queries(q) @ halves.T * kv4.score_scale(d, 8)
    torch.testing.assert_close(scores, q @ back.T * d**-0.5, rtol=1e-5, atol=1e-5)
    exact = kv4.widen_queries(q) @ kv4.widen(x).T * kv4.score_scale(d, 8)
    torch.testing.assert_close(exact, q @ x.T * d**-0.5, rtol=1e-5, atol=1e-5)
    weights = torch.rand(4, 50)
    torch.testing.assert_close(kv4.join(weights @ halves), weights @ back, rtol=1e-5, atol=1e-4)
    assert torch.equal(kv4.join(kv4.widen(x)), x)
    assert kv4.bytes_per_token(d, 8) == kv4.bytes_per_token(2 * d, 4)
