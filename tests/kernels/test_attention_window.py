"""The decode step over sinks and ring: every backend against float64, with what it must not read made NaN."""

import pytest
import torch

from kernels.attention_window import native, ref, split
from kernels.jit import INTERPRETED

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _float64(q, near, keys, values, sink, held, scale):
    keys, values = keys[:, :held].double(), values[:, :held].double()
    scores = torch.cat((near.double() @ keys[:, :sink].mT, q.double() @ keys[:, sink:].mT), -1)
    return (scores * scale).softmax(-1) @ values


def _skip_unless_served(backend, d, group, dtype):
    if backend is not ref and (why := backend.declines(DEVICE, head_dim=d, group=group, dtype=dtype)):
        pytest.skip(why)
    if backend is split and INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter rounds bf16 wrongly")


@pytest.mark.parametrize("backend", [ref, native, split], ids=lambda backend: backend.__name__.split(".")[-1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "group", "d"), [(3, 3, 64), (1, 1, 16), (2, 17, 128)])
@pytest.mark.parametrize(
    ("sink", "slots", "held", "at"),
    [(4, 2048, 2048, 700), (0, 1, 1, 0), (1, 2, 2, 1), (4, 300, 3, 2), (70, 300, 300, 299), (500, 501, 501, 500)],
)
def test_step_equals_float64(poisoned, backend, dtype, heads, group, d, sink, slots, held, at):
    _skip_unless_served(backend, d, group, dtype)
    q, near = torch.randn(2, heads, group, d, device=DEVICE) * 2
    k, v = torch.randn(2, heads, d, device=DEVICE)
    keys, values = torch.full((2, heads, slots, d), torch.nan, dtype=dtype, device=DEVICE)
    keys[:, :held], values[:, :held] = torch.randn(2, heads, held, d, device=DEVICE)
    keys[:, at], values[:, at] = torch.nan, torch.nan  # the slot that is written
    before = keys.clone(), values.clone()
    clock = torch.tensor([held, at], device=DEVICE)
    out = backend.step(q, near, k, v, keys, values, sink, clock, d**-0.5)
    for old, new, token in zip(before, (keys, values), (k, v), strict=True):
        old[:, at] = token.to(dtype)
        assert torch.equal(old[:, :held], new[:, :held])  # one slot changed, and nothing else
        assert new[:, held:].isnan().all()
    want = _float64(q, near, keys, values, sink, held, d**-0.5)
    bound = 1e-5 if backend is not split else 2e-3 if dtype == torch.float16 else 1.5e-2
    assert (out.double() - want).norm() <= bound * want.norm()
