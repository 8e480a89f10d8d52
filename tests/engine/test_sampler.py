"""Choosing tokens: every parameter's effect, limits, repeatability; and finding loops."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from app.engine.sampler import LoopDetector, Sampler, check_sampling, check_token
from app.engine.types import SamplingParams
from models.errors import BadLogits

LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0, 0.0])
WARM = SamplingParams(temperature=1.0, seed=0)


def draws(params: SamplingParams, logits: torch.Tensor = LOGITS, count: int = 2000) -> list[float]:
    sampler = Sampler(params)
    got = [int(sampler.sample(logits)) for _ in range(count)]
    return [got.count(token) / count for token in range(logits.numel())]


def test_temperature_zero_takes_the_largest_and_the_first_of_equals() -> None:
    sampler = Sampler(SamplingParams())
    assert sampler.sample(LOGITS).tolist() == [1]
    assert sampler.sample(torch.zeros(7)).tolist() == [0]


def test_draws_follow_the_softmax() -> None:
    for temperature in (0.5, 1.0, 2.0):
        want = (LOGITS / temperature).softmax(0).tolist()
        assert draws(replace(WARM, temperature=temperature)) == pytest.approx(want, abs=0.04)


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({"top_k": 1}, [1]),
        ({"top_k": 2}, [1, 2]),
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.0}, [1]),
        ({"top_p": 0.7}, [1, 2]),
        ({"top_p": 1.0}, [0, 1, 2, 3, 4]),
        ({"min_p": 1.0}, [1]),
        ({"min_p": 0.3}, [1, 2]),
        ({"top_k": 3, "min_p": 0.2}, [1, 2]),
    ],
)
def test_filters_keep_exactly_these(change: dict[str, Any], kept: list[int]) -> None:
    want = LOGITS.softmax(0)[kept]
    shares = draws(replace(WARM, **change))
    assert [token for token, share in enumerate(shares) if share] == kept
    assert [shares[token] for token in kept] == pytest.approx((want / want.sum()).tolist(), abs=0.04)


def test_same_seed_same_answer_and_other_seeds_differ() -> None:
    flat = torch.zeros(1000)
    runs = [int(Sampler(replace(WARM, seed=seed)).sample(flat)) for seed in (1, 1, 2, None, None)]
    assert runs[0] == runs[1]
    assert len(set(runs[1:])) > 1


def test_extreme_temperatures_are_defined() -> None:
    assert Sampler(replace(WARM, temperature=1e-30)).sample(LOGITS * 1e3) == 1
    assert Sampler(replace(WARM, temperature=100.0)).sample(LOGITS) in range(5)


def test_repetition_penalty_counts_the_answer_only() -> None:
    sampler = Sampler(SamplingParams(repetition_penalty=2.0))
    assert [int(sampler.sample(LOGITS)) for _ in range(5)] == [1, 2, 1, 1, 1]  # 3 / 2 once, however often it came
    sampler = Sampler(SamplingParams(repetition_penalty=2.0))
    assert [int(sampler.sample(torch.tensor(x))) for x in ([0.0, -1.0], [-1.0, -1.5])] == [0, 1]  # smaller also below 0
    assert LOGITS.tolist() == [1.0, 3.0, 2.0, -1.0, 0.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_name_the_step(bad: float, temperature: float) -> None:
    logits = LOGITS.clone()
    logits[3] = bad
    token = int(Sampler(replace(WARM, temperature=temperature)).sample(logits))
    with pytest.raises(BadLogits, match="answer token 3"):
        check_token(token, 3)
    check_token(0, 3)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_k": None}, "top_k"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"stop": "x"}, "stop"),
        ({"stop": ("x", "")}, "stop"),
    ],
)
def test_wrong_parameters_are_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named} is"):
        check_sampling(replace(SamplingParams(), **change))


def first_loop(ids: list[int]) -> int | None:
    detector = LoopDetector()
    return next((at for at, token in enumerate(ids, 1) if detector.push(token)), None)


@pytest.mark.parametrize("period", [1, 7, 42, 43, 128, 129, 700, 4096])
def test_loops_are_found_after_the_same_stretch(period: int) -> None:
    """A word, a sentence or pages: an answer that goes in circles ends, however long a circle is."""
    ids = [*range(10_000, 10_100), *list(range(period)) * max(7, 300 // period)]
    assert first_loop(ids) == 100 + max(256, 6 * period)


def test_a_loop_with_smaller_ones_in_it_is_found() -> None:
    row = [1, 2, 3] * 40
    passage = [*row, 4, *row, 5, *range(100, 300), *row, 6]
    found = first_loop([*range(1000, 1100), *passage * 9])
    assert found is not None
    assert found <= 100 + 7 * len(passage)


def test_lists_tables_and_random_text_are_no_loops() -> None:
    table = [token for row in range(200) for token in (1, 2, 3, 100 + row, 4)]
    noise = random.Random(0).choices(range(4), k=3000)
    assert first_loop(table) is None
    assert first_loop(noise) is None
    assert first_loop(list(range(200)) * 5) is None  # a text said again
