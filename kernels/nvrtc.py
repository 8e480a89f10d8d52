"""CUDA sources compiled at run time by the NVRTC that torch brings along, and launched; no nvcc, no headers."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch

from kernels import compiled
from kernels.registry import first_line

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("x", "y", "z", "threads", "threads_y", "threads_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


_EARLY = _Attribute(6, 0, (1,))  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


_COMMON = Path(__file__).with_name("common.cuh")


class CudaError(RuntimeError):
    """NVRTC or the driver refused."""


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@cache
def _compiler() -> ctypes.CDLL:
    """The NVRTC of torch's CUDA version: as the loader finds it, else from the packages that torch installs."""
    major = (torch.version.cuda or "").split(".")[0]
    name = f"libnvrtc.so.{major}"
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(f) for f in (spec.submodule_search_locations or ())] if spec else []
    for candidate in (name, *(str(path) for folder in folders for path in sorted(folder.glob(f"*/lib/{name}")))):
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise CudaError(f"{name} was not found")


def missing() -> str | None:
    """Why nothing can be compiled here, or None."""
    if not torch.version.cuda:
        return "torch is built without CUDA"
    try:
        _driver(), _compiler()
    except (OSError, CudaError) as error:
        return str(error)
    return None


def unusable(device: torch.device) -> str | None:
    """Why no kernel that is compiled here can run on a CUDA device, or None."""
    reason = missing()
    if reason:
        return reason
    return None if torch.cuda.get_device_capability(device) >= (8, 0) else "needs compute capability 8.0"


def indexed(device: torch.device) -> torch.device:
    """A CUDA device by its number."""
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def cannot_load(device: torch.device, load: Callable[[], object]) -> str | None:
    """Why a kernel cannot run on a CUDA device, or None: it is compiled and loaded once to see."""
    reason = unusable(device)
    if reason:
        return reason
    try:
        load()
    except (CudaError, ValueError, OSError) as error:
        return f"cannot be compiled: {first_line(error)}"
    return None


def _check(code: int) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise CudaError((text.value or b"unknown CUDA error").decode())


def _call(function: str, *arguments: object) -> None:
    code = getattr(_compiler(), function)(*arguments)
    if code:
        text = _compiler().nvrtcGetErrorString
        text.restype = ctypes.c_char_p
        raise CudaError(text(code).decode())


def compile_cubin(source: str, options: Sequence[str]) -> bytes:
    """Machine code of a source; raises CudaError with the compiler's words."""
    program = ctypes.c_void_p()
    _call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
    try:
        flags = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        size = ctypes.c_size_t()
        if _compiler().nvrtcCompileProgram(program, len(options), flags):
            _call("nvrtcGetProgramLogSize", program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            _call("nvrtcGetProgramLog", program, log)
            raise CudaError(log.value.decode(errors="replace"))
        _call("nvrtcGetCUBINSize", program, ctypes.byref(size))
        cubin = ctypes.create_string_buffer(size.value)
        _call("nvrtcGetCUBIN", program, cubin)
        return cubin.raw
    finally:
        _call("nvrtcDestroyProgram", ctypes.byref(program))


def _cubin(path: Path, defines: dict[str, int], arch: str) -> bytes:
    """As `compile_cubin`, kept for the next start."""
    source = path.read_text().replace(f'#include "{_COMMON.name}"', _COMMON.read_text())
    options = [f"--gpu-architecture={arch}", "--std=c++17", *(f"-D{name}={value}" for name, value in defines.items())]
    numbers = (ctypes.c_int(), ctypes.c_int())
    _call("nvrtcVersion", *(ctypes.byref(x) for x in numbers))
    key = "\n".join([source, *options, *(str(x.value) for x in numbers)])
    held = compiled.kept(f"{path.stem}-{arch}", ".cubin", key, lambda: compile_cubin(source, options)).read_bytes()
    return held[: -compiled.CHECKSUM]


TensorMap = ctypes.c_ubyte * 128  # CUtensorMap


def rows_in_boxes(rows: torch.Tensor, box: tuple[int, int]) -> ctypes.Array[ctypes.c_ubyte]:
    """A TensorMap for Hopper's copy engine: bytes [n, d] in boxes of rows and at most 128 bytes, in their swizzle.

    What a box has beyond the edge is zero. Rows begin at multiples of 16 bytes.
    """
    n, d = rows.shape
    assert rows.element_size() == 1 and rows.stride(1) == 1
    sizes, strides = (ctypes.c_uint64 * 2)(d, n), (ctypes.c_uint64 * 1)(rows.stride(0))
    boxes, steps = (ctypes.c_uint32 * 2)(box[1], box[0]), (ctypes.c_uint32 * 2)(1, 1)
    room = (ctypes.c_ubyte * (128 + 64))()  # the driver wants the map at a multiple of 64 bytes
    at = -(-ctypes.addressof(room) // 64) * 64
    address, encode = ctypes.c_void_p(rows.data_ptr()), _driver().cuTensorMapEncodeTiled
    _check(encode(ctypes.c_void_p(at), 0, 2, address, sizes, strides, boxes, steps, 0, 3, 3, 0))
    return TensorMap.from_buffer_copy(ctypes.string_at(at, 128))


class Program:
    """The kernels of one source on one device, compiled with `defines`."""

    def __init__(self, path: Path, defines: dict[str, int], device: torch.device, features: str = "") -> None:
        """features: "a" for what only this very architecture has, such as sm_90's products of warpgroups."""
        self.device = device
        self._enter()
        major, minor = torch.cuda.get_device_capability(device)
        self.early = major >= 9  # whether a kernel may start while the one in front of it still runs
        self._shared: dict[str, int] = {}  # the most dynamic memory that each kernel was allowed
        cubin = _cubin(path, defines, f"sm_{major}{minor}{features}")
        self._module = ctypes.c_void_p()
        with torch.cuda.device(device):
            _check(_driver().cuModuleLoadData(ctypes.byref(self._module), cubin))

    def _enter(self) -> None:
        """Makes torch's context current: a fresh thread has none."""
        context = ctypes.c_void_p()
        _driver().cuCtxGetCurrent(ctypes.byref(context))
        if not context:
            torch.cuda.set_device(self.device)
            torch.cuda.current_stream(self.device).synchronize()

    def kernel(self, name: str, threads: int, shared: int = 0) -> Kernel:
        """A kernel of the source with its launch shape; `shared` bytes of dynamic memory."""
        function = ctypes.c_void_p()
        _check(_driver().cuModuleGetFunction(ctypes.byref(function), self._module, name.encode()))
        if shared > self._shared.get(name, 48 * 1024):  # never less than an earlier launch shape of it needs
            _check(_driver().cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, shared))
            self._shared[name] = shared
        return Kernel(self, function, threads, shared)


class Kernel:
    """A loaded kernel whose only parameter is a structure."""

    def __init__(self, program: Program, function: ctypes.c_void_p, threads: int, shared: int) -> None:
        self._program = program
        self._function = function
        self._threads = threads
        self._shared = shared

    def launch(self, x: int, y: int, params: ctypes.Structure, early: bool = False) -> None:
        """On torch's current stream, with a grid of x * y blocks.

        early: where the GPU can, it may start before the kernel in front of it has ended; it waits for that itself.
        """
        self._program._enter()
        config = _Config(x, y, 1, self._threads, 1, 1, self._shared)
        config.stream = torch.cuda.current_stream(self._program.device).cuda_stream
        if early and self._program.early:
            config.attributes, config.count = ctypes.pointer(_EARLY), 1
        argument = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        _check(_driver().cuLaunchKernelEx(ctypes.byref(config), self._function, argument, None))
