"""The cache against the naive dense one: any prompt, chunking, pattern and window; fork, rewind, snapshot."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.cache import retrieval
from models.cache.duo import DuoCache
from models.cache.pool import BlockPool
from models.cache.retrieval import RetrievalHeads
from models.cache.shape import CacheShape
from models.cache.streaming import StreamingHeads
from models.errors import PoolExhausted
from tests.cache import dense

CPU = torch.device("cpu")
LAYERS, KV_HEADS = 2, 3


# Tokens of a block, and first ones that stay as they are: a GPU's, a CPU's, and others.
BLOCKS = [(128, 128), (64, 32), (64, 0), (64, 100), (32, 33)]


def _shape(retrieval=(1, 2), bits=16, sink=4, recent=20, group=2, head_dim=16, exact=torch.float32, **others):
    streaming = tuple(KV_HEADS - n for n in retrieval)
    return CacheShape(retrieval, streaming, group, head_dim, sink, recent, bits, exact, torch.float32, **others)


def _tokens(shape, n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(LAYERS, n, KV_HEADS * shape.group, shape.head_dim, generator=generator) * 2
    k, v = torch.randn(2, LAYERS, n, KV_HEADS, shape.head_dim, generator=generator)
    return q, k, v


def _feed(cache, tokens, start, sizes):
    """Appends tokens from `start` in chunks of the given sizes; returns [layers, n, heads * d]."""
    outs = []
    for size in sizes:
        cache.begin(size)
        part = slice(start, start + size)
        outs.append(torch.stack([cache.attend(layer, *(x[layer, part] for x in tokens)) for layer in range(LAYERS)]))
        cache.commit()
        start += size
    return torch.cat(outs, 1)


def _dense(shape, tokens):
    return torch.stack([dense.attend(shape, layer, *(x[layer] for x in tokens)) for layer in range(LAYERS)])


def _pool(shape, tokens=2048):
    return BlockPool(shape, -(-tokens // shape.block), CPU)


@st.composite
def _cases(draw):
    n = draw(st.sampled_from([1, 2, 32, 33, 95, 96, 97, 127, 128, 129, 255, 256, 257, 300, 384, 511, 640]))
    sizes, left = [], n
    while left:
        size = min(left, draw(st.sampled_from([1, 2, 3, 31, 32, 64, 96, 100, 127, 128, 129, 200, 256, 700])))
        sizes.append(size)
        left -= size
    retrieval = tuple(draw(st.integers(0, KV_HEADS)) for _ in range(LAYERS))
    wide = tuple(draw(st.integers(0, kept)) for kept in retrieval)
    sink = draw(st.sampled_from([0, 1, 4, 128, 150, 1000]))
    recent = draw(st.sampled_from([1, 2, 20, 64, 255, 256, 300, 2000]))
    return n, sizes, retrieval, wide, sink, recent, draw(st.sampled_from(BLOCKS))


# The fixture only poisons fresh memory: it need not be set up again between examples.
@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(_cases(), st.sampled_from([16, 8, 4.5, 4]))  # 4.5: some heads in 8 bits
def test_equals_the_naive_dense_cache(poisoned, case, bits):
    n, sizes, retrieval, wide, sink, recent, (block, front) = case
    exact = torch.float32 if bits == 16 else torch.float16
    wide = wide if bits == 4.5 else ()
    shape = _shape(retrieval, int(bits), sink, recent, exact=exact, wide_heads=wide, block=block, front=front)
    tokens = _tokens(shape, n)
    out = _feed(DuoCache(_pool(shape)), tokens, 0, sizes)
    torch.testing.assert_close(out.double(), _dense(shape, tokens), rtol=0, atol=1e-4)


@pytest.mark.parametrize("sizes", [[640], [1] * 40 + [600], [500] + [1] * 140, [33, 257, 1, 349]])
@pytest.mark.parametrize(("bits", "wide"), [(4, ()), (4, (1, 1)), (8, ())])
@pytest.mark.parametrize(("block", "front"), [(128, 128), (64, 32), (64, 0), (64, 100)])
def test_fast_kernels_are_within_their_bound(poisoned, sizes, bits, wide, block, front):
    """bf16 products: 1 % of the outputs' norm, whatever the chunking."""
    shape = _shape(bits=bits, sink=16, recent=100, head_dim=64, exact=torch.float16, wide_heads=wide)
    shape = replace(shape, compute_dtype=torch.bfloat16, block=block, front=front)
    tokens = _tokens(shape, 640)
    out = _feed(DuoCache(_pool(shape)), tokens, 0, sizes).double()
    want = _dense(shape, tokens)
    assert ((out - want).norm(dim=-1) / want.norm(dim=-1)).max() < 0.05
    assert (out - want).norm() < 0.01 * want.norm()


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize(("block", "front"), BLOCKS)
def test_history_is_read_in_tiles(poisoned, monkeypatch, bits, block, front):
    """More history than one tile holds, in scattered blocks as well as in one run."""
    monkeypatch.setattr(retrieval, "TILE", 2 * block)
    shape = _shape(bits=bits, exact=torch.float32 if bits == 16 else torch.float16, block=block, front=front)
    pool, tokens = _pool(shape, 4096), _tokens(shape, 1300)
    hole, cache = pool.allocate(3), DuoCache(pool)
    pool.release([hole[1]])
    out = _feed(cache, tokens, 0, [500, 1, 99, 700])
    torch.testing.assert_close(out.double(), _dense(shape, tokens), rtol=0, atol=1e-4)


