"""Which token prefixes are in the cache, and which of them a new prompt can start from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from models.cache.duo import DuoCache
from models.cache.plan import SNAPSHOTS
from models.cache.sequence import SequenceCache

_PER_CHAT = 3  # the newest end of a chat, the one before it, and one inside its last prompt
# Each holds its own windows. One more sequence runs, its fork waits to be kept, three are on their way to disk, and
# a decode graph has buffers of its own.
_IN_ALL = SNAPSHOTS - 6


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
        best = self._longest(prompt)
        if best is None:
            return None
        self._clock += 1
        best.used = self._clock
        return best.cache

    def length(self, prompt: np.ndarray) -> int:
        """Tokens that `find` would give, from any thread and without counting as a use."""
        best = self._longest(prompt)
        return len(best.ids) if best is not None else 0

    def _longest(self, prompt: np.ndarray) -> _Kept | None:
        fitting = [k for k in self._kept if len(k.ids) < len(prompt) and np.array_equal(k.ids, prompt[: len(k.ids)])]
        return max(fitting, key=lambda kept: len(kept.ids), default=None)

    def shared(self, prompt: np.ndarray) -> list[int]:
        """The longest run of packed blocks that any kept cache has in common with `prompt`."""
        best: list[int] = []
        for kept in self._kept:
            upto = min(len(kept.ids), len(prompt))
            differ = np.flatnonzero(kept.ids[:upto] != prompt[:upto])
            same = int(differ[0]) if len(differ) else upto
            if isinstance(kept.cache, DuoCache):
                best = max(best, kept.cache.blocks[: kept.cache.shape.packed_blocks(same)], key=len)
        return best

    def keep(self, ids: Sequence[int] | np.ndarray, cache: SequenceCache, chat_id: str | None) -> None:
        """Takes over `cache`, also when it raises, which holds exactly `ids`.

        Without a chat it is for whoever asks about the same.
        """
        try:
            tokens = np.asarray(ids, dtype=np.int64)
            assert len(tokens) == cache.length
            for kept in [k for k in self._kept if np.array_equal(k.ids, tokens)]:
                self._drop(kept)
        except BaseException:
            cache.release()
            raise
        self._clock += 1
        self._kept.append(_Kept(tokens, cache, chat_id, self._clock))
        own = [k for k in self._kept if k.chat_id == chat_id and chat_id is not None]
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
        self._kept = [k for k in self._kept if k is not kept]
        kept.cache.release()
