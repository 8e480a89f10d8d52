"""Decode attention over sinks and a ring, as they lie: the sinks meet a query of their own position.

`decode` attends to tokens that are there; `step` also stores the new one, and reads where it goes from the device.
"""

from kernels.attention_window import native, ref, split
from kernels.registry import Backend, Kernel, always

_HOST = (Backend("native", native, native.declines), Backend("reference", ref, always))
WINDOW_DECODE = Kernel("attention_window", _HOST)
WINDOW_STEP = Kernel("attention_window_step", (Backend("triton_split", split, split.declines), *_HOST))
