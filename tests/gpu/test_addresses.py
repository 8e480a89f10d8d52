"""Addresses beyond 2^31, in bytes and in elements, in everything that a decode step reads or writes.

Each buffer is larger than 32 bits can count, filled with what must not be read, and used at its far end.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.decode import float64_attention, relative_error
from kernels.act_quant import cuda as rows
from kernels.act_quant import ref as rows_ref
from kernels.attention_decode import Held, Packed, fragment, ref
from kernels.gemv import cuda as gemv
from kernels.gemv import ref as gemv_ref
from kernels.kv4_pack import fragment as layout
from kernels.norm_rope import cuda as placing
from kernels.norm_rope import ref as placing_ref
from quant import kv4

CUDA = torch.device("cuda", 0)
BLOCK = 128
D, FAR = 128, 2**31


def _memory() -> int:
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(_memory() < 100 << 30, reason="needs a GPU with 100 GiB")]


@pytest.fixture(autouse=True)
def _freed():
    yield
    torch.cuda.empty_cache()


@pytest.fixture
def history():
    """Keys and values of 35 GB each, scales of more than 2^31 elements, NaN but for the blocks that are used."""
    heads, blocks = 8, 530_000
    keys = torch.empty(heads, blocks, BLOCK * D // 2, dtype=torch.uint8, device=CUDA)
    values = torch.empty(heads, 1, blocks, BLOCK * D // 2, dtype=torch.uint8, device=CUDA)
    scales = torch.full((heads, blocks, BLOCK, 4), torch.nan, dtype=torch.float16, device=CUDA)
    assert keys[0].numel() > FAR and scales.numel() > FAR
    used = torch.tensor([529_999, 3, *range(400_000, 400_200), 529_998], device=CUDA)
    for head in range(heads):
        keys[head, used] = torch.randint(256, (len(used), BLOCK * D // 2), dtype=torch.uint8, device=CUDA)
        values[head, 0, used] = torch.randint(256, (len(used), BLOCK * D // 2), dtype=torch.uint8, device=CUDA)
        scales[head, used] = (torch.rand(len(used), BLOCK, 4, device=CUDA) * 0.1 + 0.1).half()
    # The table is the end of a buffer of more than 2^31 elements, whose other ids lead out of the pool.
    table = torch.full((FAR + 1000,), 2**30, dtype=torch.int32, device=CUDA)
    table[-len(used) :] = used
    return Packed(keys, values, scales, table[-len(used) :])


def _far_rows(heads: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [heads, count, d], each head more than 2^31 bytes behind the one before; NaN all around."""
    buffer = torch.full((2, heads, FAR // (2 * D) + 100, D), torch.nan, dtype=torch.float16, device=CUDA)
    near = buffer[:, :, :count]
    near.copy_(torch.randn(near.shape, device=CUDA))
    assert near.stride(1) * 2 > FAR
    return near[0], near[1]


def test_attention_over_far_blocks(history):
    q, (exact_k, exact_v) = torch.randn(8, 4, D, device=CUDA), torch.randn(2, 8, 70, D, device=CUDA).half()
    out = fragment.decode(q, exact_k, exact_v, history, layout, D**-0.5)
    assert relative_error(out, float64_attention(q, exact_k, exact_v, history, layout, D**-0.5)) <= 1e-3


def test_a_step_with_far_blocks(history):
    q, k, v = torch.randn(11, 4, D, device=CUDA), *torch.randn(2, 11, D, device=CUDA)
    clock = torch.tensor([131, history.table.numel() - 1, 130, 48, 9, -1], dtype=torch.int32, device=CUDA)
    exact, windows = torch.randn(2, 8, 256, D, device=CUDA).half(), torch.randn(2, 3, 48, D, device=CUDA).half()
    twins = [(x[0].clone(), x[1].clone()) for x in (exact, windows)]
    out = fragment.step(q, k, v, clock, Held(tuple(exact), history, tuple(windows)), layout, D**-0.5)
    want = ref.step(q, k, v, clock, Held(twins[0], history, twins[1]), layout, D**-0.5)
    assert relative_error(out, want.double()) <= 1e-3
    assert torch.equal(exact[0], twins[0][0]) and torch.equal(windows[1], twins[1][1])


def test_a_step_with_far_exact_tokens_and_windows():
    exact, windows = _far_rows(2, 256), _far_rows(3, 48)
    nothing = torch.empty(2, 1, 1, device=CUDA, dtype=torch.uint8)
    packed = Packed(nothing, nothing[:, None], nothing.half(), torch.zeros(1, dtype=torch.int32, device=CUDA))
    q, k, v = torch.randn(5, 4, D, device=CUDA), *torch.randn(2, 5, D, device=CUDA)
    clock = torch.tensor([256, 0, 255, 48, 47, -1], dtype=torch.int32, device=CUDA)
    out = fragment.step(q, k, v, clock, Held(exact, packed, windows), layout, D**-0.5)
    none = Packed(*(x[:, :0] for x in (nothing, nothing[:, None], nothing)), packed.table[:0])
    for part, (keys, values) in ((slice(2), exact), (slice(2, 5), windows)):
        assert torch.equal(keys[:, -1], k[part].half()) and torch.equal(values[:, -1], v[part].half())
        want = float64_attention(q[part], keys, values, none, layout, D**-0.5)
        assert relative_error(out[part], want) <= 1e-3


def test_a_block_is_packed_far_away(history):
    exact = torch.randn(2, 8, 2 * BLOCK, D, device=CUDA).half()
    codes, scales = zip(*(kv4.quantize(x[:, BLOCK:], 4) for x in exact), strict=True)
    table = torch.tensor([529_997], dtype=torch.int32, device=CUDA)
    full = torch.zeros(1, dtype=torch.int32, device=CUDA)
    layout.pack_full(
        (exact[0], exact[1]), (history.keys, history.values, history.scales), table, full, kv4.step_share(D, 4)
    )
    assert torch.equal(history.keys[:, 529_997], layout.pack_keys(codes[0]))
    assert torch.equal(history.values[:, :, 529_997], layout.pack_values(codes[1]))
    assert torch.equal(history.scales[:, 529_997], torch.cat(scales, -1))
    assert history.scales[:, 529_996].isnan().all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16])
