"""The block pool: runs where possible, counts right, nothing taken when there is too little."""

import pytest
import torch

from kernels.attention_decode.ref import stretches
from models.cache.duo import DuoCache
from models.cache.pool import BlockPool
from models.cache.shape import CacheShape
from models.errors import PoolExhausted

SHAPE = CacheShape((1,), (0,), 1, 16, 0, 1, 16, torch.float32, torch.float32)


def _pool(blocks):
    return BlockPool(SHAPE, blocks, torch.device("cpu"))


def test_growth_stays_in_one_run():
    pool = _pool(10)
    ids = pool.allocate(3)
    ids += pool.allocate(2, after=ids[-1])
    assert ids == list(range(ids[0], ids[0] + 5))


def test_scattered_blocks_serve_when_no_run_is_left():
    pool = _pool(6)
    ids = pool.allocate(6)
    pool.release([ids[1], ids[3], ids[5]])
    assert sorted(pool.allocate(3)) == [1, 3, 5]
    with pytest.raises(PoolExhausted):
        pool.allocate(1)


def test_too_many_takes_none():
    pool = _pool(4)
    pool.allocate(2)
    with pytest.raises(PoolExhausted, match=f"{3 * SHAPE.block}"):
        pool.allocate(3)
    assert pool.free == 2


def test_read_gives_back_what_was_written_in_any_order_of_ids():
    (store,) = _pool(8).stores
    keys, values = torch.randn(2, 1, 3 * SHAPE.block, 16)
    store.write(slice(0, 1), [5, 2, 3], keys, values)
    read = list(store.read(slice(0, 1), [5, 2, 3], 8192))
    assert [k.shape[1] for k, _ in read] == [SHAPE.block, 2 * SHAPE.block]
    assert torch.equal(torch.cat([k for k, _ in read], 1), keys)
    assert torch.equal(torch.cat([v for _, v in read], 1), values)


def test_storage_is_taken_once_and_never_moves():
    """Near the limit nothing is left to find a place in: growing, freeing and growing again stay where they are."""
    pool = _pool(8)
    places = [(stored.data_ptr(), stored.nbytes) for stored, _ in pool._stored()]
    assert sum(size for _, size in places) == 8 * SHAPE.block * SHAPE.bytes_per_token
    for length in (300, 1024, 500, 1024):
        cache = DuoCache(pool)
        cache.begin(length)
        cache.attend(0, *torch.randn(3, length, 1, 16))
        cache.commit()
        cache.release()
        assert pool.free == 8
        assert [(stored.data_ptr(), stored.nbytes) for stored, _ in pool._stored()] == places


def test_runs_are_cut_at_the_limit():
    assert list(stretches([4, 5, 6, 9, 0, 1], 2)) == [(4, 6), (6, 7), (9, 10), (0, 2)]
    assert list(stretches([], 4)) == []
