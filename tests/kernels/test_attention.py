"""Attention kernels against the reference, and the reference against float64 written out."""

import math

import pytest
import torch

from kernels.attention_decode import KV4_DECODE, Packed
from kernels.attention_prefill import ATTENTION, merge_, ref
from kernels.kv4_pack import KV4_LAYOUT
from quant import kv4

CPU = torch.device("cpu")


def _inputs(n, m, heads=6, kv_heads=2, d=32, dtype=torch.float32, batch=2):
    q = torch.randn(batch, heads, n, d, dtype=dtype)
    k, v = torch.randn(2, batch, kv_heads, m, d, dtype=dtype)
    return q, k, v


def _float64(q, k, v, scale, visible):
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = (q.double() @ k.transpose(-1, -2) * scale).masked_fill(~visible, -math.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 7), (5, 5), (3, 130), (129, 300)])
@pytest.mark.parametrize("causal", [False, True])
def test_reference_is_bottom_right_causal(n, m, causal):
    q, k, v = _inputs(n, m)
    visible = torch.ones(n, m, dtype=torch.bool)
    if causal:
        visible = torch.tensor([[j <= i + m - n for j in range(m)] for i in range(n)])
    out, lse = ref.attend(q, k, v, scale=0.3, causal=causal)
    want, want_lse = _float64(q, k, v, 0.3, visible)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "backend", [b for b in ATTENTION.backends if b.declines(CPU, head_dim=32, dtype=torch.bfloat16) is None]
)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(
    ("n", "m", "causal", "masked"), [(1, 9, 0, 0), (77, 77, 1, 0), (31, 257, 0, 0), (40, 90, 0, 1)]
)
def test_backends_equal_the_reference(backend, dtype, bound, n, m, causal, masked):
    q, k, v = _inputs(n, m, dtype=dtype)
    mask = None
    if masked:
        mask = torch.zeros(2, 1, n, m, dtype=dtype)
        mask[torch.rand(2, 1, n, m) < 0.5] = -math.inf
        mask[..., 0] = 0
    out, lse = backend.run.attend(q, k, v, scale=0.2, causal=bool(causal), mask=mask)
    want, want_lse = ref.attend(q.float(), k.float(), v.float(), scale=0.2, causal=bool(causal), mask=mask)
    torch.testing.assert_close(out.float(), want, rtol=0, atol=bound)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=bound)


def test_merge_of_disjoint_keys_is_attention_over_all():
    q, k, v = _inputs(9, 100)
    q = q * 6  # peaked, so that the parts differ much in weight
    want, want_lse = ref.attend(q, k, v, scale=1.0)
    out, lse = ref.attend(q, k[:, :, :13], v[:, :, :13], scale=1.0)
    other, other_lse = ref.attend(q, k[:, :, 13:], v[:, :, 13:], scale=1.0)
    merge_(out, lse, other, other_lse)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "backend", [b for b in KV4_DECODE.backends if b.declines(CPU, head_dim=64) is None], ids=lambda b: b.name
)
@pytest.mark.parametrize(
    ("d", "group", "runs"), [(64, 3, (128,)), (64, 1, (256, 128, 1024)), (128, 8, (384,)), (64, 4, ())]
)
@pytest.mark.parametrize("size", [64, 128])
def test_decode_equals_float64_on_the_same_codes(backend, d, group, runs, size):
    layout = KV4_LAYOUT.choose(CPU, head_dim=d).backend.run
    heads, exact = 3, 200
    q = torch.randn(heads, group, d) * 2
    exact_k, exact_v = torch.randn(2, heads, exact, d).half()
    keys, values, blocks, table, place = [exact_k.double()], [exact_v.double()], [], [], 0
    for tokens in runs:
        k, v = torch.randn(2, heads, tokens, d)
        (k_codes, k_scales), (v_codes, v_scales) = kv4.quantize(k, 4), kv4.quantize(v, 4)
        scales = torch.cat((k_scales, v_scales), -1)
        for i in range(0, tokens + size, size):  # one block more than is read lies between the runs
            part = slice(i % tokens, i % tokens + size)
            packed = layout.pack_keys(k_codes[:, part]), layout.pack_values(v_codes[:, part]), scales[:, part]
            blocks.append(packed if i < tokens else [torch.zeros_like(x) for x in packed])
        table += range(place, place + tokens // size)
        place = len(blocks)
        keys.append((k_codes.double() - 8) * k_scales[..., :1].double() + k_scales[..., 1:].double())
        values.append((v_codes.double() - 8) * v_scales[..., :1].double() + v_scales[..., 1:].double())
    if not blocks:
        none = torch.zeros(heads, size, d, dtype=torch.uint8)
        blocks = [(layout.pack_keys(none), layout.pack_values(none), torch.zeros(heads, size, 4).half())]
    pool = [torch.stack([b[i] for b in blocks], axis) for i, axis in ((0, 1), (1, 2), (2, 1))]
    out = backend.run.decode(
        q, exact_k, exact_v, Packed(*pool, torch.tensor(table, dtype=torch.int32)), layout, d**-0.5
    )
    weights = (q.double() @ torch.cat(keys, 1).transpose(1, 2) * d**-0.5).softmax(-1)
    want = weights @ torch.cat(values, 1)
    assert (out.double() - want).norm() <= 1e-5 * want.norm()
