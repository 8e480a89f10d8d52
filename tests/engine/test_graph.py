"""The loop of an answer that runs one step ahead, on the CPU: the same steps, not captured, and nothing to wait for."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pytest
import torch
from torch import Tensor

from app.engine import graph as graph_module
from app.engine.graph import DecodeGraph, Live
from app.engine.sampler import Sampler
from app.engine.types import SamplingParams
from benchmarks._llama_8b import LLAMA_8B, random_tensors
from models.build import Build, build_decoder
from models.cache.duo import DuoCache
from models.cache.endless import EndlessCache
from models.cache.live import LiveCache
from models.cache.live_endless import LiveEndless
from models.cache.pool import BlockPool
from models.cache.sequence import SequenceCache
from models.cache.shape import CacheShape
from models.config import ModelConfig
from models.decoder import Decoder
from models.errors import BadLogits
from models.evidence import Watch
from models.rope import EndlessRope
from quant.w8a8 import DenseLinear, W8A8Linear

CPU = torch.device("cpu")
SIZES = {"vocab_size": 200, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
WATCHED = [(1, 1), (2, 0), (2, 3)]


class _Arrived:
    def __init__(self, token: Tensor, queries: dict[int, Tensor]) -> None:
        self.token, self.queries, self.here = token, queries, False

    def wait(self) -> int:
        return int(self.token)


class _Steps(DecodeGraph):
    """Without a graph: counts its steps, and spoils the logits of one."""

    def __init__(self, decoder: Decoder, live: Live) -> None:
        self._decoder, self.live = decoder, live
        self.late = self.steps = 0
        self.spoilt = -1

    def replay(self, token: Tensor) -> Tensor:
        self._token = token.clamp_min(0)
        self.steps += 1
        logits = self._forward()
        return torch.full_like(logits, torch.nan) if self.steps == self.spoilt else logits


@pytest.fixture(scope="module")
def model() -> tuple[Decoder, BlockPool]:
    config = ModelConfig.from_hf({**LLAMA_8B, **SIZES, **HEADS})
    mask = torch.tensor([[0, 0], [1, 0], [1, 1]]).bool().numpy()
    shape = CacheShape.for_model(config, mask, "kv4", 16, 60, CPU)
    how = Build(mask, W8A8Linear.from_float, DenseLinear, lambda tensor: tensor.float(), True, True, CPU)
    return build_decoder(config, random_tensors(config, CPU), how), BlockPool(shape, 16, CPU)


@pytest.fixture
def ready(model: tuple[Decoder, BlockPool], monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[_Steps, DuoCache]]:
    monkeypatch.setattr(graph_module, "_Arriving", _Arrived)
    decoder, pool = model
    cache = DuoCache(pool)
    yield _Steps(decoder, LiveCache(pool, WATCHED)), cache
    cache.release()
    assert pool.free == pool.blocks


def _read(steps: _Steps, cache: SequenceCache, count: int) -> tuple[list[int], Tensor]:
    tokens = torch.randint(0, 200, (count,))
    return tokens.tolist(), steps._decoder.logits(steps._decoder.forward(tokens, cache)[-1:])[0]


@pytest.mark.parametrize("length", [1, 120, 250])
def test_stopping_takes_the_step_ahead_back(ready: tuple[_Steps, DuoCache], length: int) -> None:
    steps, cache = ready
    ids, logits = _read(steps, cache, length)
    cache.watch = watch = Watch(WATCHED)
    plain = cache.fork()
    plain.watch = other = Watch(WATCHED)
    answer = steps.answer(cache, ids, logits, Sampler(SamplingParams()), None, cache.reserve)
    tokens = list(islice(answer, 20))
    answer.close()
    assert steps.steps == 20
    assert cache.length == len(ids) == length + 19
    assert ids[length:] == tokens[:19]
    for token in tokens[:19]:
        steps._decoder.forward(torch.tensor([token]), plain)
    group = cache.shape.group
    for (*place, kept), (*same, want) in zip(watch.queries(group), other.queries(group), strict=True):
        assert place == same and kept.shape == want.shape and kept.shape[1:] == (19, 64)
        assert (kept - want).norm() <= 5e-2 * want.norm()
    # What follows is what would follow without the step.
    last = torch.tensor(tokens[19:])
    got, want = (steps._decoder.logits(steps._decoder.forward(last, c))[0] for c in (cache, plain))
    assert (got - want).norm() <= 5e-2 * want.norm()
    plain.release()


@pytest.mark.parametrize("length", [1, 50, 100])
def test_an_endless_answer_goes_on_and_its_step_ahead_is_taken_back(
    ready: tuple[_Steps, DuoCache], monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """Through filling, at its edge and while the window slides."""
    decoder = ready[0]._decoder
    shape = CacheShape((0,) * 3, (2,) * 3, 2, decoder.config.head_dim, 4, 56, 16, torch.float16, torch.float32)
    monkeypatch.setattr(decoder, "rope", rope := EndlessRope(decoder.rope, 60))
    steps, cache = _Steps(decoder, LiveEndless(shape, rope, CPU)), EndlessCache(shape, rope, CPU)
    ids, logits = _read(steps, cache, length)
    plain = cache.fork()
    answer = steps.answer(cache, ids, logits, Sampler(SamplingParams()), None, cache.reserve)
    tokens = list(islice(answer, 30))
    answer.close()
    assert (steps.steps, cache.length, len(ids)) == (30, length + 29, length + 29)
    for token in tokens[:29]:
        decoder.forward(torch.tensor([token]), plain)
    last = torch.tensor(tokens[29:])
    got, want = (decoder.logits(decoder.forward(last, each))[0] for each in (cache, plain))
    assert (got - want).norm() <= 1e-3 * want.norm()


def test_room_ends_the_answer_without_a_step_too_many(ready: tuple[_Steps, DuoCache]) -> None:
    steps, cache = ready
    ids, logits = _read(steps, cache, 50)
    sampler = Sampler(SamplingParams(temperature=1.0, seed=3))
    assert len(list(steps.answer(cache, ids, logits, sampler, 9, cache.reserve))) == 9
    assert (steps.steps, len(ids), cache.length) == (8, 58, 58)


def test_logits_that_are_not_finite_name_their_token(ready: tuple[_Steps, DuoCache]) -> None:
    steps, cache = ready
    ids, logits = _read(steps, cache, 50)
    steps.spoilt = 3
    answer = steps.answer(cache, ids, logits, Sampler(SamplingParams()), None, cache.reserve)
    assert len(list(islice(answer, 3))) == 3
    with pytest.raises(BadLogits, match="answer token 4"):
        next(answer)
    assert cache.length == len(ids) == 53
