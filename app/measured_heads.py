"""What is known of a model's KV heads: from its checkpoint, shipped, kept from an earlier start, or measured once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from app.calibration import WINDOW, sample_texts, sample_windows
from app.embedded import shipped
from app.tokenizer import TextTokenizer
from models.checkpoint import Checkpoint
from models.fingerprint import fingerprint
from models.measured import FILE, MeasuredHeads, measure_heads


def measured_heads(
    checkpoint: Checkpoint,
    tokenizer: TextTokenizer,
    cache_dir: Path,
    device: torch.device,
    progress: Callable[[float], None] = lambda done: None,
    ready: Callable[[], None] = lambda: None,
) -> MeasuredHeads:
    """The model's heads, see models/measured.py; measuring takes one pass over the weights, and is done once.

    ready: called only where they must be measured, before that; it may raise.
    """
    config, path = checkpoint.config, checkpoint.path
    kept = cache_dir / "heads" / f"{fingerprint(path, cache_dir / 'weights.json')}.measured"
    for known in (path / FILE, shipped(path) / FILE, kept):
        if (found := MeasuredHeads.load(known, config)) is not None:
            return found
    ready()
    progress(0.0)
    texts, _ = sample_texts(None)
    (sample, *_), _ = sample_windows(tokenizer, texts, min(WINDOW, config.max_positions))
    heads = measure_heads(checkpoint, sample, device, progress)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what the allocator holds counts as taken where a context is to fit
    if (found := MeasuredHeads.load(kept, config)) is not None:
        return found  # another process was first: what it saves of documents fits its own heads alone
    try:
        heads.save(kept)
    except OSError:
        pass  # measured again next time
    return heads
