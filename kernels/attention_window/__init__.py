"""Decode attention over sinks and a ring, as they lie: the sinks meet a query of their own position."""

from kernels.attention_window import native, ref
from kernels.registry import Backend, Kernel, always

WINDOW_DECODE = Kernel(
    "attention_window",
    (
        Backend("native", native, native.declines),
        Backend("reference", ref, always),
    ),
)
