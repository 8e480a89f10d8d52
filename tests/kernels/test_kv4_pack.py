"""4-bit layouts: packing loses nothing, and the CPU layout is torch's own."""

import pytest
import torch

from kernels.kv4_pack import KV4_LAYOUT, int4pack

CPU = torch.device("cpu")


SERVING = [
    pytest.param(layout, d, id=f"{layout.name}-{d}")
    for layout in KV4_LAYOUT.backends
    for d in (16, 64, 96, 128, 256)
    if layout.declines(CPU, head_dim=d) is None
]


@pytest.mark.parametrize(("layout", "head_dim"), SERVING)
def test_unpack_inverts_pack(layout, head_dim):
    codes = torch.randint(0, 16, (3, 256, head_dim), dtype=torch.uint8)
    keys = layout.run.pack_keys(codes)
    values = layout.run.pack_values(codes)
    assert keys.shape == (3, 256 * head_dim // 2)
    assert values.shape[:2] == (3, layout.run.value_panels(head_dim))
    assert values.numel() * 2 == codes.numel()
    assert torch.equal(layout.run.unpack_keys(keys, head_dim), codes)
    assert torch.equal(layout.run.unpack_values(values, head_dim), codes)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_cpu_layout_is_the_one_torch_multiplies_by(head_dim):
    reason = int4pack.declines(CPU, head_dim=head_dim)
    if reason:
        pytest.skip(reason)
    codes = torch.randint(0, 16, (256, head_dim), dtype=torch.uint8)
    convert = torch.ops.aten._convert_weight_to_int4pack_for_cpu
    assert torch.equal(convert(codes.int(), 1).flatten(), int4pack.pack_keys(codes[None]).flatten())
    width = int4pack.panel()
    for panel in range(head_dim // width):
        theirs = convert(codes[:, panel * width : (panel + 1) * width].T.contiguous().int(), 1)
        assert torch.equal(theirs.flatten(), int4pack.pack_values(codes[None])[0, panel])


def test_blocks_laid_end_to_end_are_one_longer_weight():
    for layout in (b for b in KV4_LAYOUT.backends if b.declines(CPU, head_dim=64) is None):
        codes = torch.randint(0, 16, (2, 384, 64), dtype=torch.uint8)
        joined = torch.cat([layout.run.pack_keys(codes[:, i : i + 128]) for i in range(0, 384, 128)], 1)
        assert torch.equal(joined, layout.run.pack_keys(codes))
        joined = torch.cat([layout.run.pack_values(codes[:, i : i + 128]) for i in range(0, 384, 128)], 2)
        assert torch.equal(joined, layout.run.pack_values(codes))
