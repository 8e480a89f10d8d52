"""Per-token int8 activations: the reference serves every device."""

from kernels.act_quant.ref import quantize_rows, rms_norm_quantize

__all__ = ["quantize_rows", "rms_norm_quantize"]
