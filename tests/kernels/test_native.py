"""Kernels in C: equal to their references on odd shapes, in poisoned memory; compiled once, declined with a reason."""

import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

from kernels import compiled, cpu, native
from kernels.act_quant import ACT_QUANT
from kernels.act_quant import native as act_native
from kernels.act_quant import ref as act_ref
from kernels.attention_prefill import blocks
from kernels.attention_window import native as window_native
from kernels.attention_window import ref as window_ref
from kernels.int8_gemm import native as gemm_native
from kernels.int8_gemm import ref as gemm_ref
from kernels.kv4_pack import native as pack_native
from kernels.norm_rope import native as rope_native
from kernels.norm_rope import ref as rope_ref
from models.cache.duo import DuoCache
from models.cache.pool import BlockPool
from models.cache.shape import CacheShape
from models.cache.store import HeadStore
from quant import kv4

CPU = torch.device("cpu")


def _needs(reason):
    return pytest.mark.skipif(reason is not None, reason=str(reason))


@pytest.fixture(autouse=True)
def _poison(monkeypatch):
    """What a kernel does not write is NaN, or a code that no kernel gives."""
    plain = torch.empty

    def poisoned(*shape, **options):
        made = plain(*shape, **options)
        return made.fill_(torch.nan if made.dtype.is_floating_point else 77)

    monkeypatch.setattr(torch, "empty", poisoned)


@_needs(act_native.declines(CPU))
@pytest.mark.parametrize(("n", "d"), [(1, 576), (7, 37), (5, 16), (130, 129)])
def test_quantised_rows_are_bit_for_bit_those_of_the_reference(n, d):
    x, weight = torch.randn(n, d) * 3, torch.rand(d) + 0.5
    x[n // 2] = 0
    codes, scale = act_native.quantize_rows(x)
    want, want_scale = act_ref.quantize_rows(x)
    assert torch.equal(codes, want) and torch.equal(scale, want_scale)
    for held in (None, weight):
        codes, scale = act_native.rms_norm_quantize(x, held, 1e-5)
        want, want_scale = act_ref.rms_norm_quantize(x, held, 1e-5)
        assert torch.equal(codes, want)
        torch.testing.assert_close(scale, want_scale, rtol=1e-5, atol=0)


@_needs(act_native.declines(CPU))
def test_rows_may_lie_apart():
    x = torch.randn(6, 100)[:, 10:50]
    assert torch.equal(act_native.quantize_rows(x)[0], act_ref.quantize_rows(x)[0])


@_needs(act_native.declines(CPU))
@pytest.mark.parametrize(("n", "d", "block"), [(64, 1536, 64), (1, 128, 128), (5, 96, 16), (4, 100, 0), (3, 96, 48)])
@pytest.mark.parametrize("scaled", [False, True])
def test_gated_codes_are_those_of_the_reference_but_for_ties(n, d, block, scaled):
    product, scale = torch.randn(n, 2 * d) * 4, torch.rand(n, 1) + 0.1 if scaled else None
    turn = kv4.rotation(block) if block else None
    codes, step = act_native.gated_quantize(product.clone(), scale, turn)
    want, want_step = act_ref.gated_quantize(product.clone(), scale, turn)
    assert (codes.int() - want.int()).abs().max() <= 1
    assert (codes != want).double().mean() < 1e-3  # exp and sums differ by roundings, so values at a tie may fall apart
    torch.testing.assert_close(step, want_step, rtol=1e-5, atol=0)


@pytest.fixture(params=[True, False], ids=["units", "vectors"])
def _with_units(request, monkeypatch):
    """Once on this processor's matrix units, once without them, as most processors are."""
    caches = (native.library, native._fails, gemm_native._functions, blocks._functions)
    if request.param and not cpu.matrix_units():
        pytest.skip("this processor has no matrix units (AMX)")
    monkeypatch.setattr(cpu, "matrix_units", lambda: request.param)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@_needs(gemm_native.declines(CPU))
@pytest.mark.usefixtures("_with_units")
@pytest.mark.parametrize(
    ("n", "inner", "outer"), [(1, 16, 8), (1, 577, 961), (3, 37, 53), (33, 64, 31), (300, 640, 65)]
)
@pytest.mark.parametrize("biased", [False, True])
def test_product_with_its_epilogue(n, inner, outer, biased):
    codes = torch.randint(-127, 128, (n, inner), dtype=torch.int8)
    weight = torch.randint(-127, 128, (outer, inner), dtype=torch.int8)
    scale, token_scale = torch.rand(outer) + 0.1, torch.rand(n, 1) + 0.1
    bias = torch.randn(outer) * 1e4 if biased else None
    want = gemm_ref.matmul(codes, weight, scale) * token_scale + (bias if biased else 0)
    tiles = gemm_native.prepack(weight)
    torch.testing.assert_close(gemm_native.product(codes, token_scale, tiles, scale, bias), want, rtol=1e-6, atol=1e-2)
    total = torch.randn(n, outer) * 1e4
    want = want + total
    gemm_native.add_product_(total, codes, token_scale, tiles, scale, bias)
    torch.testing.assert_close(total, want, rtol=1e-6, atol=1e-2)


@_needs(gemm_native.declines(CPU))
@pytest.mark.usefixtures("_with_units")
@pytest.mark.parametrize(("n", "inner", "half"), [(1, 64, 16), (1, 100, 48), (31, 576, 1536), (77, 37, 16)])
def test_product_with_its_gate(n, inner, half):
    codes = torch.randint(-127, 128, (n, inner), dtype=torch.int8)
    weight = torch.randint(-127, 128, (2 * half, inner), dtype=torch.int8)
    scale, token_scale = torch.rand(2 * half) / 1e4, torch.rand(n, 1) + 0.1
    product = gemm_ref.matmul(codes, weight, scale) * token_scale
    got = gemm_native.gated_product(codes, token_scale, gemm_native.prepack(weight), scale)
    torch.testing.assert_close(got, act_ref.gated(product, None, None), rtol=1e-5, atol=1e-5)


@_needs(act_native.declines(CPU))
@pytest.mark.parametrize("block", [0, 16, 48, 64])
def test_turned_codes_are_those_of_the_reference_but_for_ties(block):
    x, turn = torch.randn(9, 192), kv4.rotation(block) if block else None
    codes, scale = act_native.turned_quantize(x.clone(), turn)
    want, want_scale = act_ref.turned_quantize(x.clone(), turn)
    assert (codes.int() - want.int()).abs().max() <= 1 and (codes != want).double().mean() < 1e-3
    torch.testing.assert_close(scale, want_scale, rtol=1e-5, atol=0)


@_needs(rope_native.declines(CPU))
@pytest.mark.parametrize(("n", "heads", "d"), [(1, 15, 64), (7, 5, 128), (3, 4, 96), (5, 5, 16), (2, 4, 6)])
@pytest.mark.parametrize("centred", [False, True])
def test_positions_rotation_and_centre(n, heads, d, centred):
    apart = torch.randn(n, heads + 1, d)
    table = torch.polar(torch.ones(n, d // 2), torch.randn(n, d // 2))
    want = apart.clone()
    turned = ((0, 2), (3, 1))
    more = (3, torch.randn(1, d)) if centred else ()
    rope_native.place(apart[:, :heads], table, heads - 1, turned, kv4.rotation(d), *more)
    rope_ref.place(want[:, :heads], table, heads - 1, turned, kv4.rotation(d), *more)
    torch.testing.assert_close(apart, want, rtol=1e-5, atol=1e-5)


@_needs(pack_native.declines(CPU, 64))
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize(("d", "bits"), [(64, 4), (128, 4), (64, 8), (128, 8)])
def test_blocks_are_packed_bit_for_bit_as_by_the_reference(d, bits, block):
    shape = CacheShape((2,), (0,), 2, d, 4, 8, bits, torch.float16, torch.float32, block=block)
    k, v = (torch.randn(2, 2, 3 * block, d) * torch.logspace(-3, 3, 3 * block)[:, None]).half()
    k[0, 5] = 0.25  # no range
    if bits == 8:
        k, v = kv4.widen(k), kv4.widen(v)
    ours, theirs = HeadStore(shape, 5, CPU), HeadStore(shape, 5, CPU)
    ids = [3, 0, 4]
    ours.write_in_c(slice(0, 2), torch.tensor(ids, dtype=torch.int32), k, v)
    theirs.write(slice(0, 2), ids, k, v)
    table = torch.tensor(ids)
    a, b = (pool.packed(slice(0, 2), table) for pool in (ours, theirs))
    assert torch.equal(a.keys[:, ids], b.keys[:, ids])
    assert torch.equal(a.values[:, :, ids], b.values[:, :, ids])
    assert torch.equal(a.scales[:, ids], b.scales[:, ids])


@_needs(pack_native.declines(CPU, 64))
def test_held_and_new_tokens_are_joined():
    apart = torch.randn(5, 4, 64)
    held = torch.randn(2, 2, 9, 64).half()
    k, v = pack_native.join_exact(apart[:, :2], apart[:, 2:], held[0, :, 2:5], held[1, :, 2:5])
    assert torch.equal(k, torch.cat((held[0, :, 2:5], apart[:, :2].transpose(0, 1).half()), 1))
    assert torch.equal(v, torch.cat((held[1, :, 2:5], apart[:, 2:].transpose(0, 1).half()), 1))


@_needs(blocks.declines(CPU, 64, True, torch.bfloat16))
@pytest.mark.usefixtures("_with_units")
@pytest.mark.parametrize(
    ("sizes", "d", "group", "heads"),
    [
        ((5,), 64, 3, 3),
        ((128,), 64, 1, 1),
        ((129,), 64, 3, 2),
        ((37, 91, 1, 300, 2, 512, 77), 64, 3, 3),
        ((256, 256, 13), 128, 4, 2),
        ((300, 2, 300), 256, 2, 1),
    ],
)
@pytest.mark.parametrize(("block", "front"), [(128, 128), (64, 32), (64, 0), (128, 33), (64, 16), (64, 100)])
def test_a_chunk_over_blocks_equals_the_reference(sizes, d, group, heads, block, front):
    outs = []
    for dtype in (torch.float32, torch.bfloat16):
        shape = CacheShape((heads,), (0,), group, d, 4, 8, 4, torch.float16, dtype, block=block, front=front)
        cache = DuoCache(BlockPool(shape, 32, CPU))
        torch.manual_seed(1)
        parts = []
        for n in sizes:
            tokens = torch.randn(n, heads * (group + 2), d) * 1.5
            cache.begin(n)
            parts.append(cache.attend(0, *tokens.split((heads * group, heads, heads), 1)))
            cache.commit()
        outs.append(torch.cat(parts))
    want, got = outs
    assert (got - want).norm() <= 5e-3 * want.norm()  # bf16 products


@_needs(blocks.declines_window(CPU, 64, torch.bfloat16, torch.float16))
@pytest.mark.usefixtures("_with_units")
@pytest.mark.parametrize(
    ("sizes", "d", "group", "sink", "recent"),
    [
        ((5,), 64, 3, 128, 256),
        ((37, 91, 1, 300, 2, 512, 77), 64, 3, 128, 256),
        ((37, 91, 1, 300, 2), 64, 3, 0, 1),
        ((256, 256, 13), 128, 4, 4, 20),
        ((300, 2, 300), 32, 1, 150, 100),
        ((300, 2, 300), 256, 2, 1000, 31),
    ],
)
def test_a_chunk_over_windows_equals_the_reference(sizes, d, group, sink, recent):
    outs = []
    for dtype in (torch.float32, torch.bfloat16):
        shape = CacheShape((0,), (2,), group, d, sink, recent, 4, torch.float16, dtype)
        cache = DuoCache(BlockPool(shape, 16, CPU))
        torch.manual_seed(1)
        parts = []
        for n in sizes:
            tokens = torch.randn(n, 2 * (group + 2), d) * 1.5
            cache.begin(n)
            parts.append(cache.attend(0, *tokens.split((2 * group, 2, 2), 1)))
            cache.commit()
        outs.append(torch.cat(parts))
    want, got = outs
    assert (got - want).norm() <= 5e-3 * want.norm()  # bf16 products


@_needs(window_native.declines(CPU, 64, torch.float16))
@pytest.mark.parametrize(
    ("sink", "held", "group", "d"), [(4, 3, 1, 64), (4, 300, 3, 64), (0, 1, 5, 128), (130, 131, 4, 16)]
)
def test_a_query_over_a_window(sink, held, group, d):
    q, near = torch.randn(2, 3, group, d) * 2
    keys, values = torch.randn(2, 3, 400, d).half()
    keys[:, held:] = values[:, held:] = torch.nan
    out = window_native.decode(q, near, keys, values, sink, held, d**-0.5)
    torch.testing.assert_close(out, window_ref.decode(q, near, keys, values, sink, held, d**-0.5), rtol=1e-5, atol=1e-5)


@_needs(native.declines(act_native.SOURCE, CPU))
def test_code_is_compiled_once_and_a_damaged_file_again(monkeypatch, tmp_path):
    monkeypatch.setattr(compiled, "_kept_in", tmp_path / "kernels")
    fresh = native.library.__wrapped__
    fresh(act_native.SOURCE)
    (kept,) = (tmp_path / "kernels").iterdir()
    whole = kept.read_bytes()
    monkeypatch.setattr(subprocess, "run", None)  # nothing is compiled any more
    fresh(act_native.SOURCE)
    monkeypatch.undo()
    monkeypatch.setattr(compiled, "_kept_in", tmp_path / "kernels")
    kept.unlink()
    kept.write_bytes(whole[:-100])
    fresh(act_native.SOURCE)
    assert len(kept.read_bytes()) == len(whole)


def test_a_full_disk_costs_a_compilation_and_leaves_no_file(monkeypatch, tmp_path):
    folder, replace = tmp_path / "kernels", Path.replace

    def full(path, target):
        if target.parent == folder:
            raise OSError(28, "No space left on device")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", full)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(compiled, "_kept_in", folder)
    path = compiled.kept("kernel", ".so", "key", lambda: b"code")
    assert path.parent != folder and path.read_bytes()[: -compiled.CHECKSUM] == b"code"
    assert list(folder.iterdir()) == []


def test_without_a_compiler_the_reference_serves(monkeypatch):
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    native._compiler.cache_clear()
    native._fails.cache_clear()
    native.library.cache_clear()
    try:
        reason = native.declines(act_native.SOURCE, CPU)
        assert reason and ("compiler" in reason or "AVX-512" in reason)
        assert ACT_QUANT.backends[-1].declines(CPU) is None
    finally:
        monkeypatch.undo()
        native._compiler.cache_clear()
        native._fails.cache_clear()
        native.library.cache_clear()


def test_another_device_is_declined():
    assert "CPU only" in native.declines(act_native.SOURCE, torch.device("cuda"))
