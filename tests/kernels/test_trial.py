"""A kernel that does not compile or is wrong here declines with the reason, and the next one serves."""

import torch

from kernels import jit, nvrtc
from kernels.attention_prefill import ref
from kernels.attention_prefill.check import wrong
from kernels.registry import Backend, Kernel, always

CPU = torch.device("cpu")


def test_triton_that_fails_is_told_in_one_line():
    def trial(device, size):
        raise RuntimeError(f"no C compiler for {size}\nand much more")

    assert jit._failure(trial, CPU, 64) == "does not run here (no C compiler for 64)"


def test_a_source_that_does_not_compile_is_told_in_one_line(monkeypatch):
    monkeypatch.setattr(nvrtc, "unusable", lambda device: None)

    def load():
        raise nvrtc.CudaError("kernel.cu(7): error: no such thing\n1 error")

    assert nvrtc.cannot_load(CPU, load) == "cannot be compiled: kernel.cu(7): error: no such thing"
    assert nvrtc.cannot_load(CPU, lambda: None) is None

    def wordless():
        raise OSError

    assert nvrtc.cannot_load(CPU, wordless) == "cannot be compiled: OSError()"


def test_a_librarys_attention_is_compared_before_it_serves():
    def top_left(q, k, v, *, scale, causal):
        return ref.attend_rows(q, k[:, : q.shape[0]], v[:, : q.shape[0]], scale=scale, causal=causal)

    def broken(q, k, v, *, scale, causal):
        raise ImportError("undefined symbol")

    assert wrong(ref.attend_rows, CPU, 64, torch.float16) is None
    assert wrong(top_left, CPU, 64, torch.float16) == "gives another result than the reference"
    assert wrong(broken, CPU, 64, torch.float16) == "does not run here (undefined symbol)"


def test_the_next_one_serves():
    last = object()
    kernel = Kernel("some", (Backend("fast", None, lambda device: "does not run here"), Backend("slow", last, always)))
    choice = kernel.choose(CPU)
    assert choice.backend.run is last
    assert choice.declined == {"fast": "does not run here"}
