"""A cache written to disk and read back is the same cache."""

import hashlib

import numpy as np
import pytest
import torch

from kernels.kv4_pack import KV4_LAYOUT
from models.cache import snapshot as snapshot_module
from models.cache.duo import DuoCache
from models.cache.pool import BlockPool
from models.cache.shape import CacheShape
from models.cache.snapshot import VERSION, read_chain, read_footer, write_snapshot
from models.errors import BadSnapshot, PoolExhausted

SHAPES = {
    "kv4": CacheShape((2, 1), (1, 2), 3, 64, 16, 100, 4, torch.float16, torch.float32),
    "kv4-plain": CacheShape((2, 0), (1, 3), 2, 32, 16, 100, 4, torch.float16, torch.float32),
    "kv8": CacheShape((2, 1), (1, 2), 3, 64, 16, 100, 8, torch.float16, torch.float32),
    "some heads in 8 bits": CacheShape(
        (2, 2), (1, 1), 3, 64, 16, 100, 4, torch.float16, torch.float32, wide_heads=(1, 2)
    ),
    "bf16": CacheShape((2, 1), (0, 1), 3, 64, 16, 100, 16, torch.bfloat16, torch.float32),
    "kv4 in smaller blocks": CacheShape(
        (2, 1), (1, 2), 3, 64, 16, 100, 4, torch.float16, torch.float32, block=64, front=16
    ),
    "bf16 in smaller blocks": CacheShape(
        (2, 1), (0, 1), 3, 64, 16, 100, 16, torch.bfloat16, torch.float32, block=64, front=16
    ),
    "streaming only": CacheShape((0, 0), (2, 2), 3, 64, 16, 100, 4, torch.float16, torch.float32),
}


def _attend(shape, cache, start, size):
    """Feed tokens start .. start + size - 1, the same for every cache; the attention's output [layers, size, -1]."""
    random = torch.Generator().manual_seed(7)
    heads = shape.retrieval_heads[0] + shape.streaming_heads[0]
    q = torch.randn(2, 1000, heads * shape.group, shape.head_dim, generator=random)
    k, v = torch.randn(2, 2, 1000, heads, shape.head_dim, generator=random)
    part = slice(start, start + size)
    cache.begin(size)
    out = []
    for layer in range(2):
        own = shape.retrieval_heads[layer] + shape.streaming_heads[layer]
        out.append(cache.attend(layer, q[layer, part, : own * shape.group], k[layer, part, :own], v[layer, part, :own]))
    cache.commit()
    return out


def _about(key, start=0, first=0, parent=""):
    return {"key": key, "parent": parent, "kind": "k", "start": start, "first": first, "labels": ("a",)}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("middle", "end"), [(100, 180), (300, 700), (383, 385), (512, 640)])
def test_a_chain_of_two_files_goes_on_like_the_cache_itself(tmp_path, poisoned, name, middle, end):
    shape = SHAPES[name]
    pool = BlockPool(shape, 32, torch.device("cpu"))
    cache = DuoCache(pool)
    _attend(shape, cache, 0, middle)
    one = write_snapshot(tmp_path / "one.kv", cache, _about("one"), lambda: True)
    _attend(shape, cache, middle, end - middle)
    about = _about("two", middle, one.last, "one")
    two = write_snapshot(tmp_path / "two.kv", cache, about, lambda: True)
    chain = [(tmp_path / f"{s.key}.kv", s) for s in (one, two)]
    assert [read_footer(path) for path, _ in chain] == [one, two]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.kv", "two.kv"]

    cache.reserve(1000)
    hole = pool.allocate(5)
    pool.release(hole[::2])
    told = []
    back = read_chain(chain, pool, (), told.append)
    assert back.length == end and told == sorted(told)
    other = BlockPool(shape, 32, torch.device("cpu"))  # after a restart
    fresh = read_chain(chain, other, (), lambda tokens: None)
    for size in (1, 200, 1):
        want = _attend(shape, cache, cache.length, size)
        for a, b in zip(want, _attend(shape, fresh, fresh.length, size), strict=True):
            assert torch.equal(a, b)
        for a, b in zip(want, _attend(shape, back, back.length, size), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=2e-3)  # blocks in other runs: rounded elsewhere
    for c in (cache, back):
        c.release()
    pool.release(hole[1::2])
    assert pool.free == pool.blocks


def test_blocks_in_memory_are_shared_and_never_written_again(tmp_path):
    shape = SHAPES["kv4"]
    pool = BlockPool(shape, 32, torch.device("cpu"))
    cache = DuoCache(pool)
    _attend(shape, cache, 0, 900)
    saved = write_snapshot(tmp_path / "one.kv", cache, _about("one"), lambda: True)
    shared = cache.blocks[:3]
    before = pool.dump(shared)
    pool.stores[0]._keys[:, shared[1]] = 17  # content of memory wins over the file's
    marked = pool.dump(shared)
    assert not torch.equal(before, marked)
    free = pool.free
    back = read_chain([(tmp_path / "one.kv", saved)], pool, shared, lambda tokens: None)
    assert back.blocks[:3] == shared
    assert torch.equal(pool.dump(shared), marked)
    assert torch.equal(pool.dump(back.blocks[3:]), pool.dump(cache.blocks[3:]))
    assert free - pool.free == len(back._ids) - 3
    back.release()
    assert pool.free == free


