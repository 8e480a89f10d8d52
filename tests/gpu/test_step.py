"""Everything of a decode step on a GPU: each kernel beside its reference, the live cache, the captured graph."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import islice

import pytest
import torch

from app.engine.graph import DecodeGraph
from app.engine.sampler import Sampler
from app.engine.types import SamplingParams
from benchmarks._llama_8b import LLAMA_8B, random_tensors
from kernels.act_quant import cuda as rows
from kernels.act_quant import ref as rows_ref
from kernels.gemv import cuda as gemv
from kernels.gemv import ref as gemv_ref
from kernels.kv4_pack import fragment
from kernels.norm_rope import cuda as placing
from kernels.norm_rope import ref as placing_ref
from models.build import Build, build_decoder
from models.cache.duo import DuoCache
from models.cache.live import LiveCache
from models.cache.plan import weights_bytes
from models.cache.pool import BlockPool
from models.cache.shape import CacheShape
from models.config import ModelConfig
from models.evidence import Watch, weigh
from quant import kv4
from quant.w8a8 import DenseLinear, W8A8Linear

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
CUDA = torch.device("cuda", 0)
BLOCK = 128
SHAPE = CacheShape((2, 0, 1), (1, 3, 2), 4, 128, 8, 40, 4, torch.float16, torch.float16)


def close(got, want, bound):
    assert got.shape == want.shape
    assert (got.double() - want.double()).norm() <= bound * want.double().norm()


@pytest.mark.parametrize(("out", "width"), [(1, 16), (7, 48), (4096, 4096), (6144, 4096), (1000, 14336), (333, 1200)])
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16])
def test_one_row_times_a_weight(poisoned, out, width, dtype):
    if dtype == torch.int8:
        x, weight = (torch.randint(-128, 128, (n, width), dtype=dtype, device=CUDA) for n in (1, out))
    else:
        x, weight = (torch.randn(n, width, device=CUDA).to(dtype) for n in (1, out))
    channels, token, bias = torch.rand(out, device=CUDA), torch.rand(1, 1, device=CUDA), torch.randn(out, device=CUDA)
    for extra in (
        (),
        (channels, token),
        (channels, token, bias),
        (channels, token, None, torch.randn_like(bias)[None]),
    ):
        twin = [None if t is None else t.clone() for t in extra]
        close(gemv.multiply(x, weight, *extra), gemv_ref.multiply(x, weight, *twin), 2e-6)


@pytest.mark.parametrize(("n", "d"), [(1, 4096), (1, 14336), (5, 576), (3, 4), (0, 64), (2, 24_000)])
def test_rows_of_codes(poisoned, n, d):
    x, weight = torch.randn(n, d, device=CUDA) * 3, torch.rand(d, device=CUDA)
    assert_codes(rows.quantize_rows(x), rows_ref.quantize_rows(x))
    if d % 64 == 0:
        turn = kv4.rotation(64).to(CUDA)
        assert_codes(rows.turned_quantize(x, turn), rows_ref.turned_quantize(x.clone(), turn))
    for w in (None, weight):
        assert_codes(rows.rms_norm_quantize(x, w, 1e-5), rows_ref.rms_norm_quantize(x, w, 1e-5))


@pytest.mark.parametrize(("n", "d"), [(1, 14336), (3, 1536), (2, 64)])
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("turned", [True, False])
def test_gated_rows_of_codes(poisoned, n, d, scaled, turned):
    product = torch.randn(n, 2 * d, device=CUDA) * 4
    scale = torch.rand(n, 1, device=CUDA) + 0.5 if scaled else None
    turn = kv4.rotation(64).to(CUDA) if turned else None
    got = rows.gated_quantize(product, scale, turn)
    assert_codes(got, rows_ref.gated_quantize(product.clone(), scale, turn))


def assert_codes(got, want):
    """Equal but for a code here and there that lies half-way between two, where the last bit decides."""
    (codes, scale), (want_codes, want_scale) = got, want
    assert codes.shape == want_codes.shape and scale.shape == want_scale.shape
    torch.testing.assert_close(scale, want_scale, rtol=1e-5, atol=0)
    difference = (codes.int() - want_codes.int()).abs()
    assert difference.numel() == 0 or (difference.max() <= 1 and (difference > 0).float().mean() < 2e-3)


def test_a_row_of_zeros_has_codes(poisoned):
    codes, scale = rows.quantize_rows(torch.zeros(2, 512, device=CUDA))
    assert not codes.any() and (scale > 0).all()


@pytest.mark.parametrize("d", [*placing.HEAD_DIMS, 80])
@pytest.mark.parametrize("n", [1, 7])
@pytest.mark.parametrize(("turned", "centred"), [((), 0), (((0, 12),), 0), (((0, 12),), 3), (((0, 4), (9, 2)), 2)])
def test_heads_get_their_places(poisoned, d, n, turned, centred):
    heads = torch.randn(n, 15, d, device=CUDA)
    table = torch.polar(torch.ones(n, d // 2, device=CUDA), torch.randn(n, d // 2, device=CUDA) * 9)
    turn, want = kv4.rotation(d).to(CUDA), heads.double()
    centre = torch.randn(centred, d, device=CUDA) if centred else None
    placing_ref.place(want, table.to(torch.complex128), 12, turned, turn.double(), 9, centre)
    placing.place(heads, table, 12, turned, turn, 9, centre)
    close(heads, want, 1e-6)


@pytest.mark.parametrize(("d", "bits"), [*((d, 4) for d in fragment.HEAD_DIMS), (64, 8), (128, 8)])
def test_a_full_block_is_packed_as_the_reference_packs_it(poisoned, d, bits):
    exact = torch.randn(2, 3, 2 * BLOCK, d, device=CUDA).half()
    exact[:, 1, 200] = 0.25  # a constant vector
    vectors, d = exact[:, :, BLOCK:], kv4.width(d, bits)
    share = kv4.step_share(vectors.shape[-1], bits)
    packed = [torch.randint(256, (3, 9, BLOCK * d // 2), dtype=torch.uint8, device=CUDA) for _ in range(2)]
    packed = [packed[0], packed[1][:, None], torch.rand(3, 9, BLOCK, 4, device=CUDA).half()]
    want = [t.clone() for t in packed]
    codes, scales = zip(*(kv4.quantize(x, bits) for x in vectors), strict=True)
    want[0][:, 7] = fragment.pack_keys(codes[0])
    want[1][:, :, 7] = fragment.pack_values(codes[1])
    want[2][:, 7] = torch.cat(scales, -1)
    table = torch.tensor([4, 7, 0], dtype=torch.int32, device=CUDA)
    exact = kv4.widen(exact) if bits == 8 else exact
    before = [t.clone() for t in packed]
    for place, expected in ((-1, before), (1, want)):
        full = torch.tensor([place], dtype=torch.int32, device=CUDA)
        fragment.pack_full((exact[0], exact[1]), tuple(packed), table, full, share, bits == 8)
        assert all(torch.equal(a, b) for a, b in zip(packed, expected, strict=True))


def _token():
    return torch.randn(3, 1, 12, 128, device=CUDA), *torch.randn(2, 3, 1, 3, 128, device=CUDA)


def _step(cache, q, k, v):
    cache.begin(1)
    out = torch.stack([cache.attend(i, q[i], k[i], v[i]) for i in range(3)])
    cache.commit()
    return out


@pytest.mark.parametrize(
    ("start", "bits", "wide"),
    [
        *((start, 4, ()) for start in (0, 1, 47, 127, 300, 383, 5000)),
        *((start, 4, (1, 0, 1)) for start in (0, 300, 5000)),
        (300, 8, ()),
    ],
)
def test_the_live_cache_equals_the_plain_one(poisoned, start, bits, wide):
    pool = BlockPool(replace(SHAPE, bits=bits, wide_heads=wide), 64, CUDA)
    pool.release(pool.allocate(3)[1:2])
    plain, live = DuoCache(pool), LiveCache(pool)
    if start:
        plain.begin(start)
        for i in range(3):
            plain.attend(i, *(torch.randn(start, n, 128, device=CUDA) for n in (12, 3, 3)))
        plain.commit()
    other = plain.fork()
    live.take(other)
    for n in range(start, start + 151):
        token = _token()
        other.reserve(n + 1)
        live.catch_up(other)
        got = _step(live, *token)
        if n < start + 150:  # the last one is taken back
            close(got, _step(plain, *token), 1e-3)
    live.give(other, start + 150)
    assert int(live.position) == start + 151
    for _ in range(2):
        token = _token()
        close(_step(other, *token), _step(plain, *token), 1e-3)


SIZES = {"vocab_size": 1000, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}
MASK = torch.tensor([[0, 0], [1, 0], [1, 1]]).bool().numpy()
WIDE = torch.tensor([[0, 0], [0, 0], [0, 1]]).bool().numpy()


def _decoder(config, wide=None):
    how = Build(MASK, W8A8Linear.from_float, DenseLinear, lambda t: t.to(torch.bfloat16), True, True, CUDA, wide=wide)
    return build_decoder(config, random_tensors(config, CUDA), how)


@pytest.fixture(scope="module", params=[("kv4", None), ("kv4", WIDE), ("kv8", None)], ids=["kv4", "some wide", "kv8"])
def tiny(request):
    """A small model of the kind with every kind of layer: no retrieval head, one, all."""
    kv, wide = request.param
    config = ModelConfig.from_hf({**LLAMA_8B, **SIZES, **HEADS})
    shape = CacheShape.for_model(config, MASK, kv, 16, 60, CUDA, wide)
    return _decoder(config, wide), BlockPool(shape, 64, CUDA)


def _read(decoder, cache, count):
    tokens = torch.randint(0, 1000, (count,))
    return tokens.tolist(), decoder.logits(decoder.forward(tokens, cache)[-1:])[0]


@pytest.mark.parametrize("length", [1, 100, 700])
def test_the_graph_gives_what_the_plain_steps_give(tiny, length):
    decoder, pool = tiny
    graph, cache = DecodeGraph(decoder, LiveCache(pool)), DuoCache(pool)
    ids, logits = _read(decoder, cache, length)
    plain = cache.fork()
    seen = []
    inner = graph.replay
    graph.replay = lambda token: seen.append(inner(token).clone()) or seen[-1]
    answer = graph.answer(cache, ids, logits, Sampler(SamplingParams()), None, cache.reserve)
    tokens = list(islice(answer, 200))
    answer.close()
    want = [decoder.logits(decoder.forward(torch.tensor([token]), plain))[0] for token in tokens]
    close(torch.stack(seen), torch.stack(want), 3e-2)  # int8 codes at a rounding edge fall to either side
    assert cache.length == len(ids) == length + 199  # the step behind the last token was taken back
    assert ids[length:] == tokens[:199]
    again = decoder.logits(decoder.forward(torch.tensor([tokens[-1]]), cache))[0]
    close(again, want[-1], 3e-2)
    cache.release()
    plain.release()


def test_the_planned_weights_are_what_a_decoder_holds():
    """With the second rotation, which bf16 holds at this size."""
    config = ModelConfig.from_hf(
        {**LLAMA_8B, **SIZES, "hidden_size": 1024, "num_key_value_heads": 2, "num_attention_heads": 8}
    )
    decoder = _decoder(config)
    assert decoder._narrow_turn is not None
    assert decoder.nbytes == pytest.approx(weights_bytes(config, "w8a8", CUDA), rel=0.002)  # norms are planned only


WATCHED = [(1, 1), (2, 0), (2, 6)]


@pytest.mark.parametrize("length", [2, 200])
def test_the_captured_step_keeps_the_queries_of_watched_heads(tiny, length):
    """The same as steps that the host drives keep; the step that is taken back leaves none."""
    decoder, pool = tiny
    graph, cache = DecodeGraph(decoder, LiveCache(pool, WATCHED)), DuoCache(pool)
    ids, logits = _read(decoder, cache, length)
    plain = cache.fork()
    cache.watch, plain.watch = Watch(WATCHED), Watch(WATCHED)
    answer = graph.answer(cache, ids, logits, Sampler(SamplingParams()), None, cache.reserve)
    tokens = list(islice(answer, 60))
    answer.close()
    for token in tokens[:-1]:
        decoder.forward(torch.tensor([token]), plain)
    got, want = (list(each.watch.queries(pool.shape.group)) for each in (cache, plain))
    assert [query[:2] for query in got] == [(1, 0), (2, 0), (2, 1)] == [query[:2] for query in want]
    for (*_, kept), (*_, same) in zip(got, want, strict=True):
        assert kept.shape == (1, 59, pool.shape.head_dim)
        close(kept, same, 5e-2)
    looked, same = (weigh(each, each.watch, length).masses for each in (cache, plain))
    assert abs(looked - same).sum() <= 5e-2
    cache.release()
    plain.release()


class _Interrupted(DecodeGraph):
    """While the step is captured, another thread takes pinned memory and device memory and waits for its own copy."""

    def _forward(self):
        if torch.cuda.is_current_stream_capturing():
            thread = threading.Thread(target=self._copy_out)
            thread.start()
            thread.join()
        return super()._forward()

    def _copy_out(self):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            source = torch.full((1 << 22,), 7, device=CUDA)
            host = torch.empty(1 << 22, dtype=source.dtype, pin_memory=True)
            host.copy_(source, non_blocking=True)
        stream.synchronize()
        self.copied = host


def test_what_another_thread_does_on_the_device_does_not_spoil_the_capture(tiny):
    """A chat may be on its way to disk when evidence heads are found and the step is captured anew."""
    decoder, pool = tiny
    graph, cache = _Interrupted(decoder, LiveCache(pool)), DuoCache(pool)
    assert (graph.copied == 7).all()
    _read(decoder, cache, 100)
    twin = cache.fork()
    graph.live.take(twin)
    twin.reserve(101)
    graph.live.catch_up(twin)
    want = decoder.logits(decoder.forward(torch.tensor([5]), cache))[0]
    close(graph.replay(torch.tensor([5], device=CUDA)), want, 3e-2)
    cache.release()
    twin.release()


def test_room_ends_the_answer_and_no_step_is_done_for_nothing(tiny):
    decoder, pool = tiny
    graph, cache = DecodeGraph(decoder, LiveCache(pool)), DuoCache(pool)
    ids, logits = _read(decoder, cache, 50)
    steps = []
    inner = graph.replay
    graph.replay = lambda token: steps.append(1) or inner(token)
    got = list(graph.answer(cache, ids, logits, Sampler(SamplingParams(temperature=1.0, seed=3)), 9, cache.reserve))
    assert len(got) == 9 and len(steps) == 8 and len(ids) == cache.length == 58
    cache.release()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.8, seed=1),
        SamplingParams(temperature=1.2, top_k=40, top_p=0.9, min_p=0.02, repetition_penalty=1.3, seed=2),
    ],
)
def test_sampling_on_the_device_equals_the_cpu(params):
    logits = torch.randn(30, 50_000) * 4
    here, there = Sampler(params), Sampler(params)
    assert [int(there.sample(x.to(CUDA))) for x in logits] == [int(here.sample(x)) for x in logits]
    assert int(there.sample(torch.full((50_000,), torch.nan, device=CUDA))) == -1
