"""A GPU's cache written to disk beside the engine's own work, and read back."""

import numpy as np
import pytest
import torch

from app.engine.snapshots import SnapshotStore
from models.cache.duo import DuoCache
from models.cache.pool import BlockPool
from models.cache.shape import CacheShape

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

SHAPE = CacheShape((2, 1), (1, 2), 4, 128, 16, 100, 4, torch.float16, torch.float16)


def _extend(cache, n):
    cache.begin(n)
    for layer in range(2):
        q, k, v = (torch.randn(n, heads, 128, device="cuda") for heads in (12, 3, 3))
        cache.attend(layer, q, k, v)
    cache.commit()


def test_a_snapshot_taken_while_the_sequence_goes_on_comes_back_equal(tmp_path, poisoned):
    pool = BlockPool(SHAPE, 120, torch.device("cuda"))
    store = SnapshotStore(tmp_path, "kind", 1 << 40)
    cache = DuoCache(pool)
    _extend(cache, 3_000)
    kept = cache.fork()
    ids = np.arange(3_000)
    store.save(ids, cache.fork(), ("a",))
    for _ in range(20):  # the engine does not wait: this must not reach the file
        _extend(cache, 133)
    store.flush()
    chain = store.find(np.append(ids, 0))
    assert [snapshot.length for _, snapshot in chain] == [3_000]
    told = []
    back = store.read(chain, pool, kept.blocks[:7], told.append)
    assert back is not None and told and told[-1] <= 3_000
    assert back.blocks[:7] == kept.blocks[:7] and back.blocks[7:] != kept.blocks[7:]
    assert torch.equal(pool.dump(back.blocks), pool.dump(kept.blocks))
    filled = 3_000 % 128
    for got, want, exact in zip(back.exact(), kept.exact(), (True, True, False, False), strict=True):
        upto = 128 + filled if exact else want.shape[1]
        assert torch.equal(got[:, :upto], want[:, :upto])
    for one in (cache, kept, back):
        one.release()
    store.close()
    assert pool.free == pool.blocks
