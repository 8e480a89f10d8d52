"""RMSNorm, rotary positions and the rotation of heads."""

from kernels.norm_rope import cuda, fused, native, ref
from kernels.norm_rope.ref import apply_rope, rms_norm
from kernels.registry import Backend, Kernel, always

PLACE = Kernel(
    "norm_rope",
    (
        Backend("native", native, native.declines),
        Backend("cuda", cuda, cuda.declines),
        Backend("triton", fused, fused.declines),
        Backend("reference", ref, always),
    ),
)

__all__ = ["PLACE", "apply_rope", "rms_norm"]
