"""What 4 bits cost each KV head of a model: told by its checkpoint, kept from an earlier start, or measured once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from app.calibration import WINDOW, sample_texts, sample_windows
from models.checkpoint import Checkpoint
from models.files import read_json, writing
from models.fingerprint import fingerprint
from models.losses import measure_losses
from quant.formats import LOSSES


def head_losses(
    checkpoint: Checkpoint,
    tokenizer: Any,
    cache_dir: Path,
    device: torch.device,
    progress: Callable[[float], None] = lambda done: None,
) -> np.ndarray:
    """Losses [layers, kv_heads], see models/losses.py; measuring takes one pass over the weights, and is done once."""
    config = checkpoint.config
    shape = (config.num_layers, config.num_kv_heads)
    told = checkpoint.path / "config.json"
    if told.is_file():
        section = read_json(told).get("quantization_config")
        if isinstance(section, dict) and (known := _table(section.get(LOSSES), shape)) is not None:
            return known
    kept = cache_dir / "kv-losses" / f"{fingerprint(checkpoint.path, cache_dir / 'weights.json')}.json"
    try:
        known = _table(json.loads(kept.read_text(encoding="utf-8")), shape)
    except (OSError, ValueError, RecursionError):
        known = None
    if known is not None:
        return known
    texts, _ = sample_texts(None)
    (sample, *_), _ = sample_windows(tokenizer, texts, min(WINDOW, config.max_positions), config.vocab_size)
    losses = measure_losses(checkpoint, sample, device, progress)
    try:
        with writing(kept) as file:
            file.write(json.dumps(losses.tolist()).encode())
    except OSError:
        pass  # measured again next time
    return losses


def _table(value: Any, shape: tuple[int, int]) -> np.ndarray | None:
    try:
        table = np.array(value, dtype=np.float64)
    except (TypeError, ValueError):
        return None
    return table if table.shape == shape and np.isfinite(table).all() else None