def test_a_file_of_before_a_field_was_added_is_read(tmp_path, monkeypatch):
    pool = BlockPool(SHAPES["kv4"], 8, torch.device("cpu"))
    cache = DuoCache(pool)
    _attend(SHAPES["kv4"], cache, 0, 700)
    written = snapshot_module.asdict
    for gone, reads in (("holds", True), ("parent", False)):
        monkeypatch.setattr(
            snapshot_module, "asdict", lambda s, gone=gone: {k: v for k, v in written(s).items() if k != gone}
        )
        path = tmp_path / f"{gone}.kv"
        saved = write_snapshot(path, cache, _about(gone), lambda: True)
        if reads:
            assert read_footer(path) == saved
        else:
            with pytest.raises(BadSnapshot, match="another version"):
                read_footer(path)
    cache.release()


@pytest.mark.parametrize("at", [9, 4000, -20000, -200, -20, -12, -5])
def test_any_damaged_byte_is_found_and_nothing_is_taken(tmp_path, at):
    pool = BlockPool(SHAPES["kv4"], 8, torch.device("cpu"))
    cache = DuoCache(pool)
    _attend(SHAPES["kv4"], cache, 0, 700)
    path = tmp_path / "one.kv"
    assert write_snapshot(path, cache, _about("one"), lambda: True) is not None
    cache.release()
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(BadSnapshot):
        read_chain([(path, read_footer(path))], pool, (), lambda tokens: None)
    assert pool.free == pool.blocks
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(BadSnapshot):
        read_footer(path)


def test_what_does_not_fit_or_is_stopped_takes_nothing(tmp_path):
    shape = SHAPES["kv4"]
    pool = BlockPool(shape, 8, torch.device("cpu"))
    cache = DuoCache(pool)
    _attend(shape, cache, 0, 900)
    assert write_snapshot(tmp_path / "no.kv", cache, _about("no"), lambda: False) is None
    assert list(tmp_path.iterdir()) == []
    saved = write_snapshot(tmp_path / "one.kv", cache, _about("one"), lambda: True)
    chain = [(tmp_path / "one.kv", saved)]
    with pytest.raises(PoolExhausted):
        read_chain(chain, pool, (), lambda tokens: None)
    cache.release()

    def stop(tokens):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read_chain(chain, pool, (), stop)
    assert pool.free == pool.blocks
    for name in ("kv8", "kv4 in smaller blocks"):
        other = BlockPool(SHAPES[name], 16, torch.device("cpu"))
        with pytest.raises(BadSnapshot, match="another shape"):
            read_chain(chain, other, (), lambda tokens: None)
        assert other.free == other.blocks


def test_dump_and_fill_are_inverse_for_every_format():
    for shape in (shape for shape in SHAPES.values() if any(shape.retrieval_heads)):
        pool = BlockPool(shape, 9, torch.device("cpu"))
        for stored, _ in pool._stored():
            stored.view(torch.uint8).random_(0, 256)
        before = pool.dump(range(9))
        assert before.shape == (9, pool.block_bytes)
        order = np.random.default_rng(0).permutation(9).tolist()
        pool.fill(order, before)
        assert torch.equal(pool.dump(order), before)


# What a file of each VERSION holds. Where this test fails, the stored format has changed: raise VERSION in
# models/cache/snapshot.py, so that older files are read no more, and put the new hash here. Where but a field with a
# default was added to the footer, older files are read: the hash alone is another.
FORMATS = {3: "b4fc7676bb127618"}


def _codes(*size):
    """Codes of 0 to 15 in a fixed order, without a random generator."""
    return (torch.arange(int(np.prod(size))) * 7 % 16).to(torch.uint8).view(size)


def test_the_stored_format_belongs_to_its_version(tmp_path, poisoned, monkeypatch):
    monkeypatch.setattr("kernels.kv4_pack.int4pack.panel", lambda: 64)  # on any processor
    digest = hashlib.sha256()
    for backend in KV4_LAYOUT.backends:  # how each layout packs 4-bit codes; all of it runs anywhere
        digest.update(backend.name.encode())
        for pack in (backend.run.pack_keys, backend.run.pack_values):
            digest.update(pack(_codes(2, 256, 64)).contiguous().numpy().tobytes())
    for name in ("bf16", "bf16 in smaller blocks"):  # no arithmetic: the bytes are those of the tokens
        shape = SHAPES[name]
        pool = BlockPool(shape, 8, torch.device("cpu"))
        cache = DuoCache(pool)
        cache.begin(500)
        for layer in range(2):
            heads = shape.retrieval_heads[layer] + shape.streaming_heads[layer]
            k = torch.arange(500 * heads * 64).view(500, heads, 64) % 251 + layer
            cache.attend(layer, torch.zeros(500, heads * shape.group, 64), k.float(), 2.0 * k)
        cache.commit()
        path = tmp_path / f"{shape.block}.kv"
        write_snapshot(path, cache, _about("one"), lambda: True)
        digest.update(path.read_bytes())
    assert FORMATS[VERSION] == digest.hexdigest()[:16]
