"""Per-token int8 activations, alone or behind the norm or the gate that they come from."""

from kernels.act_quant import cuda, fused, native, ref
from kernels.registry import Backend, Kernel, always

ACT_QUANT = Kernel(
    "act_quant",
    (
        Backend("native", native, native.declines),
        Backend("cuda", cuda, cuda.declines),
        Backend("triton", fused, fused.declines),
        Backend("reference", ref, always),
    ),
)
