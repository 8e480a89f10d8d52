"""Which cached prefix a prompt starts from, and what is let go when there is too much."""

import numpy as np
import torch

from app.engine.prefix import PrefixStore
from models.cache.duo import DuoCache
from models.cache.pool import BlockPool
from models.cache.shape import CacheShape

SHAPE = CacheShape((1,), (0,), 1, 16, 0, 1, 16, torch.float32, torch.float32)


def _cache(pool, length):
    cache = DuoCache(pool)
    cache.begin(length)
    cache.commit()
    return cache


def _pool():
    return BlockPool(SHAPE, 64, torch.device("cpu"))


def test_longest_strict_prefix_wins():
    pool, store = _pool(), PrefixStore()
    short, long, other = _cache(pool, 3), _cache(pool, 5), _cache(pool, 4)
    store.keep([1, 2, 3], short, "a")
    store.keep([1, 2, 3, 4, 5], long, "a")
    store.keep([1, 2, 9, 9], other, "b")
    assert store.find(np.array([1, 2, 3, 4, 5, 6])) is long
    assert store.find(np.array([1, 2, 3, 4, 5])) is short  # one token is left to read
    assert store.find(np.array([1, 2, 3, 8])) is short
    assert store.find(np.array([7, 2, 3, 4])) is None


def test_a_chat_keeps_its_newest_and_everything_is_given_back():
    pool, store = _pool(), PrefixStore()
    for n in range(1, 8):
        store.keep(list(range(n * SHAPE.block)), _cache(pool, n * SHAPE.block), "a")
    assert store.find(np.arange(2 * SHAPE.block)) is None
    assert store.find(np.arange(9 * SHAPE.block)).length == 7 * SHAPE.block
    while store.drop_oldest():
        pass
    assert pool.free == pool.blocks


def test_the_same_ids_are_kept_once():
    pool, store = _pool(), PrefixStore()
    store.keep(list(range(300)), _cache(pool, 300), "a")
    newer = _cache(pool, 300)
    store.keep(list(range(300)), newer, "b")
    assert store.find(np.arange(301)) is newer
    assert store.drop_oldest() and not store.drop_oldest()
    assert pool.free == pool.blocks
