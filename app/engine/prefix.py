"""Which token prefixes are in the cache, and which of them a new prompt can start from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from models.cache.plan import SNAPSHOTS
from models.cache.sequence import SequenceCache

_PER_CHAT = 3  # the newest end of a chat, the one before it, and one inside its last prompt
_IN_ALL = SNAPSHOTS - 2  # each holds its own windows; one more sequence runs, and its fork waits to be kept


@dataclass
class _Kept:
    ids: np.ndarray
    cache: SequenceCache
    chat_id: str | None
    used: int


class PrefixStore:
    """Caches at the points where a chat may continue, branch or be asked again; the least recently used go first."""

    def __init__(self) -> None:
        self._kept: list[_Kept] = []
        self._clock = 0

    def find(self, prompt: np.ndarray) -> SequenceCache | None:
        """The kept cache that covers most of `prompt` (int64 ids) and leaves at least its last token to read."""
        fitting = [
            k for k in self._kept if k.cache.length < len(prompt) and np.array_equal(k.ids, prompt[: k.cache.length])
        ]
        if not fitting:
            return None
        best = max(fitting, key=lambda kept: kept.cache.length)
        self._clock += 1
        best.used = self._clock
        return best.cache

    def keep(self, ids: Sequence[int], cache: SequenceCache, chat_id: str | None) -> None:
        """Takes over `cache`, which holds exactly `ids`."""
        tokens = np.asarray(ids, dtype=np.int64)
        assert len(tokens) == cache.length
        self._clock += 1
        for kept in [k for k in self._kept if np.array_equal(k.ids, tokens)]:
            self._drop(kept)
        self._kept.append(_Kept(tokens, cache, chat_id, self._clock))
        own = [k for k in self._kept if k.chat_id == chat_id]
        while len(own) > _PER_CHAT or len(self._kept) > _IN_ALL:
            oldest = min(own if len(own) > _PER_CHAT else self._kept, key=lambda k: k.used)
            self._drop(oldest)
            own = [k for k in own if k is not oldest]

    def drop_oldest(self) -> bool:
        """Gives back the least recently used cache; False when there is none."""
        if not self._kept:
            return False
        self._drop(min(self._kept, key=lambda k: k.used))
        return True

    def _drop(self, kept: _Kept) -> None:
        kept.cache.release()
        self._kept = [k for k in self._kept if k is not kept]
