"""Every CUDA source: what host and kernel agree on, and compiled for each target within the chip's limits."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kernels import nvrtc
from kernels.act_quant import cuda as rows
from kernels.attention_decode import fragment as decode
from kernels.gemv import cuda as gemv
from kernels.int8_gemm import wgmma
from kernels.kv4_pack import fragment as pack
from kernels.norm_rope import cuda as place

# Shared memory that a CTA may have, in bytes; every one has 65,536 registers.
CHIPS = {"sm_80": 163 * 1024, "sm_89": 99 * 1024, "sm_90": 227 * 1024}
REGISTERS = 65_536
MODULES: dict[str, Any] = {
    "decode": decode,
    "pack": pack,
    "gemv": gemv,
    "rows": rows,
    "place": place,
    "wgmma": wgmma,
}
# (module, defines); decode's ring depends on the chip
EVERYWHERE: list[tuple[str, dict[str, int]]] = [
    *(("decode", {"HEAD_DIM": d}) for d in pack.HEAD_DIMS),
    *(("pack", {"HEAD_DIM": d, "WIDE": 0}) for d in pack.HEAD_DIMS),
    *(("pack", {"HEAD_DIM": d, "WIDE": 1}) for d in (128, 256)),
    *(("place", {"HEAD_DIM": d}) for d in place.HEAD_DIMS),
    ("gemv", {"INT8": 0}),
    ("gemv", {"INT8": 1}),
    ("rows", {}),
]
CASES = [(name, defines, chip) for name, defines in EVERYWHERE for chip in CHIPS]
CASES += [("wgmma", {"KIND": kind}, "sm_90") for kind in range(5)]


@pytest.mark.parametrize("name", MODULES)
def test_parameters_have_the_same_names_in_the_same_order(name: str) -> None:
    source = MODULES[name].SOURCE.read_text()
    body = re.search(r"struct Params \{(.*?)\};", source, re.DOTALL)
    assert body is not None
    names = re.findall(r"(\w+)(?=[,;])", re.sub(r"//.*", "", body.group(1)))
    assert names == [field for field, _ in MODULES[name]._Params._fields_]
    assert ctypes.sizeof(MODULES[name]._Params) % 4 == 0


def test_constants_are_the_same() -> None:
    source = {name: module.SOURCE.read_text() for name, module in MODULES.items()}
    assert f"MOST_SPLITS = {decode.MOST_SPLITS};" in source["decode"]
    assert f"MERGE_THREADS = {decode.MERGE_THREADS};" in source["decode"]
    assert f"HEADS = {pack.LARGEST_GROUP};" in source["decode"]
    assert f"TILE = {pack.TILE};" in source["decode"]
    assert f"THREADS = {pack.PACK_THREADS};" in source["pack"]
    assert f"THREADS = {rows.THREADS};" in source["rows"]
    assert f"WARPS = {place.WARPS};" in source["place"]
    assert f"WARPS = {gemv.WARPS};" in source["gemv"]
    assert f"DEPTH = {gemv.SPAN // 512};" in source["gemv"]
    assert f"WARPS * 32, {gemv.CTAS})" in source["gemv"]
    assert f"M = {wgmma.ROWS}, N = {wgmma.COLUMNS}, K = {wgmma.STEP};" in source["wgmma"]
    assert f"STAGES = {wgmma.STAGES};" in source["wgmma"]
    assert f"THREADS = {wgmma.THREADS};" in source["wgmma"]


def test_there_is_no_other_source() -> None:
    kernels = Path(nvrtc.__file__).parent
    assert {module.SOURCE for module in MODULES.values()} == set(kernels.rglob("*.cu"))


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize(("name", "defines", "chip"), CASES)
def test_compiles_without_spills_within_the_chips_limits(
    tmp_path: Path, name: str, defines: dict[str, int], chip: str
) -> None:
    shapes = launches(name, defines, chip)
    if name == "decode":
        chosen = decode.tuning(defines["HEAD_DIM"], CHIPS[chip])
        defines = {**defines, "WARPS": chosen.warps, "STAGES": chosen.stages}
    flags = [f"-D{key}={value}" for key, value in defines.items()] + [f"-I{Path(nvrtc.__file__).parent}"]
    target = "-gencode=arch=compute_90a,code=sm_90a" if name == "wgmma" else f"-arch={chip}"
    command = ["nvcc", "-std=c++17", target, *flags, "-Xptxas=-v", "-cubin", "-o", str(tmp_path / "x")]
    done = subprocess.run([*command, str(MODULES[name].SOURCE)], capture_output=True, text=True, check=False)
    report = done.stdout + done.stderr
    assert done.returncode == 0, report
    assert set(re.findall(r"Compiling entry function '(\w+)'", report)) == set(shapes)
    for kernel, (threads, dynamic, at_once) in shapes.items():
        part = report.split(f"Compiling entry function '{kernel}'")[1].split("Compiling entry")[0]
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in part
        used = re.search(r"Used (\d+) registers", part)
        assert used is not None
        static = int((re.search(r"(\d+) bytes smem", part) or [0, "0"])[1])
        assert -(-int(used.group(1)) // 8) * 8 * threads * at_once <= REGISTERS
        assert static + dynamic <= CHIPS[chip]


def launches(name: str, defines: dict[str, int], chip: str) -> dict[str, tuple[int, int, int]]:
    """Of each kernel: threads, most dynamic shared memory, CTAs that a multiprocessor must hold."""
    if name == "decode":
        chosen = decode.tuning(defines["HEAD_DIM"], CHIPS[chip])
        return {
            "kv4_decode": (chosen.warps * 32, chosen.shared_bytes(defines["HEAD_DIM"]), 1),
            "kv4_merge": (decode.MERGE_THREADS, 0, 1),
        }
    if name == "rows":
        names = ("quantize_rows", "rms_norm_quantize", "gated_quantize")
        return dict.fromkeys(names, (rows.THREADS, 4 * rows.LONGEST, 1))
    return {
        "pack": {"kv4_pack": (pack.PACK_THREADS, 0, 1)},
        "place": {"place": (place.WARPS * 32, 0, 1)},
        "gemv": {"gemv": (gemv.WARPS * 32, gemv.LONGEST, gemv.CTAS)},
        "wgmma": {"gemm": (wgmma.THREADS, wgmma.SHARED, 1)},
    }[name]
