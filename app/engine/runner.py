"""A model with the caches behind it: where a request's reading begins, and room for it."""

from __future__ import annotations

import gc
import hashlib
import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from app.config import Settings
from app.engine.graph import DecodeGraph
from app.engine.prefix import PrefixStore
from app.engine.sizing import fit, free_bytes, peak_bytes, resolve_shape, resolve_wide, usable
from app.engine.slot import Slot
from app.engine.snapshots import LEAST_TOKENS, SnapshotStore
from app.engine.types import Mark, Memory
from app.engine.warm_up import warm_up
from app.errors import ContextTooLong
from models.build import load_decoder
from models.cache.duo import DuoCache
from models.cache.endless import EndlessCache
from models.cache.kernels import chosen_kernels
from models.cache.live import LiveCache
from models.cache.live_endless import LiveEndless
from models.cache.plan import MemoryPlan
from models.cache.pool import BlockPool
from models.cache.sequence import SequenceCache
from models.cache.snapshot import VERSION, Snapshot
from models.checkpoint import Checkpoint
from models.decoder import Decoder
from models.errors import PoolExhausted
from models.evidence import Question, find_heads
from models.fingerprint import fingerprint
from models.heads import HeadPattern
from models.measured import MeasuredHeads
from models.rope import EndlessRope, Rope

log = logging.getLogger(__name__)

T = TypeVar("T")

_EVIDENCE_HEADS = 4  # query heads
_CHATS = 4  # full contexts that the pool holds when memory allows, so that chats do not push each other out


class Runner:
    """A model with its pool and the prefixes it has read."""

    def __init__(
        self,
        decoder: Decoder,
        pool: BlockPool,
        plan: MemoryPlan,
        chunk: int,
        settings: dict[str, Any],
        snapshots: SnapshotStore | None = None,
    ) -> None:
        self.decoder = decoder
        self.pool = pool
        self.plan = plan
        self.chunk = chunk
        self.prefixes = PrefixStore()
        self.snapshots = snapshots
        self.evidence_heads: list[tuple[int, int]] = []
        self.graph: DecodeGraph | None = None
        self._endless = isinstance(decoder.rope, EndlessRope)
        self._capture()
        self._settings = settings
        self._newest: SequenceCache | None = None
        self._weights_bytes, self._device = decoder.nbytes, decoder.device

    @property
    def capacity(self) -> int | None:
        """Tokens of context, prompt and answer together; None where there is no end to them."""
        return None if self._endless else self.plan.context

    def new_cache(self) -> SequenceCache:
        """An empty cache of the kind that the mode asks for."""
        if isinstance(self.decoder.rope, EndlessRope):
            return EndlessCache(self.pool.shape, self.decoder.rope, self.pool.device)
        return DuoCache(self.pool)

    def start(
        self,
        prompt_ids: Sequence[int],
        marks: Sequence[Mark] = (),
        tell: Callable[[int], None] = lambda tokens: None,
    ) -> Slot:
        """A slot for a prompt, forked from the longest prefix that is in memory, or opened from a longer one on disk.

        `marks` are places worth keeping, in order; `tell` hears how many tokens are back from disk and may raise.
        Raises ContextTooLong or PoolExhausted before any work on the device.
        """
        if self.capacity is not None and len(prompt_ids) >= self.capacity:
            raise ContextTooLong(len(prompt_ids) + 1, self.capacity)
        prompt = np.asarray(prompt_ids, dtype=np.int64)
        cache: SequenceCache
        if (opened := self._open(prompt, tell)) is not None:
            cache = opened
        elif (known := self.prefixes.find(prompt)) is not None:
            cache = known.fork()
        else:
            cache = self.new_cache()
        try:
            self.make_room(lambda: cache.reserve(len(prompt) + 1))
        except PoolExhausted:
            cache.release()
            raise
        self._newest = cache
        return Slot(self, prompt, cache, marks)

    def known(self, prompt_ids: Sequence[int]) -> tuple[int, int]:
        """Tokens of a prompt that need no reading: in memory, and in memory or on disk. From any thread."""
        prompt = np.asarray(prompt_ids, dtype=np.int64)
        kept = self.prefixes.length(prompt)
        saved = self.snapshots.find(prompt, kept) if self.snapshots is not None else []
        return kept, saved[-1][1].length if saved else kept

    def _open(self, prompt: np.ndarray, tell: Callable[[int], None]) -> DuoCache | None:
        """The longest saved prefix, where it is worth more than what is in memory; blocks in memory are shared."""
        snapshots = self.snapshots
        while snapshots is not None:
            chain = snapshots.find(prompt, self.prefixes.length(prompt) + LEAST_TOKENS - 1)
            if not chain:
                return None
            length = chain[-1][1].length

            def read(chain: Sequence[tuple[Path, Snapshot]] = chain, length: int = length) -> DuoCache | None:
                return snapshots.read(chain, self.pool, self.prefixes.shared(prompt[:length]), tell)

            if (cache := self.make_room(read)) is not None:
                try:
                    self.prefixes.keep(prompt[:length], cache.fork(), None)
                except BaseException:
                    cache.release()
                    raise
                return cache
        return None

    def find_evidence_heads(self, prompt: list[int], questions: list[Question]) -> None:
        """Takes a reading test to learn which heads tell where a model looks; call it before any request runs."""
        if any(self.pool.shape.retrieval_heads):
            self.evidence_heads = find_heads(self.decoder, self.pool, prompt, questions, _EVIDENCE_HEADS)
            self._capture()

    def _capture(self) -> None:
        """Captures the decode step where the device can; its queries of the evidence heads are kept."""
        self.graph = None  # its buffers first
        rope, shape, device = self.decoder.rope, self.pool.shape, self.pool.device
        if isinstance(rope, EndlessRope):
            if LiveEndless.serves(shape, device):
                self.graph = DecodeGraph(self.decoder, LiveEndless(shape, rope, device))
        elif LiveCache.serves(self.pool):
            self.graph = DecodeGraph(self.decoder, LiveCache(self.pool, self.evidence_heads))

    def warm_up(self) -> None:
        """Compiles what the first prompt would wait for; call it before any request runs."""
        warm_up(self.decoder, self.new_cache())

    def make_room(self, take: Callable[[], T]) -> T:
        """Does what takes blocks, letting go of the oldest kept prefixes where the pool is full."""
        while True:
            try:
                return take()
            except PoolExhausted:
                if not self.prefixes.drop_oldest() and not (self.snapshots is not None and self.snapshots.drop_jobs()):
                    raise

    def close(self) -> None:
        """Finish writing what was read."""
        if self.snapshots is not None:
            self.snapshots.close()

    def release(self) -> None:
        """As `close`, and let go of weights and caches: nothing can start here any more, facts can still be asked."""
        self.close()
        self.prefixes, self._newest, self.graph = PrefixStore(), None, None
        del self.decoder, self.pool
        gc.unfreeze()
        gc.collect()  # a pool and what reads its history know each other
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def memory(self) -> Memory:
        """Bytes by kind; the KV bytes are those of the newest request."""
        cache = self._newest
        return Memory(
            self._weights_bytes,
            cache.retrieval_bytes if cache else 0,
            cache.streaming_bytes if cache else 0,
            peak_bytes(self._device),
        )

    def describe(self) -> dict[str, Any]:
        """The settings in force and the backend of each kernel."""
        return self._settings


