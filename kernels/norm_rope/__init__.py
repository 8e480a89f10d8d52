"""RMSNorm and rotary positions: the reference serves every device."""

from kernels.norm_rope.ref import apply_rope, rms_norm

__all__ = ["apply_rope", "rms_norm"]
