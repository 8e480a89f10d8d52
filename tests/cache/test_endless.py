"""The endless cache against its definition: any sinks, window, prompt and chunking; far out; nothing moves."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.norm_rope.ref import apply_rope
from models.cache import endless
from models.cache.endless import EndlessCache
from models.cache.shape import CacheShape
from models.config import RopeConfig
from models.rope import EndlessRope, Rope
from tests.cache import endless_dense

CPU = torch.device("cpu")
LAYERS, KV_HEADS, D = 2, 2, 16
CONFIG = RopeConfig("default", 10_000.0)
ROPE = Rope(CONFIG, D, 1 << 20)


def _shape(sink, recent, group=2, exact=torch.float32):
    return CacheShape((0,) * LAYERS, (KV_HEADS,) * LAYERS, group, D, sink, recent, 16, exact, torch.float32)


def _cache(shape):
    return EndlessCache(shape, EndlessRope(ROPE, shape.sink + shape.recent), CPU)


def _tokens(shape, n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(LAYERS, n, KV_HEADS * shape.group, D, generator=generator) * 2
    k, v = torch.randn(2, LAYERS, n, KV_HEADS, D, generator=generator)
    return q, k, v


def _feed(cache, tokens, start, sizes):
    """Appends tokens from `start` in chunks of the given sizes, rotated as the decoder does; [layers, n, heads * d]."""
    outs = []
    for size in sizes:
        table = cache.rope.table(torch.arange(cache.length, cache.length + size))
        cache.begin(size)
        part, layers = slice(start, start + size), []
        for layer in range(LAYERS):
            q, k, v = (x[layer, part].clone() for x in tokens)
            apply_rope(q, table)
            apply_rope(k, table)
            layers.append(cache.attend(layer, q, k, v))
        cache.commit()
        outs.append(torch.stack(layers))
        start += size
    return torch.cat(outs, 1)


def _dense(shape, tokens):
    rows = [endless_dense.attend(shape, ROPE.table, *(x[layer] for x in tokens)) for layer in range(LAYERS)]
    return torch.stack(rows)


@st.composite
def _cases(draw):
    n = draw(st.sampled_from([1, 2, 5, 30, 64, 97, 150]))
    sizes, left = [], n
    while left:
        size = min(left, draw(st.sampled_from([1, 2, 3, 7, 31, 40, 100, 200])))
        sizes.append(size)
        left -= size
    return n, sizes, draw(st.sampled_from([0, 1, 4, 9, 50, 500])), draw(st.sampled_from([1, 2, 3, 8, 17, 40, 99, 300]))


# The fixture only poisons fresh memory: it need not be set up again between examples.
@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_cases(), st.sampled_from([4, 16, 512]))
def test_equals_its_definition(poisoned, case, tile):
    n, sizes, sink, recent = case
    shape = _shape(sink, recent)
    tokens = _tokens(shape, n)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(endless, "_TILE", tile)
        out = _feed(_cache(shape), tokens, 0, sizes)
    torch.testing.assert_close(out.double(), _dense(shape, tokens), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("sink", "recent"), [(4, 12), (0, 5), (3, 1)])
@pytest.mark.parametrize("sizes", [[60], [1] * 60, [5, 40, 1, 14]])
def test_is_the_same_however_far_out(poisoned, sink, recent, sizes):
    """The same tokens behind a full cache at 100 tokens, and after a billion and after 2^40 have gone by: bit for bit
    the same angles, so the same answers up to the last rounding of fp32."""
    shape = _shape(sink, recent)
    tokens = _tokens(shape, 40 + 60)
    outs = []
    for skipped in (0, 10**9 // recent * recent, (1 << 40) // recent * recent):
        cache = _cache(shape)
        _feed(cache, tokens, 0, [40])
        if skipped:
            # What the cache would hold after so many more tokens, the last of which are those that it holds now.
            far = cache.rope.table(torch.tensor([skipped]))
            ring = cache.keys[:, :, sink:].contiguous()
            apply_rope(ring.flatten(0, 1), far.expand(LAYERS * KV_HEADS, -1))
            cache.keys[:, :, sink:] = ring
            cache.length += skipped
        outs.append(_feed(cache, tokens, 40, sizes))
    torch.testing.assert_close(outs[0].double(), _dense(shape, tokens)[:, 40:], rtol=0, atol=1e-4)
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("chunk", [1, 2, 3, 11, 30])
def test_nothing_moves_when_the_window_slides(chunk):
    """Behind a full cache, the only bytes that change are those of the tokens that are replaced."""
    shape = _shape(4, 12)
    cache, tokens = _cache(shape), _tokens(shape, 400)
    _feed(cache, tokens, 0, [16])
    places = cache.keys.data_ptr(), cache.values.data_ptr(), cache.streaming_bytes
    for start in range(16, 400 - chunk, chunk):
        before = cache.keys.clone(), cache.values.clone()
        _feed(cache, tokens, start, [chunk])
        written = {4 + (position - 4) % 12 for position in range(start, start + chunk)}
        kept = [slot for slot in range(16) if slot not in written]
        for old, new in zip(before, (cache.keys, cache.values), strict=True):
            assert torch.equal(old[:, :, kept], new[:, :, kept])
            assert all(not torch.equal(old[:, :, slot], new[:, :, slot]) for slot in written)
        assert places == (cache.keys.data_ptr(), cache.values.data_ptr(), cache.streaming_bytes)


def test_fork_and_rewind_equal_a_fresh_run(poisoned):
    shape = _shape(3, 20)
    first, second = _tokens(shape, 120, seed=1), _tokens(shape, 120, seed=2)
    cache = _cache(shape)
    _feed(cache, first, 0, [50, 1, 9])
    snapshot = cache.fork()
    went_on = _feed(cache, first, 60, [30, 1, 29])
    other = snapshot.fork()
    joined = [torch.cat((a[:, :60], b[:, 60:]), 1) for a, b in zip(first, second, strict=True)]
    branched = _feed(other, joined, 60, [1, 59])
    cache.release()
    again = _feed(snapshot, first, 60, [60])
    torch.testing.assert_close(again, went_on, rtol=0, atol=1e-5)
    torch.testing.assert_close(went_on.double(), _dense(shape, first)[:, 60:], rtol=0, atol=1e-4)
    torch.testing.assert_close(branched.double(), _dense(shape, joined)[:, 60:], rtol=0, atol=1e-4)


def test_an_abandoned_chunk_is_forgotten_by_a_snapshot():
    shape = _shape(2, 9)
    cache, tokens = _cache(shape), _tokens(shape, 60)
    _feed(cache, tokens, 0, [30])
    snapshot = cache.fork()
    cache.begin(10)
    for layer in range(LAYERS):
        cache.attend(layer, *(torch.full_like(x[layer, 30:40], 50.0) for x in tokens))
    assert cache.length == 30
    out = _feed(snapshot, tokens, 30, [30])
    torch.testing.assert_close(out.double(), _dense(shape, tokens)[:, 30:], rtol=0, atol=1e-4)
