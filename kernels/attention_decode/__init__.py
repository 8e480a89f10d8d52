"""Attention of one new token over a head's whole history: exact tokens and packed blocks together."""

from kernels.attention_decode import fragment, int4pack, native, ref
from kernels.attention_decode.ref import Clock, Held, Packed
from kernels.registry import Backend, Kernel, always

KV4_DECODE = Kernel(
    "attention_decode",
    (
        Backend("fragment", fragment, fragment.declines),
        Backend("native", native, native.declines),
        Backend("int4pack", int4pack, int4pack.declines),
        Backend("reference", ref, always),
    ),
)

# A whole decode step of one layer, with the length on the device.
KV4_STEP = Kernel("decode_step", (Backend("fragment", fragment, fragment.declines), Backend("reference", ref, always)))

__all__ = ["KV4_DECODE", "KV4_STEP", "Clock", "Held", "Packed"]
