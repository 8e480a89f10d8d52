"""The packed cache on a GPU, through prefill and decode, against the naive dense one in float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks._llama_8b import LLAMA_8B
from models.build import Build, build_decoder
from models.cache import history
from models.cache.duo import DuoCache
from models.cache.pool import BlockPool
from models.cache.shape import CacheShape
from models.config import ModelConfig
from quant.w8a8 import DenseLinear, W8A8Linear
from tests.cache import dense

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize(("head_dim", "group"), [(128, 4), (64, 3)])
@pytest.mark.parametrize("sizes", [[300] + [1] * 340, [640], [130, 1, 253, 1, 1, 126, 128]])
@pytest.mark.parametrize(("bits", "wide"), [(4, ()), (4, (1, 1)), (8, ())])
def test_packed_cache_equals_the_dense_one(poisoned, head_dim, group, sizes, bits, wide):
    shape = CacheShape((2, 1), (1, 2), group, head_dim, 16, 100, bits, torch.float16, torch.float16, wide_heads=wide)
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
    assert {store.layout.__name__ for store in pool.stores} == {"kernels.kv4_pack.fragment"}
    assert (out - want).norm() <= 2e-3 * want.norm()


def test_history_in_several_tiles_equals_one(poisoned, monkeypatch):
    """Chunks at odd places, scattered blocks, and tiles that end between them."""
    shape = CacheShape((2,), (0,), 4, 128, 0, 1, 4, torch.float16, torch.float16)
    n = 3000
    q, k, v = (torch.randn(n, heads, 128, device="cuda") for heads in (8, 2, 2))
    pool = BlockPool(shape, 64, torch.device("cuda"))
    hole = pool.allocate(9)
    pool.release(hole[1::2])

    def read(sizes):
        cache, outs, start = DuoCache(pool), [], 0
        for size in sizes:
            cache.begin(size)
            outs.append(cache.attend(0, *(x[start : start + size] for x in (q, k, v))))
            cache.commit()
            start += size
        cache.release()
        return torch.cat(outs).double()

    whole = read([n])
    for tile in (history.TILE, 2 * 128 * 3):
        monkeypatch.setattr(history, "TILE", tile)
        monkeypatch.setattr(pool.stores[0], "history", history.HistoryReader(pool.stores[0]))
        out = read([1000, 37, 963, 1000])
        assert (out - whole).norm() <= 1e-3 * whole.norm()


@pytest.mark.parametrize("packed", [True, False])
def test_a_model_reads_as_on_the_cpu(packed):
    """int8 products, rotations, windows and history in one, in blocks of one size; the rest is rounding."""
    config = ModelConfig.from_hf(
        LLAMA_8B
        | {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
        | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "rope_theta": 1e4}
    )
    torch.manual_seed(0)
    tensors = [
        (name, torch.randn(size) * (0.06 if len(size) == 2 else 1)) for name, size in config.tensor_shapes().items()
    ]
    mask = np.array([[True, False], [False, True]]) if packed else np.ones((2, 2), dtype=bool)
    tokens = torch.randint(512, (1500,))
    logits = []
    for device in (torch.device("cpu"), torch.device("cuda")):
        shape = CacheShape.for_model(config, mask, "kv4" if packed else "bf16", 16, 100, device)
        shape = replace(shape, block=128, front=128)
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        make = W8A8Linear.from_float if packed else (lambda w, b, dtype=dtype: DenseLinear(w.to(dtype), b))
        how = Build(mask, make, DenseLinear, lambda t, x=(device, dtype): t.to(*x), packed, packed, device=device)
        decoder = build_decoder(config, [(name, t.to(device)) for name, t in tensors], how)
        cache = DuoCache(BlockPool(shape, shape.packed_blocks(len(tokens)), device))
        read = [decoder.forward(part, cache)[-20:] for part in tokens.split([700, 333, 467])]
        logits.append(decoder.logits(torch.cat(read)).double().cpu())
    assert (logits[1] - logits[0]).norm() <= 0.05 * logits[0].norm()