@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize(("block", "front"), BLOCKS)
def test_fork_and_rewind_equal_a_fresh_run(poisoned, bits, block, front):
    shape = _shape(bits=bits, exact=torch.float32 if bits == 16 else torch.float16, block=block, front=front)
    pool = _pool(shape)
    first, second = _tokens(shape, 700, seed=1), _tokens(shape, 700, seed=2)
    cache = DuoCache(pool)
    _feed(cache, first, 0, [300, 1, 70])  # 371 tokens
    snapshot = cache.fork()
    went_on = _feed(cache, first, 371, [200, 1, 128])
    other = snapshot.fork()
    joined = [torch.cat((a[:, :371], b[:, 371:]), 1) for a, b in zip(first, second, strict=True)]
    branched = _feed(other, joined, 371, [1, 300])
    again = _feed(snapshot, first, 371, [1, 1, 327])  # rewound
    torch.testing.assert_close(went_on.double(), _dense(shape, first)[:, 371:700], rtol=0, atol=1e-4)
    torch.testing.assert_close(again.double(), went_on.double(), rtol=0, atol=1e-4)
    torch.testing.assert_close(branched.double(), _dense(shape, joined)[:, 371:672], rtol=0, atol=1e-4)


@pytest.mark.parametrize(("block", "front", "packed"), [(128, 128, 6), (64, 16, 15), (64, 0, 15), (64, 100, 14)])
def test_forks_share_blocks_and_give_them_all_back(block, front, packed):
    shape = _shape(bits=4, exact=torch.float16, block=block, front=front)
    pool = _pool(shape)
    tokens = _tokens(shape, 1024)
    cache = DuoCache(pool)
    _feed(cache, tokens, 0, [1000])
    used = pool.blocks - pool.free
    assert used == packed
    forks = [cache.fork() for _ in range(10)]
    assert pool.blocks - pool.free == used
    cache.release()
    for fork in forks[:-1]:
        fork.release()
    assert pool.blocks - pool.free == used
    forks[-1].release()
    assert pool.free == pool.blocks


