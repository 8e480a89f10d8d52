"""Runs the model over one request at a time: prefill chunk by chunk, then a token a step."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from app.config import Settings
from app.engine.prefix import PrefixStore
from app.engine.types import Memory
from app.errors import ContextTooLong
from kernels import registry
from models.build import Build, build_decoder
from models.cache.duo import DuoCache
from models.cache.plan import MemoryPlan, plan_memory
from models.cache.pool import BlockPool
from models.cache.shape import BLOCK, CacheShape
from models.checkpoint import Checkpoint
from models.config import ModelConfig
from models.decoder import Decoder
from models.errors import DoesNotFit, PoolExhausted
from models.heads import HeadPattern
from quant.w8a8 import DenseLinear, Linear, W8A8Linear

log = logging.getLogger(__name__)

_CHUNK = {"cpu": 2048, "cuda": 16384}  # tokens; a CPU reads that in a second or two, between two looks at Stop
_CHATS = 4  # full contexts that the pool holds when memory allows, so that chats do not push each other out
_RESERVE = 0.1  # of memory left to everything else


class Slot:
    """One request's sequence while it runs."""

    def __init__(self, runner: Runner, prompt: np.ndarray, cache: DuoCache, chat_id: str | None) -> None:
        self._runner = runner
        self._prompt = prompt
        self._cache = cache
        self._chat_id = chat_id
        self.cached = cache.length
        self._ids: list[int] = prompt[: cache.length].tolist()

    @property
    def length(self) -> int:
        """Committed tokens."""
        return self._cache.length

    def prefill(self, chunk_ids: Sequence[int]) -> Tensor:
        """Reads a chunk; fp32 logits [vocabulary] of its last token.

        Where the prompt ends, a copy is kept from just before, so that the same prompt can be asked again.
        """
        end = self.length + len(chunk_ids)
        early = (end - 1) // BLOCK * BLOCK - self.length
        if end == len(self._prompt) and 0 < early < len(chunk_ids):
            self._read(chunk_ids[:early])
            self._runner.prefixes.keep(self._ids, self._cache.fork(), self._chat_id)
            chunk_ids = chunk_ids[early:]
        return self._read(chunk_ids)

    def decode(self, token_id: int) -> Tensor:
        """Reads one token; fp32 logits [vocabulary] for the next."""
        return self._read((token_id,))

    def _read(self, ids: Sequence[int]) -> Tensor:
        runner = self._runner
        runner.make_room(self._cache, self.length + len(ids))
        hidden = runner.decoder.forward(torch.tensor(ids, dtype=torch.int64), self._cache)
        self._ids += ids
        return runner.decoder.logits(hidden[-1:])[0]

    def publish(self, chat_id: str) -> None:
        """Keeps the committed tokens for the chat's next turn; the slot must not be used after it."""
        self._runner.prefixes.keep(self._ids, self._cache, chat_id)

    def discard(self) -> None:
        """Gives everything back; the slot must not be used after it."""
        self._cache.release()


class Runner:
    """A model with its pool and the prefixes it has read."""

    def __init__(
        self, decoder: Decoder, pool: BlockPool, plan: MemoryPlan, chunk: int, settings: dict[str, Any]
    ) -> None:
        self.decoder = decoder
        self.pool = pool
        self.plan = plan
        self.chunk = chunk
        self.prefixes = PrefixStore()
        self._settings = settings
        self._newest: DuoCache | None = None

    @property
    def capacity(self) -> int:
        """Tokens of context, prompt and answer together."""
        return self.plan.context

    def start(self, prompt_ids: Sequence[int], chat_id: str | None) -> Slot:
        """A slot for a prompt, forked from the longest prefix that is in the cache already.

        Raises ContextTooLong or PoolExhausted before any work on the device.
        """
        if len(prompt_ids) >= self.capacity:
            raise ContextTooLong(len(prompt_ids) + 1, self.capacity)
        prompt = np.asarray(prompt_ids, dtype=np.int64)
        known = self.prefixes.find(prompt)
        cache = known.fork() if known is not None else DuoCache(self.pool)
        try:
            self.make_room(cache, len(prompt) + 1)
        except PoolExhausted:
            cache.release()
            raise
        self._newest = cache
        return Slot(self, prompt, cache, chat_id)

    def make_room(self, cache: DuoCache, length: int) -> None:
        """Reserves blocks for `length` tokens, letting go of the oldest kept prefixes where the pool is full."""
        while True:
            try:
                return cache.reserve(length)
            except PoolExhausted:
                if not self.prefixes.drop_oldest():
                    raise

    def memory(self) -> Memory:
        """Bytes by kind; the KV bytes are those of the newest request."""
        cache = self._newest
        return Memory(
            self.decoder.nbytes,
            cache.retrieval_bytes if cache else 0,
            cache.streaming_bytes if cache else 0,
            _peak_bytes(self.decoder.device),
        )

    def describe(self) -> dict[str, Any]:
        """The settings in force and the backend of each kernel."""
        return self._settings


