"""Where a model looked: a few heads' queries are kept from the question on, and weighed against the prompt at the end.

A head that copies from the past attends to what it copies ("retrieval heads", Wu et al., 2024), and while the question
is read to where its words stand. Keeping its query costs nothing while a token is made; one pass over the keys at the
end weighs question and answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from models.cache.duo import DuoCache
from models.cache.pool import BlockPool
from models.cache.retrieval import TILE
from models.decoder import Decoder

_SHARP = 8192  # tokens that are weighed one by one, in whole blocks; an answer rests on few


@dataclass(frozen=True)
class Looked:
    """Tokens of the prompt that were looked at: positions int64 [m], ascending, and their mean attention [m].

    Less than 0 where the words in front of the question gave more, such as those that end every document.
    """

    positions: np.ndarray
    masses: np.ndarray


class Watch:
    """Queries of chosen heads (layer, query head), in the decoder's order of heads; the last `rows` of each chunk.

    All of them together belong to the last tokens of their cache, without a gap. `question`: the token from which on
    they are of a question; what stands before it frames every question.
    """

    def __init__(self, heads: Iterable[tuple[int, int]], rows: int = 1, question: int = 0) -> None:
        self.heads = tuple(sorted(heads))
        self.rows = rows
        self.question = question
        self._chosen: dict[int, list[int]] = {}
        for layer, head in self.heads:
            self._chosen.setdefault(layer, []).append(head)
        self._rows: dict[int, list[Tensor]] = {layer: [] for layer in self._chosen}

    def add(self, layer: int, q: Tensor) -> None:
        """Keeps the last rows of q [n, heads, d] of a layer."""
        if layer in self._chosen:
            self._rows[layer].append(q[-self.rows :, self._chosen[layer]])

    def add_chosen(self, rows: dict[int, Tensor]) -> None:
        """As `add` for all layers at once: the chosen heads' rows [n, heads, d] by layer, in the order of `heads`."""
        for layer, kept in rows.items():
            self._rows[layer].append(kept)

    def queries(self, group: int) -> Iterator[tuple[int, int, Tensor]]:
        """(layer, KV head, queries fp32 [heads, n, d]) of the heads that share a KV head, in the order of `heads`."""
        for layer, chosen in self._chosen.items():
            rows = torch.cat(self._rows[layer]).transpose(0, 1).float()
            for kv_head in sorted({head // group for head in chosen}):
                yield layer, kv_head, rows[[head // group == kv_head for head in chosen]]


def attention(cache: DuoCache, watch: Watch, length: int) -> Tensor:
    """What each watched head gave to each of a prompt's `length` tokens, see `_shares`: fp32 [heads, length]."""
    return torch.cat(
        [
            _shares(query[-1], cache, watch, length) @ torch.cat(list(_scores(cache, *query, length)), -1).softmax(-1)
            for query in watch.queries(cache.shape.group)
        ]
    )


def _shares(q: Tensor, cache: DuoCache, watch: Watch, length: int) -> Tensor:
    """What each of the watched tokens counts, fp32 [n]: those of the question as much as those of the answer.

    The prompt's last token begins the answer. Neither part's length matters: a short question is not lost in a long
    answer, nor a word in a long question. What frames the question is taken off: its words look where all do.
    """
    at = torch.arange(cache.length - q.shape[1], cache.length, device=q.device)
    framing, answer = at < watch.question, at >= length - 1
    asked = ~framing & ~answer
    half = 0.5 if asked.any() else 1.0
    parts = ((framing, -1.0), (asked, half), (answer, half))
    return sum((weight / part.sum().clamp_min(1) * part for part, weight in parts), torch.zeros_like(at).float())


@torch.inference_mode()
def weigh(cache: DuoCache, watch: Watch, length: int) -> Looked:
    """What the watched heads gave to the prompt's `length` tokens: all of them, or those of the blocks with most."""
    if length <= _SHARP:
        return Looked(np.arange(length), attention(cache, watch, length).mean(0).cpu().numpy())
    shape = cache.shape
    starts = [0, *range(shape.front, length, shape.block), length]
    total = torch.zeros(len(starts) - 1, device=cache.pool.device)
    norms = []
    for query in watch.queries(cache.shape.group):
        sums = torch.cat([_by_block(part, shape.block) for part in _scores(cache, *query, length)], -1)
        norms.append(sums.logsumexp(-1, keepdim=True))
        total += (_shares(query[-1], cache, watch, length) @ (sums - norms[-1]).exp()).sum(0)
    chosen = total.topk(_SHARP // shape.block).indices.sort().values.tolist()
    positions = np.concatenate([np.arange(*starts[block : block + 2]) for block in chosen])
    masses = torch.zeros(len(positions), device=total.device)
    for query, norm in zip(watch.queries(cache.shape.group), norms, strict=True):
        parts = [part for block in chosen for part in _scores(cache, *query, length, block)]
        masses += (_shares(query[-1], cache, watch, length) @ (torch.cat(parts, -1) - norm).exp()).sum(0)
    return Looked(positions, (masses / len(watch.heads)).cpu().numpy())


def _by_block(scores: Tensor, block: int) -> Tensor:
    padded = F.pad(scores, (0, -scores.shape[-1] % block), value=-torch.inf)
    return padded.unflatten(-1, (-1, block)).logsumexp(-1)


def _scores(
    cache: DuoCache, layer: int, kv_head: int, q: Tensor, length: int, block: int | None = None
) -> Iterator[Tensor]:
    """Scaled q.k [heads, n, m] of the cache's last n tokens, piece by piece over the first `length`, or over a block.

    What stands behind a query's own token is out of its sight.
    """
    first = cache.length - q.shape[1]
    for start, keys in cache.keys(layer, kv_head, TILE, block):
        if start < length:
            scores = q @ keys[: length - start].float().T * cache.shape.head_dim**-0.5
            if start + scores.shape[-1] > first + 1:
                hidden = torch.ones_like(scores[0], dtype=torch.bool).triu(first + 1 - start)
                scores = scores.masked_fill(hidden, -torch.inf)
            yield scores


@dataclass(frozen=True)
class Question:
    """Token ids of a question behind a shared prompt and of its right answer; where in the prompt that stands."""

    ids: list[int]
    answer: list[int]
    span: tuple[int, int]


def find_heads(
    decoder: Decoder, pool: BlockPool, prompt: list[int], questions: list[Question], most: int
) -> list[tuple[int, int]]:
    """The `most` retrieval heads (layer, query head) that look at the right place of a prompt, the surest first.

    A head's score: what it gives to the right span over what it gives to the likeliest wrong one, mean over questions.
    """
    shape = pool.shape
    heads = [(layer, head) for layer, kept in enumerate(shape.retrieval_heads) for head in range(kept * shape.group)]
    start = DuoCache(pool)
    scores = torch.zeros(len(heads), device=pool.device)
    try:
        decoder.forward(torch.tensor(prompt), start)
        for question in questions:
            cache = start.fork()
            try:
                cache.watch = watch = Watch(heads, rows=len(question.answer))
                decoder.forward(torch.tensor([*question.ids, *question.answer[:-1]]), cache)
                given = attention(cache, watch, len(prompt))
            finally:
                cache.release()
            at, end = zip(*(other.span for other in questions), strict=True)
            sums = F.pad(given.cumsum(-1), (1, 0))
            spans = sums[:, list(end)] - sums[:, list(at)]
            right = spans[:, questions.index(question)].clone()
            spans[:, questions.index(question)] = 0
            scores += right - spans.amax(-1)
    finally:
        start.release()
    return [heads[at] for at in scores.topk(min(most, len(heads))).indices.tolist()]
