"""Attention of many queries over a long stretch of keys: every backend that serves here against the reference."""

import pytest
import torch

from kernels.attention_prefill import ROWS, ref

CUDA = torch.device("cuda")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize("backend", ROWS.backends, ids=lambda backend: backend.name)
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2), (16, 2)])
@pytest.mark.parametrize(("n", "m", "causal"), [(1, 5, False), (300, 1000, False), (128, 128, True), (77, 1300, True)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_equals_the_reference(poisoned, backend, heads, kv_heads, n, m, causal, dtype):
    if (reason := backend.declines(CUDA, head_dim=128, dtype=dtype)) is not None:
        pytest.skip(reason)
    q = torch.randn(n, heads, 128, device=CUDA, dtype=dtype)
    k, v = torch.randn(2, kv_heads, m, 128, device=CUDA, dtype=dtype)
    out, lse = backend.run.attend(q, k, v, scale=0.1, causal=causal)
    want, want_lse = ref.attend_rows(q.float(), k.float(), v.float(), scale=0.1, causal=causal)
    assert (out.float() - want).norm() < 1e-2 * want.norm()
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=2e-3)
