"""int8 x int8 matrix product, rescaled per output channel."""

from kernels.int8_gemm import converted, fused, int_mm, native, onednn, ref, wgmma
from kernels.registry import Backend, Kernel, always

INT8_GEMM = Kernel(
    "int8_gemm",
    (
        Backend("native", native, native.declines),
        Backend("onednn", onednn, onednn.declines),
        Backend("converted", converted, converted.declines),
        Backend("wgmma", wgmma, wgmma.declines),
        Backend("triton", fused, fused.declines),
        Backend("int_mm", int_mm, int_mm.declines),
        Backend("reference", ref, always),
    ),
)
