"""C sources compiled at first use by the machine's own compiler, for the processor at hand, and called by ctypes.

Vectors and matrix units differ from processor to processor, and a compiled wheel would know the oldest only. Where
there is no compiler, torch's kernels serve.
"""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from kernels import compiled, cpu

_FLAGS = (
    "-std=gnu11 -O3 -march=native -mprefer-vector-width=512 -fopenmp -fPIC -shared "
    "-fno-math-errno -fno-trapping-math -ffp-contract=off"
).split()
_NO_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16".split()  # where the system does not let this process use it
_HEADER = Path(__file__).with_name("native.h")


class NativeError(RuntimeError):
    """The compiler is missing or refused."""


@cache
def _compiler() -> tuple[str, str]:
    """The C compiler's path and what it says of itself."""
    for name in ("gcc", "cc"):
        path = shutil.which(name)
        try:
            if path is not None:
                said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=True)
                return path, said.stdout
        except (OSError, subprocess.SubprocessError):
            continue
    raise NativeError("no C compiler (gcc) was found")


def _processor() -> str:
    """What tells processors apart: code for one may not run on the other that shares the home directory."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "".join(sorted({line for line in lines if line.startswith(("model name", "flags"))}))
    except OSError:
        return platform.processor()


@cache
def library(source: Path) -> ctypes.CDLL:
    """The compiled source; raises NativeError. Threads come from torch's own pool: the loader shares its OpenMP."""
    compiler, version = _compiler()
    text = source.read_text()
    flags = _FLAGS if cpu.matrix_units() else [*_FLAGS, *_NO_AMX]
    key = "\n".join((text, _HEADER.read_text(), *flags, version, _processor()))

    def build() -> bytes:
        with tempfile.TemporaryDirectory(prefix="octavo-") as folder:
            out = Path(folder) / "kernel.so"
            command = [compiler, *flags, f"-I{_HEADER.parent}", "-o", str(out), str(source), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
            if done.returncode:
                errors = [line for line in done.stderr.splitlines() if "error:" in line] or [done.stderr.strip()]
                raise NativeError(f"{compiler} refused {source.name}: {errors[0]}")
            return out.read_bytes()

    try:
        return ctypes.CDLL(str(compiled.kept(f"{source.parent.name}-{platform.machine()}", ".so", key, build)))
    except (OSError, subprocess.SubprocessError) as error:
        raise NativeError(str(error)) from error


def declines(source: Path, device: torch.device, bf16: bool = False) -> str | None:
    """Why a source cannot serve a device, or None; `bf16` where it multiplies such numbers."""
    if device.type != "cpu":
        return f"CPU only, not {device.type}"
    if platform.machine() not in ("x86_64", "AMD64") or cpu.vector_width() != "AVX512":
        return f"needs AVX-512, this processor has {cpu.vector_width()}"
    if bf16 and not cpu.bf16_products():
        return "this processor has no products in bf16 (AVX512_BF16)"
    return _fails(source)


@cache
def _fails(source: Path) -> str | None:
    try:
        library(source)
    except NativeError as error:
        return str(error)
    return None


def at(x: Tensor | None) -> int | None:
    """Where a tensor lies, for a pointer parameter."""
    return None if x is None else x.data_ptr()


def function(source: Path, name: str, *kinds: type) -> ctypes._NamedFuncPointer:
    """A function of a source with its parameters' types; it gives nothing back."""
    found = getattr(library(source), name)
    found.argtypes, found.restype = kinds, None
    return found


_hadamards: WeakIdKeyDictionary = WeakIdKeyDictionary()  # matrices that were looked at, and what they are


def is_hadamard(matrix: Tensor) -> bool:
    """Whether an orthonormal matrix [n, n] is the Hadamard matrix that the C code applies in n log n steps."""
    known = _hadamards.get(matrix)
    if known is None:
        size = matrix.shape[0]
        known = size in (16, 32, 64, 128, 256) and torch.equal(_hadamard(size), matrix)
        _hadamards[matrix] = known
    return known


@cache
def _hadamard(size: int) -> Tensor:
    bits = torch.arange(size)
    common = bits[:, None] & bits
    odd = sum((common >> i & 1 for i in range(size.bit_length())), torch.zeros(size, size, dtype=torch.int64)) % 2
    return (1 - 2 * odd).double().div(size**0.5).float()