def test_an_abandoned_chunk_is_never_seen():
    """A chunk that did not commit, as after a failure: a snapshot from before it continues as if it had not been."""
    shape = _shape(bits=4, exact=torch.float16)
    tokens = _tokens(shape, 600)
    cache = DuoCache(_pool(shape))
    _feed(cache, tokens, 0, [300])
    snapshot = cache.fork()
    cache.begin(200)
    for layer in range(LAYERS):
        cache.attend(layer, *(torch.full_like(x[layer, 300:500], 50.0) for x in tokens))
    assert cache.length == 300
    cache.release()
    out = _feed(snapshot, tokens, 300, [300])
    torch.testing.assert_close(out.double(), _dense(shape, tokens)[:, 300:], rtol=0, atol=1e-4)


@pytest.mark.parametrize("bits", [16, 4])
def test_room_that_was_taken_and_never_filled_is_never_read(poisoned, bits):
    """As after a prompt that was stopped: its blocks go to others, and it goes on as if it had never had them."""
    shape = _shape(bits=bits, exact=torch.float32 if bits == 16 else torch.float16)
    pool, tokens = _pool(shape), _tokens(shape, 900)
    cache = DuoCache(pool)
    cache.reserve(900)
    taken = list(cache.reserved)
    _feed(cache, tokens, 0, [300])
    cache.trim()
    assert pool.blocks - pool.free == shape.packed_blocks(300) < len(taken)
    other = DuoCache(pool)
    _feed(other, [torch.full_like(x, 50.0) for x in tokens], 0, [900])
    assert set(other.blocks) & set(taken[shape.packed_blocks(300) :])
    out = _feed(cache.fork(), tokens, 300, [1, 599])
    torch.testing.assert_close(out.double(), _dense(shape, tokens)[:, 300:], rtol=0, atol=1e-4)


def test_a_full_pool_refuses_and_harms_nobody():
    shape = _shape(bits=4, exact=torch.float16)
    pool = _pool(shape, 512)
    tokens = _tokens(shape, 2000)
    cache = DuoCache(pool)
    _feed(cache, tokens, 0, [400])
    with pytest.raises(PoolExhausted, match="more tokens of cache"):
        cache.begin(1000)
    out = _feed(cache, tokens, 400, [200])
    torch.testing.assert_close(out.double(), _dense(shape, [x[:, :600] for x in tokens])[:, 400:], rtol=0, atol=1e-4)


def test_memory_grows_by_the_planned_bytes_a_token():
    shape = _shape(bits=4, exact=torch.float16, head_dim=64)
    cache = DuoCache(_pool(shape))
    tokens = _tokens(shape, 1664)
    _feed(cache, tokens, 0, [640])
    before = cache.retrieval_bytes
    _feed(cache, tokens, 640, [1024])
    assert cache.retrieval_bytes - before == 1024 * shape.bytes_per_token
    assert shape.bytes_per_token == 3 * 2 * (32 + 4)
    assert cache.pool.blocks * shape.block * shape.bytes_per_token == sum(t.nbytes for t, _ in cache.pool._stored())


def test_recent_window_is_kept_bit_for_bit():
    shape = _shape((0, 1), bits=4, sink=3, recent=50, exact=torch.float16)
    cache = DuoCache(_pool(shape))
    q, k, v = _tokens(shape, 333)
    _feed(cache, (q, k, v), 0, [100, 1, 232])
    for position in (0, 1, 2, 283, 300, 332):
        slot = position if position < 3 else 3 + (position - 3) % 50
        assert torch.equal(cache._streaming.keys[0, slot], k[0, position, 0].half())
        assert torch.equal(cache._streaming.values[0, slot], v[0, position, 0].half())


def test_a_fork_that_finds_no_memory_holds_nothing(monkeypatch):
    shape = _shape(bits=4, exact=torch.float16)
    pool = _pool(shape)
    cache = DuoCache(pool)
    _feed(cache, _tokens(shape, 600), 0, [600])

    def full(heads):
        raise torch.OutOfMemoryError

    for part in (StreamingHeads, RetrievalHeads):
        with monkeypatch.context() as patch:
            patch.setattr(part, "copy", full)
            with pytest.raises(torch.OutOfMemoryError):
                cache.fork()
    cache.release()
    assert pool.free == pool.blocks
