"""Whether a model and a context fit, and with which chunk, told before anything is loaded."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

import numpy as np
import psutil
import torch
from torch import Tensor

from app.config import Settings
from app.errors import UsageError
from models.cache.plan import MemoryPlan, plan_memory
from models.cache.shape import CacheShape
from models.config import ModelConfig
from models.errors import BadPattern, DoesNotFit
from models.heads import HeadPattern
from models.measured import choose_wide

log = logging.getLogger(__name__)

# Tokens a chunk, longest first; a shorter one is taken where the context would not fit otherwise. A CPU reads its chunk
# in a second or two, between two looks at Stop.
CHUNKS = {"cpu": (2048,), "cuda": (16384, 8192, 4096, 2048)}
# Share of memory left alone: other programs live on a CPU's, only the driver on a GPU's.
_RESERVE = {"cpu": 0.1, "cuda": 0.01}
# Endless mode: four sinks are enough, shown with 2,048 tokens in all (StreamingLLM, table 2).
_ENDLESS_SINK, _ENDLESS_KEPT = 4, 2048


def resolve_shape(
    config: ModelConfig,
    pattern: HeadPattern | None,
    settings: Settings,
    device: torch.device,
    losses: Tensor | None = None,
) -> tuple[np.ndarray, CacheShape]:
    """The retrieval mask [layers, kv_heads] and the cache's shape; without a pattern every head keeps everything.

    losses: of each head, see models/measured.py; they say which heads get 8 bits, not how many.
    Raises UsageError, or BadPattern, for a window that is longer than the model's.
    """
    for flag, tokens in (("--sink-tokens", settings.sink), ("--recent", settings.recent)):
        if tokens is not None and tokens > config.max_positions:
            raise UsageError(f"{flag} is {tokens:,}; this model's window is {config.max_positions:,} tokens.")
    if settings.mode == "endless":
        return _endless_shape(config, settings, device)
    if pattern is None:
        pattern, ratio = HeadPattern.all_retrieval(config), 1.0
    else:
        ratio = settings.retrieval_ratio
        for name, flag, tokens, given in (
            ("sink_size", "--sink-tokens", pattern.sink, settings.sink),
            ("recent_size", "--recent", pattern.recent, settings.recent),
        ):
            if given is None and tokens > config.max_positions:
                raise BadPattern(
                    f"{name} of the head pattern {pattern.source} is {_shown(tokens)}; this model's window is "
                    f"{config.max_positions:,} tokens. Give a smaller {flag}."
                )
    pattern.check(config)
    mask = pattern.retrieval_mask(ratio)
    sink = pattern.sink if settings.sink is None else settings.sink
    recent = pattern.recent if settings.recent is None else settings.recent
    wide = resolve_wide(config, pattern, mask, settings, losses)
    return mask, CacheShape.for_model(config, mask, settings.kv, sink, recent, device, wide)


def _shown(tokens: int) -> str:
    return f"{tokens:,}" if tokens < 10**30 else "a number of more than 30 digits"


def resolve_wide(
    config: ModelConfig, pattern: HeadPattern | None, mask: np.ndarray, settings: Settings, losses: Tensor | None
) -> np.ndarray | None:
    """Which of the retrieval heads keep 8 bits of a 4-bit cache, bool [layers, kv_heads].

    As many as --kv-bits, or else the pattern, allows; None where neither says.
    """
    bits = settings.kv_bits if settings.kv_bits is not None or pattern is None else pattern.kv_bits
    if bits is None or settings.kv != "kv4" or settings.mode == "endless":
        return None
    said_by = "--kv-bits" if settings.kv_bits is not None or pattern is None else f"kv_bits of {pattern.source}"
    return choose_wide(mask, losses, bits, config.head_dim, said_by)


def _endless_shape(config: ModelConfig, settings: Settings, device: torch.device) -> tuple[np.ndarray, CacheShape]:
    """No retrieval heads; windows that stay within the positions that the model was made for."""
    sink = _ENDLESS_SINK if settings.sink is None else settings.sink
    recent = max(1, min(_ENDLESS_KEPT, config.max_positions) - sink) if settings.recent is None else settings.recent
    if sink + recent > config.max_positions:
        raise UsageError(
            f"--sink-tokens {sink:,} and --recent {recent:,} keep {sink + recent:,} tokens; this model's window is "
            f"{config.max_positions:,}."
        )
    mask = np.zeros((config.num_layers, config.num_kv_heads), dtype=np.bool_)
    kv = "bf16" if settings.kv == "bf16" else "fp16"  # windows are not packed, whatever a history would be
    return mask, CacheShape.for_model(config, mask, kv, sink, recent, device)


def fit(
    config: ModelConfig, shape: CacheShape, settings: Settings, device: torch.device, free: int
) -> tuple[MemoryPlan, int]:
    """The plan and chunk for the context asked for, or for the longest that `free` bytes and the model allow.

    Raises DoesNotFit when the context was asked for, or when not even one block fits; names what would.
    """
    endless = settings.mode == "endless"
    wanted = shape.sink + shape.recent if endless else settings.context or config.max_positions
    if wanted > config.max_positions:
        raise UsageError(f"--context is {wanted:,}; this model's window is {config.max_positions:,} tokens.")
    limit = usable(device, free)

    def planned(context: int, chunk: int) -> MemoryPlan:
        return plan_memory(config, shape, settings.weights, context, chunk, device, settings.embedding)

    for chunk in (settings.chunk,) if settings.chunk else CHUNKS[device.type]:
        plan = planned(wanted, chunk)
        if plan.total_bytes <= limit:
            return plan, chunk
    longest = plan.longest(limit)
    if endless or settings.context or longest < shape.block:
        least = wanted if endless or settings.context else shape.block
        fitting = [f"--context {longest}"] if longest >= shape.block and not endless else []
        for smaller in _halved(min(chunk - 1, CHUNKS[device.type][0])) if settings.chunk else ():
            if planned(least, smaller).total_bytes <= limit:
                fitting.insert(0, f"--chunk {smaller}")
                break
        if fitting:
            advice = f"{' or '.join(fitting)} fits."
        else:
            advice = f"Use a smaller {'--recent, a smaller ' if endless else ''}model or more memory."
        chunks = f" in chunks of {chunk:,}" if settings.chunk else ""
        raise DoesNotFit(
            f"A context of {wanted:,} tokens{chunks} needs {plan.total_bytes / 2**30:,.2f} GiB; {limit / 2**30:,.2f} "
            f"GiB are free. {advice}",
            plan.total_bytes,
            limit,
            longest,
        )
    log.warning("context limited to %d of %d tokens by memory", longest, wanted)
    return planned(longest, chunk), chunk


def _halved(most: int) -> Iterator[int]:
    """Powers of two from the largest that is at most `most` down to 1."""
    yield from (1 << bits for bits in range(most.bit_length() - 1, -1, -1))


def usable(device: torch.device, free: int) -> int:
    """Of `free` bytes, those that the model and its cache may take."""
    return int(free * (1 - _RESERVE[device.type]))


def free_bytes(device: torch.device) -> int:
    """Memory that nobody uses now."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


def peak_bytes(device: torch.device) -> int:
    """The most memory that this process has used."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource  # POSIX only

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
