"""`python -m app plan`: what a model and a context need, before anything is loaded."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import torch

from app.config import Settings
from app.errors import UsageError
from app.model import plan_context
from models.cache.plan import SNAPSHOTS
from models.cache.shape import CacheShape

_DEFAULT_MEMORY = "80GiB"
_UNITS = {unit: 1000**power for power, unit in enumerate(("", "k", "m", "g", "t"))}
_UNITS |= {unit + "i": 1024**power for power, unit in enumerate(("", "k", "m", "g", "t")) if unit}
_MOST = 1 << 60  # bytes; what is larger was mistyped
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", re.IGNORECASE)


def plan(settings: Settings, config: Path | None, gpu_memory: str | None, as_json: bool) -> int:
    """Print the plan; 0 whether or not it fits."""
    if config is not None and settings.model is not None:
        raise UsageError("Give --model or --config, not both.")
    endless = settings.mode == "endless"
    here = _this_gpu()
    limit = parse_size(gpu_memory) if gpu_memory is not None else here or parse_size(_DEFAULT_MEMORY)
    card = "GPU" if gpu_memory is not None or here else "GPU (assumed: none here, and no --gpu-memory)"
    plan, model, shape = plan_context(settings, settings.context, config)
    window, heads, kept = model.max_positions, model.num_layers * model.num_kv_heads, sum(shape.retrieval_heads)
    longest = None if endless else min(plan.longest(limit), window)
    if settings.context is None and longest:
        plan, model, shape = plan_context(settings, longest, config)
    result = asdict(plan) | {
        "total_bytes": plan.total_bytes,
        "memory_bytes": limit,
        "model_window": window,
        "fits": plan.total_bytes <= limit and plan.context <= window,
        "longest_context": longest,
        "wide_heads": sum(shape.wide_heads),
        "retrieval_ratio": kept / heads,
        "mode": settings.mode,
        "sink": shape.sink,
        "recent": shape.recent,
    }
    if as_json:
        print(json.dumps(result))
        return 0
    verdict = "fits" if plan.total_bytes <= limit else "does not fit"
    if plan.context > window:
        verdict += "; longer than the model's window, which the model cannot use"
    if longest is None:
        what = [
            ("context", f"endless; the model's window is {window:,} tokens"),
            ("heads", f"all {heads} KV heads keep the first {shape.sink:,} and the last {shape.recent:,} tokens"),
        ]
    else:
        what = [
            ("context", f"{plan.context:,} tokens; the model's window is {window:,}"),
            ("heads", f"{kept} of {heads} KV heads keep everything{_wide(shape)}"),
        ]
    rows = [
        ("for", f"a {gib(limit)} {card}"),
        *what,
        ("a token", f"{plan.bytes_per_token:,} bytes"),
        ("weights", gib(plan.weights_bytes)),
        ("retrieval heads", gib(plan.retrieval_bytes)),
        ("streaming windows", f"{gib(plan.streaming_bytes)}, of {SNAPSHOTS} places kept to go on from"),
        ("workspace", gib(plan.workspace_bytes)),
        ("total", f"{gib(plan.total_bytes)} of {gib(limit)}: {verdict}"),
        ("longest context", "without end" if longest is None else f"{longest:,} tokens"),
    ]
    for name, value in rows:
        print(f"{name:<18} {value}")
    return 0


def _wide(shape: CacheShape) -> str:
    """What --kv-bits gives and costs."""
    if not any(shape.wide_heads):
        return ""
    count, share = sum(shape.wide_heads), sum(shape.wide_heads) / sum(shape.retrieval_heads)
    return f", {count} of them in 8 bits, which costs {share:.0%} more arithmetic of attention to read a prompt"


def parse_size(text: str) -> int:
    """Bytes of "80GiB", "80 GB", "512MiB" or a bare number; UsageError for anything else or for nothing."""
    match = _SIZE.fullmatch(text.strip())
    size = float(match[1]) * _UNITS[match[2].lower()] if match and match[2].lower() in _UNITS else 0.0
    if not 1 <= size < _MOST:
        raise UsageError(f"--gpu-memory is {text[:40]!r}; give a size such as 80GiB.")
    return int(size)


def gib(size: int) -> str:
    """Bytes in GiB, or in MiB below a quarter of one."""
    return f"{size / (1 << 30):,.2f} GiB" if size >= 1 << 28 else f"{size / (1 << 20):,.1f} MiB"


def _this_gpu() -> int | None:
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
