"""What a sequence's cache is to the decoder and the runner, whatever it keeps."""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch
from torch import Tensor

from models.cache.shape import CacheShape

Self = TypeVar("Self", bound="SequenceCache")


class StepCache(Protocol):
    """What the decoder needs: for every chunk `begin`, `attend` once a layer, `commit`."""

    shape: CacheShape

    @property
    def heads_dtype(self) -> torch.dtype:
        """dtype in which `attend` wants the chunk's heads."""

    def begin(self, n: int) -> Tensor:
        """Makes ready for a chunk of n tokens behind those held; their positions, int64 [n]."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Appends the chunk's k, v [n, kv_heads, d] of a layer and attends: q [n, heads, d] -> [n, heads * d]."""

    def commit(self) -> None:
        """Publishes the chunk: every layer has it now."""


class SequenceCache(StepCache, Protocol):
    """Use: `reserve`, then every chunk. `length` counts committed tokens only."""

    length: int

    def reserve(self, length: int) -> None:
        """Takes the memory that `length` tokens will need; raises PoolExhausted and takes none if it is too much."""

    def fork(self: Self) -> Self:
        """An independent continuation from here."""

    def release(self) -> None:
        """Gives everything back; the cache must not be used after it."""

    @property
    def retrieval_bytes(self) -> int:
        """Bytes of what is kept of the whole history."""

    @property
    def streaming_bytes(self) -> int:
        """Bytes of windows."""
