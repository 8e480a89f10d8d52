"""Every Triton kernel, launched by the code that launches it but only compiled: for each target, within its limits."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.engine import warm_up
from kernels.act_quant import fused as rows
from kernels.attention_decode import Packed
from kernels.attention_prefill import chunk
from kernels.attention_window import split
from kernels.int8_gemm import fused as gemm
from kernels.kv4_pack import fragment_rows as blocks
from kernels.norm_rope import fused as place
from tests.kernels.test_cuda_sources import CHIPS, REGISTERS

triton = pytest.importorskip("triton", reason="Triton is not installed")
MODULES = {"rows": rows, "chunk": chunk, "split": split, "gemm": gemm, "blocks": blocks, "place": place}
HALF = torch.float16
SPILLED = 128  # bytes a thread: a tile of 128 rows fills the registers, and some of them may wait in the L1 cache


def _split(d: int) -> None:
    heads, slots = 2, 2048
    q, new, kept = torch.zeros(heads, 4, d), torch.zeros(heads, d), torch.zeros(heads, slots, d, dtype=HALF)
    split.step(q, q, new, new, kept, kept, 4, torch.zeros(2, dtype=torch.int64), 1.0)


def _chunk(d: int) -> None:
    n, heads = 300, 4
    q, kept = torch.zeros(n, heads, d, dtype=HALF), torch.zeros(1, 384, d, dtype=HALF)
    pair, history = (kept, kept), (q, torch.zeros(n, heads))
    chunk.attend_chunk(q, pair, pair, pair, history, 77, 1.0, q)
    chunk.attend_window(q, pair, pair, 900, 600, 128, 256, 1.0, q)
    chunk.merge(history, history, history)


def _gemm(tokens: int) -> None:
    codes, weight = torch.zeros(tokens, 4096, dtype=torch.int8), torch.zeros(6144, 4096, dtype=torch.int8)
    token, scale = torch.zeros(tokens, 1), torch.zeros(6144)
    gemm.product(codes, token, weight, scale, None, HALF)
    gemm.add_product_(torch.zeros(tokens, 6144), codes, token, weight, scale, scale)


def _rows(width: int) -> None:
    rows.quantize_rows(torch.zeros(8, width, dtype=HALF))
    rows.rms_norm_quantize(torch.zeros(8, width), torch.zeros(width), 1e-5)
    for dtype in (torch.float32, torch.bfloat16):
        rows.gated_quantize(torch.zeros(8, 2 * width, dtype=dtype), None, torch.zeros(64, 64))


def _blocks(d: int) -> None:
    heads, count = 2, 3
    words = torch.zeros(heads, count, 64 * d, dtype=torch.uint8)
    table = torch.zeros(count, dtype=torch.int32)
    packed = Packed(words, words[:, None], torch.zeros(heads, count, 128, 4, dtype=HALF), table)
    kept = torch.zeros(heads, 128 * count, d, dtype=HALF)
    for wide in (False, True):
        blocks.store(packed, kept, kept, 0.1, kept, kept, wide)
    blocks.restore(packed, kept, kept)


def _place(d: int) -> None:
    table = torch.zeros(300, d // 2, dtype=torch.complex64)
    for dtype in (torch.float32, HALF):
        place.place(
            torch.zeros(300, 6, d, dtype=dtype), table, 5, ((0, 2), (4, 1)), torch.zeros(d, d), 4, torch.zeros(1, d)
        )


CASES: list[tuple[str, Callable[[int], None], int]] = [
    *(("split", _split, d) for d in (64, 128, 256)),
    *(("chunk", _chunk, d) for d in (64, 128)),  # at 256 it spills kilobytes: right, but slow
    *(("gemm", _gemm, tokens) for tokens in (1, 8192)),
    *(("rows", _rows, width) for width in (4096, 14_336)),
    *(("blocks", _blocks, d) for d in (64, 128)),
    ("place", _place, 64),  # likewise at 128, where the kernel in CUDA stands in front of it
]


class _Target:
    """In place of a GPU's driver: names the target, and has no device."""

    def __init__(self, capability: int) -> None:
        self.target = triton.backends.compiler.GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return int(self.target.arch)  # what a kernel was compiled for is kept by device

    def get_current_stream(self, device: int) -> int:
        return 0


def test_there_is_no_other_module() -> None:
    kernels = Path(chunk.__file__).parents[1]
    found = {file for file in kernels.rglob("*.py") if "from kernels.jit import" in file.read_text()}
    assert found == {Path(str(module.__file__)) for module in MODULES.values()}
    assert {name for name, _, _ in CASES} == set(MODULES)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(("name", "launch", "size"), CASES, ids=[f"{name}-{size}" for name, _, size in CASES])