def build_runner(
    checkpoint: Checkpoint,
    pattern: HeadPattern | None,
    settings: Settings,
    progress: Callable[[float], None] = lambda done: None,
) -> Runner:
    """Loads a checkpoint with everything resolved; raises DoesNotFit with both numbers before loading."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = checkpoint.config
    mask, shape = resolve_shape(config, pattern, settings, device)
    chunk = settings.chunk or _CHUNK[device.type]
    plan = fit(config, shape, settings, chunk, dense_dtype(device).itemsize, _free_bytes(device))
    decoder = load_decoder(checkpoint, mask, settings.weights, shape, device, progress)
    spare = max(0, _free_bytes(device) * (1 - _RESERVE) - plan.workspace_bytes)
    contexts = min(_CHATS, max(1, int(spare // max(1, plan.retrieval_bytes))))
    pool = BlockPool(shape, contexts * -(-plan.context // BLOCK), device)
    described = {
        "weights": settings.weights,
        "kv": settings.kv,
        "retrieval_ratio": float(mask.mean()),
        "sink": shape.sink,
        "recent": shape.recent,
        "chunk": chunk,
        "backends": {row["kernel"]: row["chosen"] for row in registry.report(device, config.head_dim)},
    }
    return Runner(decoder, pool, plan, chunk, described)


def resolve_shape(
    config: ModelConfig, pattern: HeadPattern | None, settings: Settings, device: torch.device
) -> tuple[np.ndarray, CacheShape]:
    """The retrieval mask [layers, kv_heads] and the cache's shape; without a pattern every head keeps everything."""
    if pattern is None:
        pattern, ratio = HeadPattern.all_retrieval(config), 1.0
    else:
        ratio = settings.retrieval_ratio
    pattern.check(config)
    mask = pattern.retrieval_mask(ratio)
    sink = pattern.sink if settings.sink is None else settings.sink
    recent = pattern.recent if settings.recent is None else settings.recent
    return mask, CacheShape.for_model(config, mask, settings.kv, sink, recent, device)


def fit(
    config: ModelConfig, shape: CacheShape, settings: Settings, chunk: int, dense_itemsize: int, free: int
) -> MemoryPlan:
    """The plan for the context asked for, or for the longest that `free` bytes and the model allow."""
    wanted = min(settings.context or config.max_positions, config.max_positions)
    plan = plan_memory(config, shape, settings.weights, wanted, chunk, dense_itemsize)
    limit = int(free * (1 - _RESERVE))
    if plan.total_bytes <= limit:
        return plan
    longest = plan.longest(limit)
    if settings.context or longest < BLOCK:
        advice = f"--context {longest} fits." if longest >= BLOCK else "Use a smaller model or more memory."
        raise DoesNotFit(
            f"A context of {wanted:,} tokens needs {plan.total_bytes / 2**30:.2f} GiB; {limit / 2**30:.2f} GiB are "
            f"free. {advice}",
            plan.total_bytes,
            limit,
            longest,
        )
    log.warning("context limited to %d of %d tokens by memory", longest, wanted)
    return plan_memory(config, shape, settings.weights, longest, chunk, dense_itemsize)


def dense_dtype(device: torch.device) -> torch.dtype:
    """dtype of embedding and head: fp32 on a CPU, where bf16 logits would tie and gain no time."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def load_decoder(
    checkpoint: Checkpoint,
    mask: np.ndarray,
    weights: str,
    shape: CacheShape,
    device: torch.device,
    progress: Callable[[float], None] = lambda done: None,
) -> Decoder:
    """The decoder of a checkpoint with "w8a8", "bf16" or (for comparisons) "fp32" weights on `device`."""

    def linear(weight: Tensor, bias: Tensor | None) -> Linear:
        weight, bias = weight.to(device), None if bias is None else bias.to(device)
        if weights == "w8a8":
            return W8A8Linear.from_float(weight, bias)
        return DenseLinear(weight.to(torch.float32 if weights == "fp32" else torch.bfloat16), bias)

    how = Build(
        mask,
        linear,
        DenseLinear,
        lambda tensor: tensor.to(device=device, dtype=dense_dtype(device)),
        rotate_values=shape.rotated,
        rotate_residual=weights == "w8a8",
    )
    return build_decoder(checkpoint.config, checkpoint.tensors(), how, progress)


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource  # POSIX only

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
