"""The fragment layout word by word, and its CUDA kernel compiled for each target within the chip's limits."""

import ctypes
import re
import shutil
import subprocess

import pytest
import torch

from kernels.attention_decode import fragment as kernel
from kernels.kv4_pack import fragment as layout

# Dynamic shared memory that a CTA may have, in bytes; every one has 65,536 registers.
CHIPS = {"sm_80": 163 * 1024, "sm_89": 99 * 1024, "sm_90": 227 * 1024}
REGISTERS = 65_536


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


def test_what_host_and_kernel_agree_on():
    source = kernel.SOURCE.read_text()
    body = re.search(r"struct Params \{(.*?)\};", source, re.DOTALL).group(1)
    names = re.findall(r"(\w+)(?=[,;])", re.sub(r"//.*", "", body))
    assert names == [name for name, _ in kernel._Params._fields_]
    assert ctypes.sizeof(kernel._Params) % 8 == 0
    assert f"MOST_SPLITS = {kernel.MOST_SPLITS};" in source
    assert f"MERGE_THREADS = {kernel.MERGE_THREADS};" in source
    assert f"HEADS = {layout.LARGEST_GROUP};" in source
    assert f"TILE = {layout.TILE};" in source


@pytest.mark.parametrize("processors", [58, 108, 132, 148])
def test_splits_fill_the_gpu_in_one_wave(processors):
    for heads in range(1, 9):
        splits = kernel.splits_for(heads, processors)
        assert 0.85 * processors < splits * heads <= processors


def test_it_declines_with_a_reason():
    assert kernel.declines(torch.device("cpu"), head_dim=128) == "CUDA only, not cpu"
    assert "head size 80" in kernel.declines(torch.device("cuda"), head_dim=80)
    assert "9 query heads" in kernel.declines(torch.device("cuda"), head_dim=128, group=9)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("d", layout.HEAD_DIMS)
def test_compiles_without_spills_within_the_chips_limits(tmp_path, d, chip):
    chosen = kernel.tuning(d, CHIPS[chip])
    defines = [f"-DHEAD_DIM={d}", f"-DWARPS={chosen.warps}", f"-DSTAGES={chosen.stages}"]
    command = ["nvcc", "-std=c++17", f"-arch={chip}", *defines, "-Xptxas=-v", "-cubin", "-o", str(tmp_path / "x")]
    done = subprocess.run([*command, str(kernel.SOURCE)], capture_output=True, text=True, check=False)
    report = done.stdout + done.stderr
    assert done.returncode == 0, report
    for name, threads, dynamic in (
        ("kv4_decode", chosen.warps * 32, chosen.shared_bytes(d)),
        ("kv4_merge", kernel.MERGE_THREADS, 0),
    ):
        part = report.split(f"Compiling entry function '{name}'")[1].split("Compiling entry")[0]
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in part
        registers = int(re.search(r"Used (\d+) registers", part).group(1))
        static = int((re.search(r"(\d+) bytes smem", part) or [0, "0"])[1])
        assert -(-registers // 8) * 8 * threads <= REGISTERS
        assert static + dynamic <= CHIPS[chip]
