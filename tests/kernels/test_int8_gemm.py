"""int8 product: every backend that serves here gives the exact integer sum, on odd shapes and extreme codes."""

import time

import pytest
import torch

from kernels.int8_gemm import INT8_GEMM, int_mm, ref

CPU = torch.device("cpu")


@pytest.mark.parametrize("backend", [b for b in INT8_GEMM.backends if b.declines(CPU) is None], ids=lambda b: b.name)
@pytest.mark.parametrize(("rows", "inner", "outer"), [(1, 16, 8), (3, 37, 53), (129, 576, 961), (512, 1536, 64)])
def test_equals_integer_arithmetic(backend, rows, inner, outer):
    codes = torch.randint(-127, 128, (rows, inner), dtype=torch.int8)
    weight = torch.randint(-127, 128, (outer, inner), dtype=torch.int8)
    codes[0], weight[0] = 127, 127  # the largest sum
    if rows > 1:
        codes[1] = -127
    scale = torch.rand(outer) + 0.1
    exact = (codes.long() @ weight.long().T).float() * scale
    assert torch.equal(ref.matmul(codes, weight, scale), exact)
    out = backend.run.matmul(codes, backend.run.prepack(weight), scale)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("rows", [1, 128])
def test_what_serves_here_is_no_loop(rows):
    """Libraries fall back to one where a processor lacks what they are made for: 0.1 Gop/s were seen."""
    backend = INT8_GEMM.choose(CPU).backend.run
    codes, weight = torch.ones(rows, 1024, dtype=torch.int8), torch.ones(4096, 1024, dtype=torch.int8)
    ready, scale = backend.prepack(weight), torch.ones(4096)
    seconds = []
    for _ in range(3):
        begin = time.process_time()
        backend.matmul(codes, ready, scale)
        seconds.append(time.process_time() - begin)
    assert min(seconds) < 0.05 + rows * 0.005  # 128 rows: 0.02 s with VNNI, 0.06 in fp32, 10 in such a loop


def test_a_product_of_gpus_declines_a_cpu():
    assert "CUDA" in (int_mm.declines(CPU) or "")
