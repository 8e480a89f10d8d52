"""The int8 product for Hopper against exact sums: edges in every direction, each kind of result."""

import pytest
import torch

from kernels.int8_gemm import ref, wgmma

CUDA = torch.device("cuda")
WHY = wgmma.declines(CUDA) if torch.cuda.is_available() else "needs a CUDA GPU"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(WHY is not None, reason=str(WHY))]
SHAPES = [(512, 128, 256), (513, 144, 8), (700, 576, 1000), (2049, 4096, 528), (5000, 2064, 6144), (8192, 14_336, 4096)]


def _operands(rows, inner, outer):
    codes = torch.randint(-127, 128, (rows, inner), dtype=torch.int8, device=CUDA)
    weight = torch.randint(-127, 128, (outer, inner), dtype=torch.int8, device=CUDA)
    codes[0], weight[0] = 127, 127  # the largest sum
    codes[-1], weight[-1] = -127, 127
    token, scale = torch.rand(rows, 1, device=CUDA) + 0.1, torch.rand(outer, device=CUDA) + 0.1
    return codes, token, weight, scale, torch.randn(outer, device=CUDA) * 100


def _error(out, want):
    return float((out.double() - want).norm() / want.norm())


@pytest.mark.parametrize(("rows", "inner", "outer"), SHAPES)
def test_products(poisoned, rows, inner, outer):
    codes, token, weight, scale, bias = _operands(rows, inner, outer)
    assert wgmma._serves(codes, weight)
    plain = ref.matmul(codes, weight, scale).double()
    torch.testing.assert_close(wgmma.matmul(codes, weight, scale).double(), plain, rtol=1e-6, atol=0)
    want = plain * token
    torch.testing.assert_close(wgmma.product(codes, token, weight, scale, None).double(), want, rtol=1e-6, atol=0)
    want += bias
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 4e-3)):
        assert _error(wgmma.product(codes, token, weight, scale, bias, dtype), want) < bound
    small = wgmma.product(codes, token, weight, scale * 1e-4, None, torch.float16)
    assert _error(small, plain * token * 1e-4) < 1e-3
    total = torch.randn(rows, outer, device=CUDA) * 1e6
    sum_of_both = total.double() + want
    wgmma.add_product_(total, codes, token, weight, scale, bias)
    assert _error(total, sum_of_both) < 1e-6


@pytest.mark.parametrize(("rows", "inner", "outer"), [(512, 128, 256), (700, 576, 1008), (2049, 4096, 28_672)])
def test_a_gated_product(poisoned, rows, inner, outer):
    codes, token, weight, scale, _ = _operands(rows, inner, outer)
    scale *= 1e-5
    gate, up = (ref.matmul(codes, weight, scale).double() * token).chunk(2, 1)
    want = torch.nn.functional.silu(gate) * up
    assert _error(wgmma.gated_product(codes, token, weight, scale), want) < 4e-3


def test_what_it_does_not_serve_goes_to_the_next(poisoned):
    codes, token, weight, scale, bias = _operands(600, 136, 256)  # rows that are no multiple of 16 bytes
    want = ref.matmul(codes, weight, scale).double() * token + bias
    assert _error(wgmma.product(codes, token, weight, scale, bias), want) < 1e-6
    assert wgmma.gated_product(codes, token, weight, scale) is None
    assert _error(wgmma.product(codes[:3], token[:3], weight, scale, bias), want[:3]) < 1e-6
