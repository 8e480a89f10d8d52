"""How much memory a model and a context need, told before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from models.cache import history
from models.cache.retrieval import TILE
from models.cache.shape import CacheShape
from models.config import EMBEDDING, HEAD, ModelConfig
from models.turn import narrow_turn
from quant.w8a8 import dense_dtype, int8_head

# Sequences with unpacked blocks and windows of their own: kept for later, running, its fork, on their way to disk,
# decoding.
SNAPSHOTS = 14


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by kind for a context of `context` tokens."""

    context: int
    bytes_per_token: int
    weights_bytes: int
    retrieval_bytes: int
    streaming_bytes: int
    workspace_bytes: int
    block: int

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
        return room // self.bytes_per_token // self.block * self.block


def plan_memory(
    config: ModelConfig,
    shape: CacheShape,
    weights: str,
    context: int,
    chunk: int,
    device: torch.device,
    embedding: str = "bf16",
) -> MemoryPlan:
    """The plan for `weights`, "w8a8", "bf16" or "llm.int8", and `embedding`, "bf16" or "int8".

    `device` need not exist.
    """
    return MemoryPlan(
        context,
        shape.bytes_per_token,
        weights_bytes(config, weights, device, embedding),
        context * shape.bytes_per_token + SNAPSHOTS * shape.exact_bytes,
        SNAPSHOTS * shape.window_bytes,
        workspace_bytes(config, shape, chunk, device),
        shape.block,
    )


def weights_bytes(config: ModelConfig, weights: str, device: torch.device, embedding: str = "bf16") -> int:
    """Bytes of all weights as the decoder holds them: norms and biases in fp32, scales a channel with int8."""
    rounded = config.vocab_size * (config.hidden_size + 4)
    total = 0
    if weights == "w8a8":
        narrow = device.type == "cuda" and narrow_turn(config.hidden_size)
        total += (6 if narrow else 4) * config.hidden_size**2  # the residual stream's rotation, in bf16 too if exact
        if int8_head(device) and embedding == "bf16":
            total += rounded  # beside the unquantised one
    if embedding == "int8" and config.tied_embeddings and device.type == "cpu":
        total += rounded  # the head's codes in its product's own order
    for name, shape in config.tensor_shapes().items():
        elements = shape[0] * shape[-1] if len(shape) == 2 else shape[0]
        if name in (EMBEDDING, HEAD):
            total += rounded if embedding == "int8" else elements * dense_dtype(device).itemsize
        elif len(shape) == 1:
            total += 4 * elements
        else:
            total += 2 * elements if weights == "bf16" else elements + 4 * shape[0]
    return total


def workspace_bytes(config: ModelConfig, shape: CacheShape, chunk: int, device: torch.device) -> int:
    """Bytes of activations and scratch while a chunk of `chunk` tokens is read, at its widest point."""
    if device.type == "cuda" and any(shape.retrieval_heads):  # endless mode has no history, and fp32 heads
        # Where there is a GPU it is asked; where there is none, kernels that such a shape can have are expected there.
        why = history.declines(shape, device) if torch.cuda.is_available() else history.unfit(shape)
        if why is None:
            return _direct_bytes(config, shape, chunk)
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    residual = 4 * config.hidden_size
    held = 4 * heads + 4 * config.num_heads * config.head_dim  # q, k, v and the attended heads live to the layer's end
    attention = 4 * heads + 2 * 4 * config.num_heads * config.head_dim
    mlp = 2 * (4 + 4) * config.intermediate_size + config.hidden_size  # gate and up as int32 and as fp32
    widest = max(shape.stored_channels)
    # A window's run of keys and values; the queries as the sinks see them, and two outputs to be merged.
    window = 2 * max(shape.streaming_heads) * (shape.recent + chunk) * config.head_dim * shape.compute_dtype.itemsize
    if not widest:
        window += 3 * 4 * chunk * config.num_heads * config.head_dim
    scratch = window + 2 * widest * (TILE + chunk + shape.exact_tokens) * shape.compute_dtype.itemsize
    return chunk * (residual + held + max(attention, mlp)) + scratch + 4 * config.vocab_size


def _direct_bytes(config: ModelConfig, shape: CacheShape, chunk: int) -> int:
    """`workspace_bytes` where kernels take everything in 16 bits and leave nothing wider behind."""
    q, kv = (count * config.head_dim for count in (config.num_heads, config.num_kv_heads))
    kept = max(shape.stored_channels)
    residual = 4 * config.hidden_size
    sums = (2 + 2 + 4) * kept * shape.group  # two tiles' outputs and their fp32 sum
    own = 2 * 2 * 2 * kept  # the chunk's keys and values, beside what the cache gives back of them
    attention = 2 * (q + 2 * kv) + 2 * q + sums + own
    mlp = 2 * q + 2 * 2 * config.intermediate_size + config.intermediate_size + config.hidden_size
    table = 3 * 16 * config.head_dim  # positions in float64, on their way to fp32
    return chunk * (residual + max(attention, mlp, table)) + history.scratch_bytes(shape) + 4 * config.vocab_size
