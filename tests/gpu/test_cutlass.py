"""CUTLASS's product, that ours is compared with, against exact sums: every kernel, and edges in both directions."""

import pytest
import torch

from benchmarks import _cutlass as cutlass
from kernels.int8_gemm import ref

CUDA = torch.device("cuda")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize(("rows", "inner", "outer"), [(1, 16, 8), (700, 576, 1000), (2049, 4096, 528)])
def test_products(poisoned, rows, inner, outer):
    if why := cutlass.declines(CUDA):
        pytest.skip(why)
    codes = torch.randint(-127, 128, (rows, inner), dtype=torch.int8, device=CUDA)
    weight = torch.randint(-127, 128, (outer, inner), dtype=torch.int8, device=CUDA)
    codes[0], weight[0] = 127, 127  # the largest sum
    token, scale = torch.rand(rows, 1, device=CUDA) + 0.1, torch.rand(outer, device=CUDA) + 0.1
    want = ref.matmul(codes, weight, scale).double() * token
    for name, run in cutlass.products(codes, token, weight, scale).items():
        out = run()
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.double(), want, rtol=2**-8, atol=0, msg=name)
    with pytest.raises(RuntimeError, match="CUTLASS: "):
        next(iter(cutlass.products(codes[:, :-8].contiguous(), token, weight[:, :-8].contiguous(), scale).values()))()
