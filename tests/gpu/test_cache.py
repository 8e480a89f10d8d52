"""The packed cache on a GPU, through prefill and decode, against the naive dense one in float64."""

import pytest
import torch

from models.cache.duo import DuoCache
from models.cache.pool import BlockPool
from models.cache.shape import CacheShape
from tests.cache import dense

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize(("head_dim", "group"), [(128, 4), (64, 3)])
@pytest.mark.parametrize("sizes", [[300] + [1] * 340, [640], [130, 1, 253, 1, 1, 126, 128]])
def test_kv4_cache_equals_the_dense_one(poisoned, head_dim, group, sizes):
    shape = CacheShape((2, 1), (1, 2), group, head_dim, 16, 100, 4, torch.float16, torch.float16)
    q = torch.randn(2, 640, 3 * group, head_dim) * 2
    k, v = torch.randn(2, 2, 640, 3, head_dim)
    pool = BlockPool(shape, 16, torch.device("cuda"))
    hole = pool.allocate(3)
    pool.release([hole[1]])
    cache = DuoCache(pool)
    outs, start = [], 0
    for size in sizes:
        cache.begin(size)
        part = slice(start, start + size)
        outs.append(torch.stack([cache.attend(i, *(x[i, part].cuda() for x in (q, k, v))) for i in range(2)]))
        cache.commit()
        start += size
    out = torch.cat(outs, 1).double().cpu()
    want = torch.stack([dense.attend(shape, i, q[i], k[i], v[i]) for i in range(2)])
    assert pool.layout.__name__ == "kernels.kv4_pack.fragment"
    assert (out - want).norm() <= 2e-3 * want.norm()
