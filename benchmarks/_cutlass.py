"""An int8 product of CUTLASS for Hopper, to compare ours with: compiled where nvcc and flashinfer-python's headers are.

Which tile and order of the tiles is fastest depends on the shape: `products` gives all of them, to be timed.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import CDLL, c_char_p, c_int, c_void_p
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import compiled
from kernels.registry import first_line

SOURCE = Path(__file__).with_name("_cutlass.cu")
SWIZZLES = (1, 2, 4, 8)
_FLAGS = (
    *("-std=c++17", "-O3", "-DNDEBUG", "--expt-relaxed-constexpr", "-gencode=arch=compute_90a,code=sm_90a"),
    *("-shared", "-Xcompiler=-fPIC,-fvisibility=hidden"),
)


class Kernel(NamedTuple):
    """Rows and columns of a tile, CTAs of a cluster in either direction, and how two warpgroups share the tiles."""

    tile_m: int
    tile_n: int
    cluster_m: int
    cluster_n: int
    pingpong: bool

    def __str__(self) -> str:
        schedule = "pingpong" if self.pingpong else "cooperative"
        return f"{self.tile_m}x{self.tile_n} {schedule}, cluster {self.cluster_m}x{self.cluster_n}"


# A cluster shares the longer side's tile, or else CUTLASS's usual 2x1.
KERNELS = (
    Kernel(128, 256, 2, 1, pingpong=False),
    Kernel(256, 128, 1, 2, pingpong=False),
    Kernel(256, 128, 2, 1, pingpong=False),
    Kernel(128, 128, 2, 1, pingpong=True),
)


def declines(device: torch.device) -> str | None:
    """Serves compute capability 9.0 where it is compiled; the first call takes one to two minutes."""
    if device.type != "cuda":
        return f"CUDA only, not {device.type}"
    if torch.cuda.get_device_capability(device) != (9, 0):
        return "for compute capability 9.0"
    if reason := cannot_compile():
        return reason
    try:
        _libraries()
    except (OSError, RuntimeError) as error:
        return first_line(error)
    return None


def cannot_compile() -> str | None:
    """What is missing for it, or None."""
    if _nvcc() is None:
        return "CUTLASS is compiled, and there is no nvcc"
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer-python, which brings CUTLASS's headers, is not installed"
    if not (_headers() / "cutlass" / "version.h").is_file():
        return "this flashinfer-python brings no headers of CUTLASS"
    return None


def products(codes: Tensor, token_scale: Tensor, weight: Tensor, scale: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Every kernel and swizzle by name: bf16 [n, out] = (codes [n, in] @ weight [out, in]^T) * token_scale * scale.

    RuntimeError where CUTLASS refuses the operands.
    """
    return {
        f"{kernel}, swizzle {swizzle}": partial(_product, library, swizzle, codes, token_scale, weight, scale)
        for kernel, library in _libraries().items()
        for swizzle in SWIZZLES
    }


def _product(library: CDLL, swizzle: int, codes: Tensor, token_scale: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    (rows, inner), outer = codes.shape, weight.shape[0]
    out = torch.empty(rows, outer, dtype=torch.bfloat16, device=codes.device)
    operands = (codes, weight, token_scale, scale, out)
    if not all(tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 for tensor in operands):
        raise RuntimeError("CUTLASS: operands are to be contiguous, from a multiple of 16 bytes on")
    status = library.product(
        *(tensor.data_ptr() for tensor in operands),
        *(rows, outer, inner, swizzle, torch.cuda.current_stream(codes.device).cuda_stream),
    )
    if status:
        raise RuntimeError(f"CUTLASS: {library.describe(status).decode()}")
    return out


@cache
def _libraries() -> dict[Kernel, CDLL]:
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # each takes a processor for a minute
        return {kernel: _load(path) for kernel, path in zip(KERNELS, pool.map(_compiled, KERNELS), strict=True)}


def _load(path: Path) -> CDLL:
    library = CDLL(str(path))
    library.product.argtypes = (*[c_void_p] * 5, *[c_int] * 4, c_void_p)
    library.describe.argtypes, library.describe.restype = (c_int,), c_char_p
    return library


def _compiled(kernel: Kernel) -> Path:
    """The shared library of one kernel. RuntimeError with what nvcc said."""
    nvcc = str(_nvcc())
    defines = [f"-D{name.upper()}={int(value)}" for name, value in kernel._asdict().items()]
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    headers = (_headers() / "cutlass" / "version.h").read_text()
    key = "\n".join((SOURCE.read_text(), *_FLAGS, *defines, version, headers))

    def compile_code() -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "product.so"
            command = [nvcc, *_FLAGS, *defines, f"-I{_headers()}", str(SOURCE), "-o", str(out)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode or not out.is_file():
                raise RuntimeError(f"nvcc does not compile CUTLASS: {_complaint(done.stderr + done.stdout)}")
            return out.read_bytes()

    return compiled.kept("cutlass", ".so", key, compile_code)


def _complaint(text: str) -> str:
    """The first line that names an error; warnings come before it."""
    lines = text.strip().splitlines() or ["it says nothing"]
    return next((line for line in lines if "error" in line.lower()), lines[-1])


def _nvcc() -> str | None:
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def _headers() -> Path:
    spec = importlib.util.find_spec("flashinfer")  # found, not imported
    folders = (spec.submodule_search_locations if spec else None) or ["."]
    return Path(folders[0]) / "data" / "cutlass" / "include"
