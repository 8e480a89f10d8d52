"""The 8B model's shape that benchmarks share, with random weights, heads and history: neither speed nor memory depends
on them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from app.config import DEFAULT_HUB_MODEL, Settings
from app.engine.sizing import resolve_shape
from models.build import Build, build_decoder
from models.cache.duo import DuoCache
from models.cache.pool import BlockPool
from models.cache.shape import CacheShape
from models.config import ModelConfig
from models.decoder import Decoder
from models.heads import HeadPattern
from models.keys import KeyForm
from models.known import KNOWN_CONFIGS
from quant.formats import QuantizedWeight
from quant.w8a8 import DenseLinear, W8A8Linear

LLAMA_8B = KNOWN_CONFIGS[DEFAULT_HUB_MODEL]
WINDOW = LLAMA_8B["max_position_embeddings"]
# Retrieval heads a layer of the published Gradient-4194k pattern at 50 %: without that pattern, as many in each layer.
HEADS = (2, 1, 3, 0, 2, 5, 2, 4, 5, 3, 4, 4, 1, 6, 4, 5, 5, 6, 4, 3, 6, 4, 5, 5, 5, 5, 5, 6, 5, 5, 8, 0)


def synthetic_pattern() -> HeadPattern:
    """As many retrieval heads in each layer as HEADS says, the first ones."""
    scores = np.arange(8)[None] < np.array(HEADS)[:, None]
    return HeadPattern(scores.astype(float), 128, 256, "synthetic")


def w8a8_decoder(config: ModelConfig, mask: np.ndarray, rotated: bool, device: torch.device) -> Decoder:
    """int8 layers with rotations and centres of keys, embedding and head in bf16."""
    heads = (config.num_layers, config.num_kv_heads)
    keys = KeyForm(torch.ones(*heads, config.head_dim // 2), torch.randn(*heads, config.head_dim))
    how = Build(
        mask,
        W8A8Linear.from_float,
        DenseLinear,
        lambda t: t.to(torch.bfloat16),
        rotated,
        True,
        device=device,
        keys=keys if rotated else None,
    )
    return build_decoder(config, random_tensors(config, device), how)


def octavo_8b(device: torch.device) -> tuple[Decoder, CacheShape]:
    """As the program runs it: W8A8, 4-bit cache, half of the heads being retrieval heads."""
    config = ModelConfig.from_hf(LLAMA_8B)
    mask, shape = resolve_shape(config, synthetic_pattern(), Settings(), device)
    return w8a8_decoder(config, mask, shape.rotated, device), shape


def dense_8b(device: torch.device) -> tuple[Decoder, CacheShape]:
    """bf16 weights, and full attention over a bf16 cache in every head."""
    config = ModelConfig.from_hf(LLAMA_8B)
    mask = np.ones((config.num_layers, config.num_kv_heads), dtype=np.bool_)
    shape = CacheShape.for_model(config, mask, "bf16", 128, 256, device)

    def dense(weight: Tensor | QuantizedWeight, bias: Tensor | None) -> DenseLinear:
        assert isinstance(weight, Tensor)
        return DenseLinear(weight.to(torch.bfloat16), bias)

    how = Build(
        mask,
        dense,
        DenseLinear,
        lambda t: t.to(torch.bfloat16),
        shape.rotated,
        rotate_residual=False,
        device=device,
    )
    return build_decoder(config, random_tensors(config, device), how), shape


def random_tensors(config: ModelConfig, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    torch.manual_seed(0)
    for name, shape in config.tensor_shapes().items():
        tensor = torch.randn(shape, device=device, dtype=torch.bfloat16)
        yield name, tensor.mul_(0.02) if len(shape) == 2 else tensor.abs_()


def full_cache(pool: BlockPool, length: int) -> DuoCache:
    """A cache of `length` tokens whose every byte is random and whose every scale is of a usual size."""
    cache = DuoCache(pool)
    cache.reserve(length)
    (store,) = pool.stores
    for codes in (store._keys, store._values):
        for head in codes:
            head.random_(0, 256)
    for head in store._scales:
        head.normal_(0, 0.02)
        head[..., 0::2].abs_().add_(0.1)
    for exact in cache.exact():
        exact.normal_()
    cache.length = length
    return cache
