"""`python -m app doctor`: what is installed, on what it runs, which kernels serve and why others do not."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from app.cli_plan import gib
from app.embedded import embedded_model_path
from models.cache.kernels import kernel_report
from models.cache.shape import CacheShape
from models.errors import ModelError

_NEEDED = "torch transformers tokenizers safetensors gguf gradio pypdfium2".split()
_OPTIONAL = "triton flashinfer-python flash-attn bitsandbytes".split()


def doctor() -> int:
    """Print the report; 0 always."""
    for line in report():
        print(line)
    return 0


def report() -> Iterator[str]:
    """The report's lines."""
    yield "Versions"
    yield f"  {'Python':<22} {platform.python_version()} on {platform.system()} {platform.machine()}"
    for name in _NEEDED + _OPTIONAL:
        yield f"  {name:<22} {_version(name, 'not installed (optional)' if name in _OPTIONAL else 'missing')}"
    yield f"  {'embedded model':<22} {_embedded()}"
    yield ""
    yield "Devices"
    yield f"  {'CPU':<22} {_cpu()}"
    devices = [torch.device("cpu")]
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        yield f"  {f'GPU {index}':<22} {gpu.name}, {gib(gpu.total_memory)}, compute capability {gpu.major}.{gpu.minor}"
    if torch.cuda.is_available():
        devices.append(torch.device("cuda"))
    else:
        why = "this torch is a CPU build" if torch.version.cuda is None else "no driver or no NVIDIA GPU"
        yield f"  {'GPU':<22} none: {why}"
    for device in devices:
        yield ""
        yield f"Kernels on {device.type}"
        usual = _usual_shape(device)
        rows = kernel_report(device, usual)
        endless = replace(usual, retrieval_heads=(0,), streaming_heads=(8,), bits=16, wide_heads=())
        rows += [
            row
            for row in kernel_report(device, endless, endless=True)
            if row["kernel"] not in {seen["kernel"] for seen in rows}
        ]
        for row in rows:
            yield f"  {row['kernel']:<22} {row['chosen']}"
            for name, reason in row["declined"].items():
                yield f"  {'':<22}   not {name}: {reason}"


def _usual_shape(device: torch.device) -> CacheShape:
    """A layer as most 8B models have it: four query heads a KV head, head size 128; half stream, one has 8 bits."""
    compute = torch.bfloat16 if device.type == "cpu" else torch.float16
    return CacheShape((4,), (4,), 4, 128, 128, 256, 4, torch.float16, compute, wide_heads=(1,))


def _version(name: str, absent: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return absent


def _embedded() -> str:
    try:
        return str(embedded_model_path())
    except ModelError as error:
        return str(error)


def _cpu() -> str:
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        model = re.search(r"^model name\s*:\s*(.+)", info.read_text(), re.MULTILINE)
        name = model[1] if model else name
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    threads = torch.get_num_threads()
    return f"{name}, {threads} threads, {gib(memory)}, torch uses {torch.backends.cpu.get_cpu_capability()}"
