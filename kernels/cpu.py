"""What this processor can do, asked once."""

from functools import cache

import torch


@cache
def vector_width() -> str:
    """torch's name for the widest vectors it uses here: 'AVX512', 'AVX2', 'DEFAULT', ..."""
    return torch.backends.cpu.get_cpu_capability()


@cache
def fast_bf16() -> bool:
    """Whether bf16 products run on matrix units (AMX) instead of being emulated."""
    probe = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return bool(probe and probe())


@cache
def matrix_units() -> bool:
    """Whether this process may use AMX tiles in code of its own; asks the operating system for them."""
    init = getattr(torch.cpu, "_init_amx", None)
    return fast_bf16() and bool(init and init())
