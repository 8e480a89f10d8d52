"""Triton kernels against their references: on a GPU, or anywhere with Triton and TRITON_INTERPRET=1."""

import pytest
import torch

from kernels import jit
from kernels.act_quant import fused as act_fused
from kernels.act_quant import ref as act_ref
from kernels.attention_decode.ref import Packed
from kernels.attention_prefill import chunk, ref
from kernels.int8_gemm import fused as gemm_fused
from kernels.int8_gemm import ref as gemm_ref
from kernels.kv4_pack import fragment, fragment_rows
from kernels.norm_rope import fused as rope_fused
from kernels.norm_rope import ref as rope_ref
from quant import kv4

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jit.missing(DEVICE) is not None, reason=str(jit.missing(DEVICE))),
]
BLOCK = 128


def _error(out, want):
    return float((out.double() - want.double()).norm() / want.double().norm())


def _randn(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(DEVICE, dtype)


@pytest.mark.parametrize(("rows", "inner", "outer"), [(1, 64, 8), (130, 200, 53), (257, 576, 300)])
@pytest.mark.parametrize("more", [False, True])
def test_int8_product(poisoned, rows, inner, outer, more):
    codes = torch.randint(-127, 128, (rows, inner), dtype=torch.int8, device=DEVICE)
    weight = torch.randint(-127, 128, (outer, inner), dtype=torch.int8, device=DEVICE)
    codes[0], weight[0] = 127, 127  # the largest sum
    scale = torch.rand(outer, device=DEVICE) + 0.1
    token = torch.rand(rows, 1, device=DEVICE) + 0.1 if more else None
    bias = _randn(outer) if more else None
    want = gemm_ref.matmul(codes, weight, scale)
    want = want * token + bias if more else want
    out = gemm_fused.product(codes, token, weight, scale, bias, torch.float32)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-2)
    narrow = gemm_fused.product(codes, token, weight, scale, bias, torch.bfloat16)
    assert _error(narrow, want) < 4e-3
    if more:
        total = _randn(rows, outer) * 1000
        expected = total + want
        gemm_fused.add_product_(total, codes, token, weight, scale, bias)
        torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-2)


def _same_codes(out, want):
    """Codes are equal but for a few that lay on the edge between two; scales are equal."""
    (codes, scale), (want_codes, want_scale) = out, want
    torch.testing.assert_close(scale, want_scale, rtol=1e-4, atol=1e-9)
    off = (codes.int() - want_codes.int()).abs()
    assert off.max() <= 1 and off.float().mean() < 2e-3


@pytest.mark.parametrize(("rows", "d"), [(3, 100), (5, 576), (2, 4096)])
def test_quantised_rows(poisoned, rows, d):
    x = _randn(rows, 2 * d)[:, :d] * 30  # rows that lie apart
    x[0] = 0
    weight = torch.rand(d, device=DEVICE) + 0.5
    _same_codes(act_fused.quantize_rows(x), act_ref.quantize_rows(x))
    _same_codes(act_fused.quantize_rows(x.half()), act_ref.quantize_rows(x.half().float()))
    for w in (None, weight):
        _same_codes(act_fused.rms_norm_quantize(x, w, 1e-5), act_ref.rms_norm_quantize(x, w, 1e-5))


@pytest.mark.parametrize(("rows", "d", "block"), [(3, 128, 64), (2, 1536, 64), (2, 96, 32), (3, 90, 6), (2, 128, None)])
@pytest.mark.parametrize("scaled", [False, True])
def test_gated(poisoned, rows, d, block, scaled):
    product = _randn(rows, 2 * d) * 3
    scale = torch.rand(rows, 1, device=DEVICE) + 0.1 if scaled else None
    turn = None if block is None else kv4.rotation(block).to(DEVICE)
    out = act_fused.gated_quantize(product.clone(), scale, turn)
    _same_codes(out, act_ref.gated_quantize(product.clone(), scale, turn))