def test_compiles_within_the_chips_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, launch: Callable[[int], None], size: int, chip: str
) -> None:
    capability = int(chip.removeprefix("sm_"))
    compiled: list[tuple[str, Any]] = []

    def instead(kernel: Any, grid: Any) -> Callable[..., None]:
        return lambda *args, **more: compiled.append(
            (kernel.fn.__name__, kernel.warmup(*args, grid=(1,) if callable(grid) else grid, **more))
        )

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.runtime.JITFunction, "__getitem__", instead)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=108))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: divmod(capability, 10))
    shape, tiles = chunk._shape, gemm.tiles  # as on a GPU: the tensors here lie on the CPU
    monkeypatch.setattr(chunk, "_shape", lambda device, d: shape(torch.device("cuda"), d))
    monkeypatch.setattr(gemm, "tiles", lambda tokens, hopper: tiles(tokens, capability >= 90))
    monkeypatch.setattr(triton.runtime.driver, "_active", _Target(capability))
    launch(size)
    assert compiled
    for kernel, binary in compiled:
        report = _assembled(binary.asm["ptx"], tmp_path, chip)
        used = re.search(r"Used (\d+) registers", report)
        assert used is not None, report
        spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
        assert spilled is not None, report
        assert max(int(n) for n in spilled.groups()) <= SPILLED, (kernel, report)
        threads = 32 * binary.metadata.num_warps
        assert -(-int(used.group(1)) // 8) * 8 * threads <= REGISTERS, (kernel, report)
        assert binary.metadata.shared <= CHIPS[chip], (kernel, binary.metadata.shared)


def _read(n: int, before: int, behind: int) -> None:
    """Launches what a chunk of n tokens needs, `before` of whose block are there already, `behind` so many blocks."""
    heads, d = 4, 64
    q = torch.zeros(n, 3 * heads, d, dtype=HALF)
    own = torch.zeros(before + n, heads, d, dtype=HALF).transpose(0, 1)
    past, front = torch.zeros(2, heads, 8192, d, dtype=HALF), torch.zeros(2, heads, 256, d, dtype=HALF)[:, :, :128]
    parts = q, torch.zeros(n, 3 * heads)
    for first, history in ((None, None), (front, None), (front, parts)):
        chunk.attend_chunk(q, (own, own), (past[0], past[1]), first, history, before, 1.0, q)
    chunk.merge(parts, parts, parts)
    run = torch.zeros(2, heads, min(behind * 128, 255) + n, d, dtype=HALF)
    chunk.attend_window(q, (past[0], past[1]), (run[0], run[1]), behind * 128 + before, before, 128, 256, 1.0, q)
    codes, weight = torch.zeros(n, 512, dtype=torch.int8), torch.zeros(768, 512, dtype=torch.int8)
    token, scale = torch.zeros(n, 1), torch.zeros(768)
    gemm.product(codes, token, weight, scale, None, HALF)
    gemm.add_product_(torch.zeros(n, 768), codes, token, weight, scale, scale)
    rows.quantize_rows(torch.zeros(n, 512, dtype=HALF))
    rows.rms_norm_quantize(torch.zeros(n, 512), torch.zeros(512), 1e-5)
    rows.gated_quantize(torch.zeros(n, 1024, dtype=HALF), None, torch.zeros(64, 64))
    place.place(
        q, torch.zeros(n, d // 2, dtype=torch.complex64), 9, ((0, 2), (8, 1)), torch.zeros(d, d), 8, torch.zeros(1, d)
    )
    words = torch.zeros(heads, 100, 64 * d, dtype=torch.uint8)
    table = torch.zeros(200, dtype=torch.int32)[before % 7 : before % 7 + behind]
    packed = Packed(words, words[:, None], torch.zeros(heads, 100, 128, 4, dtype=HALF), table)
    kept = past[:, :, : 128 * behind]
    full = own[:, : (before + n) // 128 * 128]
    if behind:
        blocks.restore(packed, kept[0], kept[1])
    if count := full.shape[1] // 128:
        new = replace(packed, table=table.new_zeros(count))
        blocks.store(new, full, full, 0.1, past[0, :, : 128 * count], past[1, :, : 128 * count])


def test_a_length_never_seen_needs_no_kernel_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the warm-up's chunks need is all that is ever compiled: no answer waits for a compiler."""
    needed: set[tuple[str, str]] = set()
    forgotten: set[int] = set()

    def launch(kernel: Any, grid: Any) -> Any:
        if id(kernel) not in forgotten:  # what other tests have compiled
            forgotten.add(id(kernel))
            kernel.device_caches.clear()
        return lambda *args, **more: kernel.warmup(*args, grid=(1,), **more)

    monkeypatch.setattr(triton.runtime.JITFunction, "__getitem__", launch)
    monkeypatch.setattr(
        triton.runtime.JITFunction,
        "_do_compile",
        lambda kernel, key, *rest: needed.add((f"{kernel.fn.__module__}.{kernel.fn.__name__}", str(key))),
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=108))
    monkeypatch.setattr(triton.runtime.driver, "_active", _Target(90))
    at = 0
    for n in warm_up._CHUNKS:
        _read(n, at % 128, at // 128)
        at += n
    warm, at = set(needed), 0
    assert len({name for name, _ in warm}) >= 10
    for n in (1, 2, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 1000, 2048, 4096):
        _read(n, at % 128, min(at // 128, 60))
        at += n
    assert needed == warm


def _assembled(ptx: str, folder: Path, chip: str) -> str:
    """What Triton's own assembler says of a kernel."""
    (folder / "x.ptx").write_text(ptx)
    assembler = triton.knobs.nvidia.ptxas.path
    target = chip + "a" * (chip == "sm_90")
    command = [assembler, "-v", f"--gpu-name={target}", str(folder / "x.ptx"), "-o", str(folder / "x.cubin")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr
