"""The CUDA decode kernel against float64 on the same codes, with everything it must not read or leave made NaN."""

import pytest
import torch

from benchmarks.decode import float64_attention, random_history, relative_error
from kernels import compiled, nvrtc
from kernels.attention_decode import Packed, fragment
from kernels.kv4_pack import fragment as layout

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
BLOCK = 128


def _case(heads, group, d, table, exact, blocks=None, sharpness=1.0):
    """q, exact keys and values, packed history; blocks that `table` leaves out are poisoned."""
    reason = fragment.declines(torch.device("cuda"), head_dim=d, group=group)
    assert reason is None, reason
    blocks = blocks or max(table, default=-1) + 2
    pool = random_history(heads, blocks, d, layout)
    unused = torch.ones(blocks, dtype=torch.bool, device="cuda")
    unused[torch.tensor(table, dtype=torch.long)] = False
    pool.scales[:, unused] = torch.nan
    packed = Packed(pool.keys, pool.values, pool.scales, torch.tensor(table, dtype=torch.int32, device="cuda"))
    q = torch.randn(heads, group, d, device="cuda") * sharpness
    # As the cache holds them: rows of longer buffers, NaN behind what counts.
    buffers = torch.full((2, heads, exact + 3, d), torch.nan, dtype=torch.float16, device="cuda")
    buffers[:, :, :exact] = torch.randn(2, heads, exact, d, device="cuda")
    return q, *buffers[:, :, :exact], packed


def _check(q, exact_k, exact_v, packed, bound=1e-3, **more):
    scale = q.shape[-1] ** -0.5
    out = fragment.decode(q, exact_k, exact_v, packed, layout, scale, **more)
    error = relative_error(out, float64_attention(q, exact_k, exact_v, packed, layout, scale))
    assert error <= bound, error
    return out


@pytest.mark.parametrize("d", layout.HEAD_DIMS)
@pytest.mark.parametrize("group", [1, 3, 4, 7, 8])
@pytest.mark.parametrize(
    ("heads", "blocks", "exact"), [(1, 0, 1), (2, 1, 0), (1, 3, 200), (3, 40, 256), (8, 257, 129), (5, 1000, 600)]
)
def test_equals_float64(poisoned, d, group, heads, blocks, exact):
    _check(*_case(heads, group, d, list(range(blocks)), exact))


@pytest.mark.parametrize("d", [96, 128])
def test_blocks_in_any_order(poisoned, d):
    _check(*_case(2, 4, d, [*range(50, 90), 3, 7, *range(20, 9, -1), 100], 131))


@pytest.mark.parametrize("sharpness", [0.0, 6.0, 40.0])
def test_flat_and_sharp_attention(poisoned, sharpness):
    """At 40 one token takes nearly everything, and its score's own rounding to fp16 queries is what is seen."""
    _check(*_case(2, 4, 128, list(range(300)), 77, sharpness=sharpness), bound=1e-3 if sharpness < 10 else 1e-2)


@pytest.mark.parametrize("rising", [True, False])
def test_a_maximum_that_keeps_moving(poisoned, rising):
    q, exact_k, exact_v, packed = _case(1, 4, 128, list(range(64)), 10)
    ramp = torch.linspace(-40, 40, 64 * BLOCK, device="cuda")
    packed.scales[:, :64, :, 1] = (ramp if rising else -ramp).view(64, BLOCK).half()
    _check(q.abs(), exact_k, exact_v, packed)


def test_is_right_at_a_million_tokens_and_repeats(poisoned):
    case = _case(2, 4, 128, list(range(8192)), 256)
    assert torch.equal(_check(*case), _check(*case))


def test_addresses_beyond_32_bits(poisoned):
    """Codes of 2.6 GB, read at their end."""
    _check(*_case(8, 4, 128, [39_998, *range(39_000, 39_100), 0], 5, blocks=40_000))


def test_a_graph_serves_every_length(poisoned):
    q, exact_k, exact_v, packed = _case(3, 4, 128, list(range(500)), 256)
    lengths = torch.tensor([256, 500], dtype=torch.int32, device="cuda")
    scale = 128**-0.5
    fragment.decode(q, exact_k, exact_v, packed, layout, scale, lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fragment.decode(q, exact_k, exact_v, packed, layout, scale, lengths)
    for exact, blocks in ((1, 0), (130, 1), (256, 500), (200, 77)):
        lengths.copy_(torch.tensor([exact, blocks], dtype=torch.int32))
        out.fill_(torch.nan)
        graph.replay()
        part = Packed(packed.keys, packed.values, packed.scales, packed.table[:blocks])
        want = float64_attention(q, exact_k[:, :exact], exact_v[:, :exact], part, layout, scale)
        assert relative_error(out, want) <= 1e-3


def test_machine_code_is_kept_and_a_damaged_file_is_replaced(monkeypatch, tmp_path):
    monkeypatch.setattr(compiled, "_kept_in", tmp_path / "kernels")
    defines = {"HEAD_DIM": 64, "WARPS": 4, "STAGES": 2}
    device = torch.device("cuda", 0)
    nvrtc.Program(fragment.SOURCE, defines, device)
    (kept,) = (tmp_path / "kernels").iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-100])
    nvrtc.Program(fragment.SOURCE, defines, device).kernel("kv4_decode", 128)
    assert kept.read_bytes() == whole