@pytest.mark.parametrize(("rows", "d", "block"), [(3, 128, 64), (2, 1536, 64), (2, 96, 32), (3, 90, 6), (2, 128, None)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_turned(poisoned, rows, d, block, dtype):
    x = (_randn(rows, d) * 3).to(dtype)
    turn = None if block is None else kv4.rotation(block).to(DEVICE)
    _same_codes(act_fused.turned_quantize(x.clone(), turn), act_ref.turned_quantize(x.float(), turn))


@pytest.mark.parametrize("d", [64, 96, 128])
@pytest.mark.parametrize(("turned", "centred"), [((), 0), (((0, 9),), 0), (((0, 9),), 3), (((0, 2), (6, 1)), 1)])
def test_heads_are_placed(poisoned, d, turned, centred):
    n = 70
    heads = _randn(n, 12, d)
    phases = torch.rand(n, d // 2, dtype=torch.float64) * 6
    table = torch.polar(torch.ones_like(phases), phases).to(torch.complex64).to(DEVICE)
    more = (table, 9, turned, kv4.rotation(d).to(DEVICE), 6, _randn(centred, d) if centred else None)
    want, out, narrow = heads.clone(), heads.clone(), heads.half()
    rope_ref.place(want, *more)
    rope_fused.place(out, *more)
    rope_fused.place(narrow, *more)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)
    assert _error(narrow, want) < 1e-3


def _pool(heads, blocks, d):
    width = BLOCK * d // 2
    keys = torch.randint(256, (heads, blocks, width), dtype=torch.uint8)
    values = torch.randint(256, (heads, 1, blocks, width), dtype=torch.uint8)
    return keys, values, torch.rand(heads, blocks, BLOCK, 4).half() + 0.1


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("table", [[2], [4, 0, 1]])
def test_blocks_are_restored(poisoned, d, table):
    heads = 2
    keys, values, scales = _pool(heads, 5, d)
    codes = (
        fragment.unpack_keys(keys[:, table].flatten(1), d),
        fragment.unpack_values(values[:, :, table].flatten(2), d),
    )
    steps = scales[:, table].flatten(1, 2).split(1, -1)
    want = [kv4.dequantize(c, *steps[2 * i : 2 * i + 2], torch.float32) for i, c in enumerate(codes)]
    packed = Packed(*(x.to(DEVICE) for x in (keys, values, scales, torch.tensor(table, dtype=torch.int32))))
    out = torch.empty(2, heads, len(table) * BLOCK + 7, d, dtype=torch.float16, device=DEVICE)
    fragment_rows.restore(packed, *out[:, :, : len(table) * BLOCK])
    for i in range(2):
        assert _error(out[i, :, : len(table) * BLOCK].cpu(), want[i]) < 1e-3
    assert out[:, :, len(table) * BLOCK :].isnan().all()


@pytest.mark.parametrize(("size", "bits"), [(64, 4), (128, 4), (256, 4), (64, 8), (128, 8)])
def test_blocks_are_stored(poisoned, size, bits):
    heads, table, d = 2, [3, 1], kv4.width(size, bits)
    tokens = len(table) * BLOCK
    parts = torch.randn(2, tokens, heads, size).half() * 3
    parts[0, 5] = 1.5  # without a range
    (k_codes, k_scales), (v_codes, v_scales) = (kv4.quantize(x.transpose(0, 1), bits) for x in parts)
    k, v = (x.transpose(0, 1) for x in (kv4.widen(parts) if bits == 8 else parts))
    pool = [x.to(DEVICE) for x in _pool(heads, 5, d)]
    packed = Packed(*pool, torch.tensor(table, dtype=torch.int32, device=DEVICE))
    past = torch.empty(2, heads, tokens, d, dtype=torch.float16, device=DEVICE)
    share = kv4.step_share(size, bits)
    fragment_rows.store(packed, k.to(DEVICE), v.to(DEVICE), share, *past, wide=bits == 8)
    for head in range(heads):
        for i, block in enumerate(table):
            part = slice(i * BLOCK, (i + 1) * BLOCK)
            got_k = fragment.unpack_keys(pool[0][head : head + 1, block].cpu(), d)[0]
            got_v = fragment.unpack_values(pool[1][head : head + 1, :, block].cpu(), d)[0]
            for got, codes in ((got_k, k_codes), (got_v, v_codes)):
                off = (_whole(got, bits) - _whole(codes[head, part], bits)).abs()
                assert off.max() <= 1 and off.float().mean() < 1e-3
            scales = torch.cat((k_scales, v_scales), -1)[head, part]
            torch.testing.assert_close(pool[2][head, block].cpu(), scales, rtol=2e-3, atol=1e-6)
    back = torch.empty_like(past)
    fragment_rows.restore(packed, *back)
    torch.testing.assert_close(back, past, rtol=0, atol=0)


def _whole(codes, bits):
    codes = codes.int()
    high, low = codes.chunk(2, -1)
    return codes if bits == 4 else high * 16 + low


def _chunk_reference(q, own, past, first, history, before, scale):
    """Query by query in float64, over the keys that it sees."""
    n, heads, d = q.shape
    group = heads // own[0].shape[0]
    out = torch.empty(n, heads, d, dtype=torch.float64)
    for h in range(heads):
        for i in range(n):
            place = before + i
            start = place // BLOCK * BLOCK
            parts = [
                [p[h // group, :start] for p in past],
                [o[h // group, start : place + 1] for o in own],
                *([[f[h // group] for f in first]] if first is not None else []),
                *([[x[h // group] for x in history]] if history is not None else []),
            ]
            keys, values = (torch.cat([p[x] for p in parts]).double() for x in (0, 1))
            out[i, h] = (q[i, h].double() @ keys.T * scale).softmax(-1) @ values
    return out


@pytest.mark.parametrize(("n", "before"), [(1, 0), (130, 0), (70, 100), (128, 128 - 1), (256, 5)])
@pytest.mark.parametrize(("first", "history"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("d", [16, 64])
def test_a_chunk_sees_its_block_and_what_lies_before(poisoned, n, before, first, history, d):
    kv_heads, group, dtype = 2, 2, torch.float16
    filled = before + n
    q = torch.randn(n, kv_heads * group, d).to(dtype) * 2
    own = torch.randn(2, kv_heads, filled, d).to(dtype)
    complete = filled // BLOCK * BLOCK
    past = torch.full((2, kv_heads, complete + 9, d), torch.nan, dtype=dtype)
    past[:, :, :complete] = torch.randn(2, kv_heads, complete, d)
    front = torch.randn(2, kv_heads, BLOCK, d).to(dtype) if first else None
    older = torch.randn(2, kv_heads, 50, d).to(dtype) if history else None
    scale = d**-0.5
    want = _chunk_reference(q, own, past, front, older, before, scale)
    state = None
    if older is not None:
        o, lse = ref.attend(q.transpose(0, 1)[None], older[None, 0], older[None, 1], scale=scale)
        state = o[0].transpose(0, 1).contiguous().to(DEVICE), lse[0].T.contiguous().to(DEVICE)
    out = torch.empty(n, kv_heads * group, d, dtype=dtype, device=DEVICE)
    chunk.attend_chunk(
        q.to(DEVICE),
        tuple(own.to(DEVICE)),
        tuple(past.to(DEVICE)),
        None if front is None else tuple(front.to(DEVICE)),
        state,
        before,
        scale,
        out,
    )
    assert _error(out.cpu(), want) < 2e-3


@pytest.mark.parametrize(("length", "n"), [(0, 1), (0, 300), (3, 150), (500, 130)])
@pytest.mark.parametrize(("sink", "recent"), [(0, 1), (4, 20), (128, 256), (150, 64), (1000, 2)])
def test_a_window(poisoned, length, n, sink, recent):
    kv_heads, group, d, dtype = 2, 2, 32, torch.float16
    total = length + n
    q = torch.randn(n, kv_heads * group, d).to(dtype) * 2
    k, v = torch.randn(2, kv_heads, total, d).to(dtype)
    i, j = torch.arange(length, total)[:, None], torch.arange(total)[None]
    seen = (j <= i) & ((j < sink) | (j > i - recent))
    scores = torch.einsum("nhd,hmd->hnm", q.double(), k.repeat_interleave(group, 0).double()) * d**-0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    want = torch.einsum("hnm,hmd->nhd", weights, v.repeat_interleave(group, 0).double())
    held = min(sink + recent, total)
    sinks = torch.full((2, kv_heads, held, d), torch.nan, dtype=dtype)
    sinks[:, :, : min(sink, total)] = torch.stack((k, v))[:, :, : min(sink, total)]
    start = max(length - recent + 1, min(sink, length), 0)
    run = torch.stack((k, v))[:, :, start:]
    out = torch.empty(n, kv_heads * group, d, dtype=dtype, device=DEVICE)
    chunk.attend_window(
        q.to(DEVICE), tuple(sinks.to(DEVICE)), tuple(run.to(DEVICE)), length, start, sink, recent, d**-0.5, out
    )
    assert _error(out.cpu(), want) < 2e-3


def test_parts_are_merged(poisoned):
    q = torch.randn(1, 4, 37, 16)
    k, v = torch.randn(2, 1, 2, 60, 16)
    k[:, :, 40:] *= 5  # parts differ much in weight

    def part(keys):
        out, lse = ref.attend(q, k[:, :, keys], v[:, :, keys], scale=1.0)
        return out[0].transpose(0, 1).contiguous().to(DEVICE), lse[0].T.contiguous().to(DEVICE)

    want, want_lse = part(slice(None))
    left, right = part(slice(40)), part(slice(40, None))
    out = torch.empty_like(want), torch.empty_like(want_lse)
    chunk.merge(left, right, out)
    torch.testing.assert_close(out, (want, want_lse), rtol=0, atol=1e-5)
    chunk.merge(left, right, left)
    torch.testing.assert_close(left, (want, want_lse), rtol=0, atol=1e-5)
