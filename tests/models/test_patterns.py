"""The pattern that ships for the embedded model is found, fits it, and keeps its cache small."""

import torch

from app.config import Settings
from app.embedded import embedded_model_path
from app.model import choose_pattern, find_model
from models.cache.shape import CacheShape
from models.checkpoint import open_checkpoint


def test_the_embedded_model_uses_its_pattern() -> None:
    settings = Settings(model="embedded")
    pattern, note = choose_pattern(find_model(settings), settings)
    assert pattern is not None
    assert note.startswith("45 of 90 heads keep everything")
    config = open_checkpoint(embedded_model_path()).config
    pattern.check(config)
    assert len(set(pattern.scores.ravel())) == 90  # no ties: every ratio means one choice


def test_its_cache_is_below_a_quarter_of_what_is_fastest_elsewhere() -> None:
    """transformers decodes faster in fp32 at 1,024 tokens, and in bf16 behind longer prompts."""
    settings = Settings(model="embedded")
    pattern, _ = choose_pattern(find_model(settings), settings)
    assert pattern is not None
    config = open_checkpoint(embedded_model_path()).config
    mask = pattern.retrieval_mask(settings.retrieval_ratio)
    shape = CacheShape.for_model(config, mask, "kv4", pattern.sink, pattern.recent, torch.device("cpu"))
    for tokens, element in ((1024, 4), (4096, 2), (7500, 2)):
        packed = shape.packed_blocks(tokens) * shape.block * shape.bytes_per_token
        ours = packed + shape.exact_bytes + shape.window_bytes
        assert ours < 0.25 * tokens * 90 * 2 * 64 * element, tokens
