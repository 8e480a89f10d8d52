"""The cache whose length lives on the device, step by step beside the plain one, on the CPU with the reference step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.attention_decode import Clock
from models.cache.duo import DuoCache
from models.cache.live import LiveCache, clock_at
from models.cache.pool import BlockPool
from models.cache.shape import CacheShape

SHAPE = CacheShape((2, 0, 1), (1, 3, 2), 2, 64, 8, 40, 4, torch.float16, torch.float32)
SMALLER = replace(SHAPE, block=64, front=16)


def _token(heads: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(3, 1, 2 * heads, 64), torch.randn(3, 1, heads, 64), torch.randn(3, 1, heads, 64)


def _step(cache, q, k, v):
    position = int(cache.begin(1))
    out = torch.stack([cache.attend(i, q[i], k[i], v[i]) for i in range(3)])
    cache.commit()
    return position, out


@pytest.mark.parametrize("start", [0, 1, 47, 127, 300, 383])
@pytest.mark.parametrize(("bits", "wide"), [(4, ()), (4, (1, 0, 1)), (4, (2, 0, 0)), (8, ())])
@pytest.mark.parametrize(("block", "front"), [(128, 128), (64, 16)])
def test_equals_the_plain_cache_through_full_blocks_and_a_token_taken_back(poisoned, start, bits, wide, block, front):
    pool = BlockPool(replace(SHAPE, bits=bits, wide_heads=wide, block=block, front=front), 24, torch.device("cpu"))
    pool.release(pool.allocate(3)[1:2])  # so that a sequence's blocks are no run
    plain, live = DuoCache(pool), LiveCache(pool)
    if start:
        plain.begin(start)
        for i in range(3):
            plain.attend(i, *(torch.randn(start, n, 64) for n in (6, 3, 3)))
        plain.commit()
    other = plain.fork()
    live.take(other)
    for n in range(start, start + 150):
        token = _token(3)
        other.reserve(n + 1)
        live.catch_up(other)
        at, got = _step(live, *token)
        assert at == n
        torch.testing.assert_close(got, _step(plain, *token)[1], rtol=1e-2, atol=1e-2)
    # One more, which is taken back: what follows must not notice.
    other.reserve(start + 151)
    live.catch_up(other)
    _step(live, *_token(3))
    live.give(other, start + 150)
    for _ in range(2):
        token = _token(3)
        torch.testing.assert_close(_step(other, *token)[1], _step(plain, *token)[1], rtol=1e-2, atol=1e-2)


def test_the_newest_queries_of_watched_heads_are_kept(poisoned):
    live = LiveCache(BlockPool(SHAPE, 4, torch.device("cpu")), [(2, 5), (0, 1), (2, 0)])
    for _ in range(2):
        q, k, v = _token(3)
        _step(live, q, k, v)
        kept = live.queries()
        assert list(kept) == [0, 2]
        assert torch.equal(kept[0], q[0][:, [1]]) and torch.equal(kept[2], q[2][:, [0, 5]])


@pytest.mark.parametrize(
    ("shape", "position", "clock"),
    [
        (SHAPE, 0, Clock(1, 0, 0, 1, 0, -1)),
        (SHAPE, 7, Clock(8, 0, 7, 8, 7, -1)),
        (SHAPE, 8, Clock(9, 0, 8, 9, 8, -1)),
        (SHAPE, 47, Clock(48, 0, 47, 48, 47, -1)),
        (SHAPE, 48, Clock(49, 0, 48, 48, 8, -1)),
        (SHAPE, 127, Clock(128, 0, 127, 48, 47, -1)),
        (SHAPE, 128, Clock(129, 0, 128, 48, 8, -1)),
        (SHAPE, 255, Clock(256, 0, 255, 48, 15, 0)),
        (SHAPE, 256, Clock(129, 1, 128, 48, 16, -1)),
        (SHAPE, 4_194_303, Clock(256, 32_766, 255, 48, 23, 32_766)),
        (SMALLER, 15, Clock(16, 0, 15, 16, 15, -1)),
        (SMALLER, 16, Clock(17, 0, 16, 17, 16, -1)),
        (SMALLER, 79, Clock(80, 0, 79, 48, 39, 0)),
        (SMALLER, 80, Clock(17, 1, 16, 48, 40, -1)),
        (SMALLER, 1103, Clock(80, 16, 79, 48, 23, 16)),
    ],
)
def test_the_clock(shape, position, clock):
    got = clock_at(torch.tensor([position]), shape)
    assert got.dtype == torch.int32
    assert Clock(*got.tolist()) == clock
