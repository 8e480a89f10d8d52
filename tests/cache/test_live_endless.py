"""The endless cache whose length lives on the device, beside the plain one, on the CPU with the reference step."""

import pytest
import torch

from kernels.norm_rope.ref import apply_rope
from models.cache.endless import EndlessCache
from models.cache.live_endless import LiveEndless
from models.cache.shape import CacheShape
from models.config import RopeConfig
from models.rope import EndlessRope, Rope

CPU = torch.device("cpu")
D, LAYERS = 16, 2


def _read(cache, n, seed):
    """Feeds n random tokens as the decoder does."""
    generator = torch.Generator().manual_seed(seed)
    table = cache.rope.table(cache.begin(n))
    outs = []
    for layer in range(LAYERS):
        q, k, v = (torch.randn(n, heads, D, generator=generator) for heads in (6, 3, 3))
        apply_rope(q, table)
        apply_rope(k, table)
        outs.append(cache.attend(layer, q, k, v))
    cache.commit()
    return torch.stack(outs)


@pytest.mark.parametrize(("sink", "recent"), [(4, 12), (0, 5), (3, 1)])
@pytest.mark.parametrize("start", [0, 2, 15, 16, 17, 200])
def test_equals_the_plain_cache_also_when_a_token_is_taken_back(poisoned, start, sink, recent):
    shape = CacheShape((0,) * LAYERS, (3,) * LAYERS, 2, D, sink, recent, 16, torch.float32, torch.float32)
    rope = EndlessRope(Rope(RopeConfig(), D, 512), sink + recent)
    plain, live = EndlessCache(shape, rope, CPU), LiveEndless(shape, rope, CPU)
    if start:
        _read(plain, start, seed=0)
    other = plain.fork()
    live.take(other)
    for n in range(start, start + 40):
        live.catch_up(other)
        assert live.position.tolist() == [n]
        torch.testing.assert_close(_read(live, 1, seed=n), _read(plain, 1, seed=n))
    _read(live, 1, seed=1000)  # taken back: what follows must not notice
    live.give(other, start + 40)
    for n in (7, 1, 1, 20):
        torch.testing.assert_close(_read(other, n, seed=n), _read(plain, n, seed=n))
