"""Finding retrieval heads: the pass with gradients equals the decoder's, and each way finds what was put there."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels.norm_rope import rms_norm
from models.build import load_decoder
from models.cache.duo import DuoCache
from models.cache.pool import BlockPool
from models.cache.shape import CacheShape
from models.checkpoint import open_checkpoint
from models.decoder import Decoder
from models.errors import BadPattern
from models.gated import full_attention, gated, masked, run_layers, windowed_attention
from models.identify import Recipe, Sample, Training, agreement, attention_beyond, train_gates
from models.refine import Refiner, best_flips, refine, scores_around
from tests.models.tiny import HF, tiny_model

CPU = torch.device("cpu")
SINK, RECENT = 4, 16
MASK = np.array([[True, False], [False, True]])


def decoder_of(folder: Path, mask: np.ndarray) -> tuple[Decoder, CacheShape]:
    checkpoint = open_checkpoint(folder)
    shape = CacheShape.for_model(checkpoint.config, mask, "fp32", SINK, RECENT, CPU)
    shape = replace(shape, exact_dtype=torch.float32, compute_dtype=torch.float32)
    return load_decoder(checkpoint, mask, "fp32", shape, CPU), shape


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model("llama-tied").save_pretrained(folder)
    return decoder_of(folder, np.ones((2, 2), dtype=bool))[0]


def sample(seed: int) -> Sample:
    return Sample(torch.randint(0, 96, (200,), generator=torch.Generator().manual_seed(seed)), 50)


@pytest.mark.parametrize("name", sorted(HF))
def test_gates_of_zero_and_one_give_the_decoders_hidden_states(name: str, tmp_path: Path) -> None:
    tiny_model(name).save_pretrained(tmp_path)
    ids = sample(0).tokens
    plain, _ = decoder_of(tmp_path, np.ones_like(MASK))
    for mask in (np.ones_like(MASK), MASK, np.zeros_like(MASK)):
        served, shape = decoder_of(tmp_path, mask)
        hidden = served.forward(ids, DuoCache(BlockPool(shape, len(ids) // shape.block + 1, CPU)))
        expected = rms_norm(hidden, served.norm, served.config.norm_eps)
        gates = torch.from_numpy(mask).float()
        for attend in (gated(gates, SINK, RECENT), masked(torch.from_numpy(mask), SINK, RECENT)):
            ours = run_layers(plain, ids, attend)
            assert (ours - expected).norm() < 2e-5 * expected.norm()


@pytest.mark.parametrize(
    ("n", "sink", "recent"), [(1, 4, 16), (700, 4, 16), (513, 0, 300), (300, 400, 1), (600, 7, 900)]
)
def test_windowed_attention_sees_exactly_its_window(n: int, sink: int, recent: int) -> None:
    q, k, v = torch.randn(4, n, 16), torch.randn(2, n, 16), torch.randn(2, n, 16)
    at = torch.arange(n)
    seen = (at <= at[:, None]) & ((at < sink) | (at > at[:, None] - recent))
    scores = q @ k.repeat_interleave(2, 0).transpose(1, 2) / 4
    expected = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v.repeat_interleave(2, 0)
    torch.testing.assert_close(windowed_attention(q, k, v, sink, recent), expected, atol=1e-5, rtol=1e-5)


def test_gradients_of_gates_are_those_of_the_loss(tiny: Decoder) -> None:
    def loss(gates: torch.Tensor) -> torch.Tensor:
        return run_layers(tiny, sample(1).tokens, gated(gates, SINK, RECENT))[150:].square().mean()

    gates = torch.full((2, 2), 0.5, requires_grad=True)
    loss(gates).backward()
    assert gates.grad is not None
    step = torch.zeros(2, 2)
    step[0, 1] = 1e-2
    with torch.no_grad():
        slope = (loss(gates + step) - loss(gates - step)) / 2e-2
    assert gates.grad[0, 1].item() == pytest.approx(slope.item(), rel=0.02)


def test_gates_stay_where_full_attention_matters(tiny: Decoder) -> None:
    trained = train_gates(tiny, sample, Recipe(SINK, RECENT, steps=30, penalty=1.0))
    lost = {}
    with torch.no_grad():
        target = run_layers(tiny, sample(99).tokens, gated(torch.ones(2, 2), SINK, RECENT))
        for head in range(4):
            mask = torch.ones(2, 2)
            mask.view(-1)[head] = 0
            lost[head] = (
                (run_layers(tiny, sample(99).tokens, gated(mask, SINK, RECENT)) - target).square().mean().item()
            )
    assert trained.gates.argmax().item() in sorted(lost, key=lost.__getitem__)[-2:]
    assert trained.gates.min() < 0.9


def test_training_that_was_interrupted_continues_as_if_it_had_not(tiny: Decoder, tmp_path: Path) -> None:
    recipe = Recipe(SINK, RECENT, steps=30)
    whole = train_gates(tiny, sample, recipe)

    class Stop(Exception):
        pass

    def stop(training: Training) -> None:
        if training.step == 25:
            raise Stop

    with pytest.raises(Stop):
        train_gates(tiny, sample, recipe, tmp_path / "training.pt", stop)
    seen: list[int] = []

    def counted(step: int) -> Sample:
        seen.append(step)
        return sample(step)

    again = train_gates(tiny, counted, recipe, tmp_path / "training.pt")
    assert seen == list(range(20, 30))  # saved at step 20
    assert torch.equal(again.gates, whole.gates)
    assert len(again.history) == 30
    with pytest.raises(BadPattern, match="another model"):
        train_gates(tiny, sample, replace(recipe, steps=31), tmp_path / "training.pt")
    with pytest.raises(BadPattern, match="another model, text, length, seed or recipe"):
        train_gates(tiny, sample, replace(recipe, learned_from="other weights"), tmp_path / "training.pt")
    (tmp_path / "training.pt").write_bytes(b"damaged")
    with pytest.raises(BadPattern, match="cannot be read"):
        train_gates(tiny, sample, recipe, tmp_path / "training.pt")


def test_attention_beyond_is_the_share_outside_the_window(tiny: Decoder) -> None:
    assert (attention_beyond(tiny, [sample(0)], 200, RECENT) == 0).all()  # every key is a sink
    scores = attention_beyond(tiny, [sample(0), sample(1)], 0, 1)
    weights = []

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        logits = q @ k.repeat_interleave(2, 0).transpose(1, 2) * q.shape[-1] ** -0.5
        future = torch.ones(q.shape[1], q.shape[1]).triu(1).bool()
        weights.append(logits.masked_fill(future, float("-inf")).softmax(-1))
        return full_attention(q, k, v)

    expected = []
    for one in (sample(0), sample(1)):
        weights.clear()
        with torch.no_grad():
            run_layers(tiny, one.tokens, attend)
        own = [w.diagonal(dim1=1, dim2=2)[:, one.scored].mean(1).view(2, 2).amin(1) for w in weights]
        expected.append(1 - torch.stack(own))
    np.testing.assert_allclose(scores, torch.stack(expected).mean(0).numpy(), atol=1e-5)


def test_agreement() -> None:
    scores = np.array([[0.9, 0.8], [0.2, 0.1]])
    assert agreement(scores, scores, 0.5) == (1.0, pytest.approx(1.0))
    assert agreement(scores, -scores, 0.5) == (0.0, pytest.approx(-1.0))


def test_flips_are_the_best_or_nearly() -> None:
    rng = np.random.default_rng(0)
    excess = []
    for _ in range(60):
        effects = rng.normal(size=(9, 30))
        effects[0] *= 0.5
        gram = effects @ effects.T
        mask = rng.random(8) < 0.7
        flips, expected = best_flips(gram, mask.reshape(2, 4), 4, 99)
        after = mask.copy()
        after[flips] ^= True
        assert after.sum() == 4

        def cost(kept: tuple[int, ...], gram: np.ndarray = gram, mask: np.ndarray = mask) -> float:
            at = np.concatenate(([True], mask ^ np.isin(np.arange(8), kept)))
            return float(gram[np.ix_(at, at)].sum())

        assert expected == pytest.approx(cost(tuple(np.flatnonzero(after))))
        excess.append(expected / min(map(cost, combinations(range(8), 4))) - 1)
    assert min(excess) > -1e-9
    assert np.mean(excess) < 0.02
    assert np.median(excess) < 1e-9
    assert len(best_flips(gram, np.arange(8).reshape(2, 4) < 4, 4, 2)[0]) <= 2


def test_refinement_finds_the_best_heads(tiny: Decoder) -> None:
    refiner = Refiner(tiny, [(sample(i), 1.0) for i in range(6)], SINK, RECENT)
    every = [np.isin(np.arange(4), pair).reshape(2, 2) for pair in combinations(range(4), 2)]
    divergences = [refiner.divergence(torch.from_numpy(mask)) for mask in every]
    worst, best = int(np.argmax(divergences)), int(np.argmin(divergences))
    mask, found, scores = refine(refiner, every[worst], divergences[worst], 4, lambda text: None)
    assert found == pytest.approx(divergences[best])
    assert (mask == every[best]).all()
    assert ((scores > 0.5) == mask).all()


def test_scores_follow_the_cost_of_one_head_more_or_fewer() -> None:
    costs = np.array([0.0, 4.0, 1.0, 3.0, 2.0])
    scores = scores_around(MASK, MASK, np.diag(costs))
    # kept: heads 0 (cost 4) and 3 (cost 2); dropped: 1 and 2, where flipping back never helps and 1 costs less
    assert np.argsort(-scores.ravel()).tolist() == [0, 3, 1, 2]
