"""How 4-bit codes of keys and values lie in memory: one layout a decode kernel."""

from kernels.kv4_pack import fragment, int4pack, ref
from kernels.registry import Backend, Kernel, always

KV4_LAYOUT = Kernel(
    "kv4_pack",
    (
        Backend("fragment", fragment, fragment.declines),
        Backend("int4pack", int4pack, int4pack.declines),
        Backend("plain", ref, always),
    ),
)