def test_a_weight_of_more_than_2_31_elements(dtype):
    weight = torch.empty(530_000, 4096, dtype=dtype, device=CUDA)
    for part in weight.split(50_000):
        part.copy_(torch.randint(-128, 128, part.shape, dtype=torch.int8, device=CUDA))
    x = torch.randint(-128, 128, (1, 4096), dtype=torch.int8, device=CUDA).to(dtype)
    got = gemv.multiply(x, weight)
    for place in (0, 300_000, 529_000):
        want = gemv_ref.multiply(x, weight[place : place + 1000])
        assert relative_error(got[:, place : place + 1000], want.double()) <= 2e-6


def test_more_than_2_31_activations():
    n, d = 150_000, 14_336
    x = torch.full((n, d), torch.nan, device=CUDA)
    x[-3:].normal_()
    codes, scale = rows.quantize_rows(x)
    want, want_scale = rows_ref.quantize_rows(x[-3:])
    assert (codes[-3:].int() - want.int()).abs().max() <= 1
    torch.testing.assert_close(scale[-3:], want_scale)


def test_heads_of_more_than_2_31_elements():
    n = 360_000
    heads = torch.full((n, 48, D), torch.nan, device=CUDA)
    table = torch.polar(torch.ones(n, D // 2, device=CUDA), torch.rand(n, D // 2, device=CUDA))
    heads[-2:].normal_()
    turn, want = kv4.rotation(D).to(CUDA), heads[-2:].double()
    centre = torch.randn(4, D, device=CUDA)
    placing_ref.place(want, table[-2:].to(torch.complex128), 40, ((0, 16), (32, 4)), turn.double(), 32, centre)
    placing.place(heads, table, 40, ((0, 16), (32, 4)), turn, 32, centre)
    assert relative_error(heads[-2:], want) <= 1e-6
