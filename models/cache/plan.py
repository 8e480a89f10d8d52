"""How much memory a model and a context need, told before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from models.cache.retrieval import TILE
from models.cache.shape import BLOCK, CacheShape
from models.config import ModelConfig


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by kind for a context of `context` tokens."""

    context: int
    bytes_per_token: int
    weights_bytes: int
    retrieval_bytes: int
    streaming_bytes: int
    workspace_bytes: int

    @property
    def fixed_bytes(self) -> int:
        """What is needed whatever the context."""
        return self.total_bytes - self.context * self.bytes_per_token

    @property
    def total_bytes(self) -> int:
        """Everything together."""
        return self.weights_bytes + self.retrieval_bytes + self.streaming_bytes + self.workspace_bytes

    def longest(self, limit: int) -> int:
        """The longest context in whole blocks that `limit` bytes hold; 0 when not even the weights fit.

        Without retrieval heads memory does not grow, and the model's own window is the only limit.
        """
        room = limit - self.fixed_bytes
        if room < 0:
            return 0
        if not self.bytes_per_token:
            return 1 << 62
        return room // self.bytes_per_token // BLOCK * BLOCK


def plan_memory(
    config: ModelConfig, shape: CacheShape, weights: str, context: int, chunk: int, dense_itemsize: int
) -> MemoryPlan:
    """The plan for `weights` ("w8a8" or "bf16"); embedding and head take `dense_itemsize` bytes an element."""
    return MemoryPlan(
        context,
        shape.bytes_per_token,
        weights_bytes(config, weights, dense_itemsize),
        context * shape.bytes_per_token + shape.exact_bytes,
        shape.window_bytes,
        workspace_bytes(config, shape, chunk),
    )


def weights_bytes(config: ModelConfig, weights: str, dense_itemsize: int) -> int:
    """Bytes of all weights as the decoder holds them: norms and biases in fp32, scales a channel with int8."""
    total = 4 * config.hidden_size**2 if weights == "w8a8" else 0  # the residual stream's rotation
    for name, shape in config.tensor_shapes().items():
        elements = shape[0] * shape[-1] if len(shape) == 2 else shape[0]
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            total += elements * dense_itemsize
        elif len(shape) == 1:
            total += 4 * elements
        else:
            total += elements + 4 * shape[0] if weights == "w8a8" else 2 * elements
    return total


def workspace_bytes(config: ModelConfig, shape: CacheShape, chunk: int) -> int:
    """Bytes of activations and scratch while a chunk of `chunk` tokens is read, at its widest point."""
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    residual = 4 * config.hidden_size
    attention = (4 + 4) * heads + 3 * 4 * config.num_heads * config.head_dim
    mlp = (2 * 4 + 4 + 1) * config.intermediate_size
    widest_heads = max(shape.retrieval_heads)
    scratch = 2 * widest_heads * (TILE + chunk + 2 * BLOCK) * config.head_dim * shape.compute_dtype.itemsize
    return chunk * (residual + max(attention, mlp)) + scratch + 4 * config.vocab_size
