"""The endless cache on a GPU, through prefill and decode, against its definition in float64."""

import pytest
import torch

from kernels.norm_rope.ref import apply_rope
from models.cache.endless import EndlessCache
from models.cache.kernels import kernel_report
from models.cache.shape import CacheShape
from models.config import RopeConfig
from models.rope import EndlessRope, Rope
from tests.cache import endless_dense

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize(("head_dim", "group"), [(64, 3), (128, 4)])
@pytest.mark.parametrize(("sink", "recent"), [(4, 60), (0, 200), (3, 1)])
@pytest.mark.parametrize("sizes", [[400], [130] + [1] * 100 + [170]])
def test_equals_its_definition(poisoned, head_dim, group, sink, recent, sizes):
    shape = CacheShape((0, 0), (3, 3), group, head_dim, sink, recent, 16, torch.float16, torch.float16)
    q = torch.randn(2, 400, 3 * group, head_dim) * 2
    k, v = torch.randn(2, 2, 400, 3, head_dim)
    rope = Rope(RopeConfig(), head_dim, 4096)
    device = torch.device("cuda")
    cache = EndlessCache(shape, EndlessRope(rope, sink + recent), device)
    outs, start = [], 0
    for size in sizes:
        table = cache.rope.table(torch.arange(start, start + size), device)
        cache.begin(size)
        layers = []
        for layer in range(2):
            part = [x[layer, start : start + size].cuda() for x in (q, k, v)]
            for heads in part[:2]:
                apply_rope(heads, table)
            layers.append(cache.attend(layer, *part))
        cache.commit()
        outs.append(torch.stack(layers))
        start += size
    out = torch.cat(outs, 1).double().cpu()
    want = torch.stack([endless_dense.attend(shape, rope.table, q[i], k[i], v[i]) for i in range(2)])
    assert {row["kernel"]: row["chosen"] for row in kernel_report(device, shape, endless=True)}[
        "attention_window_step"
    ] == "triton_split"
    assert (out - want).norm() <= 2e-3 * want.norm()
