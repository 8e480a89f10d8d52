"""What this processor can do, asked once."""

from functools import cache

import torch


@cache
def vector_width() -> str:
    """torch's name for the widest vectors it uses here: 'AVX512', 'AVX2', 'DEFAULT', ..."""
    return torch.backends.cpu.get_cpu_capability()


@cache
def bf16_products() -> bool:
    """Whether vectors of bf16 are multiplied by an instruction (AVX512_BF16); processors with AMX have it too."""
    probe = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return bool(probe and probe())


@cache
def fast_bf16() -> bool:
    """Whether torch multiplies bf16 on matrix units (AMX); elsewhere its attention is no faster than in fp32."""
    probe = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return bool(probe and probe())


@cache
def matrix_units() -> bool:
    """Whether this process may use AMX tiles in code of its own; asks the operating system for them."""
    init = getattr(torch.cpu, "_init_amx", None)
    return fast_bf16() and bool(init and init())
