"""Everything that is compiled or chosen at its first use on a GPU, used once: no prompt waits for it."""

from __future__ import annotations

import torch

from models.cache import history
from models.cache.duo import DuoCache
from models.cache.sequence import SequenceCache
from models.decoder import Decoder
from models.errors import PoolExhausted

# Tokens: many rows, fewer, few; from the start of a block and from within one, with and without packed history.
_CHUNKS = (768, 255, 130, 3)


def warm_up(decoder: Decoder, cache: SequenceCache) -> None:
    """Reads a thousand tokens into an empty cache, as far as there is room for them, and releases it."""
    if decoder.device.type == "cuda":
        direct = isinstance(cache, DuoCache) and history.declines(cache.shape, decoder.device) is None
        stores = cache.pool.stores if isinstance(cache, DuoCache) and direct else ()
        for store in stores:
            store.history.tile = store.shape.block  # so that there are tiles to merge
        for count in _CHUNKS:
            try:
                cache.reserve(cache.length + count)
            except PoolExhausted:
                break
            if cache.length + count > decoder.config.max_positions:
                break
            hidden = decoder.forward(torch.zeros(count, dtype=torch.int64), cache)
            decoder.logits(hidden[-1:])
        torch.cuda.synchronize(decoder.device)
        for store in stores:
            del store.history  # with its tile
    cache.release()