def build_runner(
    checkpoint: Checkpoint,
    pattern: HeadPattern | None,
    settings: Settings,
    progress: Callable[[float], None] = lambda done: None,
    measured: MeasuredHeads | None = None,
) -> Runner:
    """Loads a checkpoint with everything resolved; raises DoesNotFit with both numbers before loading."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = checkpoint.config
    losses, keys = (None, None) if measured is None else (measured.losses, measured.form(config))
    mask, shape = resolve_shape(config, pattern, settings, device, losses)
    wide = resolve_wide(config, pattern, mask, settings, losses)
    plan, chunk = fit(config, shape, settings, device, free_bytes(device))
    decoder = load_decoder(
        checkpoint, mask, settings.weights, shape, device, progress, wide, settings.embedding == "int8", keys
    )
    if settings.mode == "endless":
        decoder.rope = EndlessRope(Rope(config.rope, config.head_dim, config.max_positions), plan.context)
    history = plan.context * plan.bytes_per_token
    spare = usable(device, free_bytes(device)) - (plan.total_bytes - plan.weights_bytes - history)
    contexts = min(_CHATS, max(1, spare // max(1, history)))
    blocks = contexts * -(-plan.context // shape.block) if any(shape.retrieval_heads) else 0
    pool = BlockPool(shape, blocks, device)
    described = {
        "mode": settings.mode,
        "weights": settings.weights,
        "embedding": settings.embedding,
        "kv": str(shape.exact_dtype).removeprefix("torch.") if settings.mode == "endless" else settings.kv,
        "wide_heads": sum(shape.wide_heads),
        "retrieval_ratio": float(mask.mean()),
        "sink": shape.sink,
        "recent": shape.recent,
        "chunk": chunk,
        "backends": chosen_kernels(device, shape, settings.mode == "endless"),
    }
    return Runner(decoder, pool, plan, chunk, described, _snapshots(checkpoint, mask, wide, measured, settings, pool))


def _snapshots(
    checkpoint: Checkpoint,
    mask: np.ndarray,
    wide: np.ndarray | None,
    measured: MeasuredHeads | None,
    settings: Settings,
    pool: BlockPool,
) -> SnapshotStore | None:
    """The saved caches, of which those fit that come from the same weights, heads, formats and kind of device."""
    if settings.mode == "endless":
        return None  # its windows forget; there is no history to come back to
    folder = settings.cache_dir / "library" / "snapshots"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        quota = settings.library_quota
        if quota is None:
            held = sum(file.stat().st_size for file in folder.iterdir())
            quota = (held + shutil.disk_usage(folder).free) / 4e9
        if not quota:
            return None
        weights = fingerprint(checkpoint.path, settings.cache_dir / "weights.json")
        traits = (
            VERSION,
            weights,
            settings.weights,
            settings.embedding,
            mask.tobytes(),
            b"" if wide is None else wide.tobytes(),
            [] if measured is None else [part.numpy().tobytes() for part in (measured.key_means, measured.key_scales)],
            pool.shape,
            # The panels of one layout differ by the processor's vectors.
            [(store.layout.__name__, store.layout.value_panels(pool.shape.head_dim)) for store in pool.stores],
            pool.device.type,
        )
        return SnapshotStore(folder, hashlib.sha256(repr(traits).encode()).hexdigest()[:32], int(quota * 1e9))
    except OSError as error:
        log.warning("Nothing is saved: %s cannot be used: %s", folder, error)
        return None
