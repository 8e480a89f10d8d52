"""The fragment layout word by word, and how decode attention is spread over a GPU."""

import pytest
import torch

from kernels.attention_decode import fragment as kernel
from kernels.kv4_pack import fragment as layout


@pytest.mark.parametrize("d", layout.HEAD_DIMS)
def test_unpack_inverts_pack_and_blocks_join(d):
    codes = torch.randint(0, 16, (3, 384, d), dtype=torch.uint8)
    keys, values = layout.pack_keys(codes), layout.pack_values(codes)
    assert keys.shape == (3, 384 * d // 2) and values.shape == (3, 1, 384 * d // 2)
    assert torch.equal(layout.unpack_keys(keys, d), codes)
    assert torch.equal(layout.unpack_values(values, d), codes)
    blocks = [codes[:, i : i + 128] for i in range(0, 384, 128)]
    assert torch.equal(torch.cat([layout.pack_keys(block) for block in blocks], 1), keys)
    assert torch.equal(torch.cat([layout.pack_values(block) for block in blocks], 2), values)


@pytest.mark.parametrize("d", layout.HEAD_DIMS)
def test_a_word_is_a_lanes_operand(d):
    """Each code where the tensor core's own operand layout and the order of the kernel's loads put it."""
    codes = torch.randint(0, 16, (1, 96, d), dtype=torch.uint8)
    keys, values = (pack(codes).flatten().view(torch.int32).long() for pack in (layout.pack_keys, layout.pack_values))
    tile, sixteen, step, row, column, place, half = torch.meshgrid(
        *(torch.arange(n) for n in (3, 2, d // 16, 8, 4, 4, 2)), indexing="ij"
    )
    upper, far = place % 2, place // 2
    word = sixteen * (d // 16) + step
    at = ((tile * (d // 32) + word // 4) * 32 + row * 4 + column) * 4 + word % 4
    shift = 16 * half + 4 * place
    start = tile * 32 + sixteen * 16
    channel = step // 2 * 32 + column * 8 + step % 2 * 4 + far * 2 + half
    assert torch.equal((keys[at] >> shift) & 15, codes[0, start + row + 8 * upper, channel].long())
    token = start + 2 * column + half + 8 * far
    assert torch.equal((values[at] >> shift) & 15, codes[0, token, step * 16 + row + 8 * upper].long())


@pytest.mark.parametrize("processors", [58, 108, 132, 148])
def test_splits_fill_the_gpu_in_one_wave(processors):
    for heads in range(1, 9):
        splits = kernel.splits_for(heads, processors)
        assert 0.85 * processors < splits * heads <= processors


def test_it_declines_with_a_reason():
    assert kernel.declines(torch.device("cpu"), head_dim=128) == "CUDA only, not cpu"
    assert "head size 80" in kernel.declines(torch.device("cuda"), head_dim=80)
    assert "9 query heads" in kernel.declines(torch.device("cuda"), head_dim=128, group=9)
