"""The product of CUTLASS that ours is compared with: where it cannot be compiled, the benchmark says why."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from benchmarks import _cutlass as cutlass
from kernels import compiled


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an nvcc that makes a library of what it was told, and a flashinfer with headers."""
    headers = tmp_path / "flashinfer" / "data" / "cutlass" / "include" / "cutlass"
    headers.mkdir(parents=True)
    (headers / "version.h").write_text("#define CUTLASS_MAJOR 4\n")
    (tmp_path / "flashinfer" / "__init__.py").write_text("raise AssertionError('found, not imported')\n")
    _compiler(tmp_path, 'while [ "$1" != -o ]; do shift; done; echo code > "$2"')
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    monkeypatch.setattr(cutlass.shutil, "which", lambda name: _found(tmp_path / Path(name).name))
    monkeypatch.setattr(compiled, "_kept_in", tmp_path / "kept")
    return tmp_path


def _compiler(folder: Path, does: str) -> None:
    (folder / "nvcc").write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo release 13.0 && exit\n{does}\n')
    (folder / "nvcc").chmod(0o755)


def _found(path: Path) -> str | None:
    return str(path) if path.exists() else None


def test_serves_hopper_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cutlass.declines(torch.device("cpu")) == "CUDA only, not cpu"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert cutlass.declines(torch.device("cuda", 0)) == "for compute capability 9.0"


def test_compiles_with_nvcc_and_headers(machine: Path) -> None:
    assert cutlass.cannot_compile() is None
    path = cutlass._compiled(cutlass.KERNELS[0])
    assert path.parent == machine / "kept"
    assert path.read_bytes().startswith(b"code\n")
    _compiler(machine, "exit 1")
    assert cutlass._compiled(cutlass.KERNELS[0]) == path  # kept, not compiled again
    with pytest.raises(RuntimeError):
        cutlass._compiled(cutlass.KERNELS[1])  # another kernel is other code


def test_says_what_is_missing(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    device = torch.device("cuda", 0)
    (machine / "flashinfer" / "data" / "cutlass" / "include" / "cutlass" / "version.h").unlink()
    assert cutlass.declines(device) == "this flashinfer-python brings no headers of CUTLASS"
    monkeypatch.setattr(cutlass.importlib.util, "find_spec", lambda name: None)
    assert cutlass.declines(device) == "flashinfer-python, which brings CUTLASS's headers, is not installed"
    (machine / "nvcc").unlink()
    assert cutlass.declines(device) == "CUTLASS is compiled, and there is no nvcc"


def test_says_what_the_compiler_said(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    _compiler(machine, "echo 'a.h(1): warning: old'; echo 'a.h(2): error: no such tile' >&2; exit 1")
    cutlass._libraries.cache_clear()
    said = "nvcc does not compile CUTLASS: a.h(2): error: no such tile"
    assert cutlass.declines(torch.device("cuda", 0)) == said
    assert not list(machine.glob("kept/*"))


def test_every_macro_of_the_source_is_defined() -> None:
    source = cutlass.SOURCE.read_text()
    for field in cutlass.Kernel._fields:
        assert field.upper() in source
