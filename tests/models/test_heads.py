"""Head patterns: read and written exactly, ranked without chance, fetched only when the hash is right."""

from __future__ import annotations

import hashlib
import json
import os
import urllib.error
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import heads
from models.config import ModelConfig, RopeConfig
from models.errors import BadPattern
from models.heads import HeadPattern, PublishedPattern, default_pattern, fetch_pattern

PUBLISHED = Path(os.environ.get("OCTAVO_TEST_PATTERNS") or Path(__file__).parents[3] / "shared" / "attn_patterns")
HUB_IDS = sorted(heads._PUBLISHED)
HUB_ID = "gradientai/Llama-3-8B-Instruct-Gradient-4194k"
needs_published = pytest.mark.skipif(
    not PUBLISHED.is_dir(), reason="the published patterns are not here (set OCTAVO_TEST_PATTERNS)"
)


def pattern(scores: Any, sink: int = 4, recent: int = 8) -> HeadPattern:
    return HeadPattern(np.array(scores), sink, recent, "test")


def model(layers: int, kv_heads: int) -> ModelConfig:
    return ModelConfig(
        family="llama",
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_layers=layers,
        num_heads=kv_heads,
        num_kv_heads=kv_heads,
        head_dim=8,
        norm_eps=1e-5,
        max_positions=64,
        rope=RopeConfig(),
    )


def local_copy(folder: Path, hub_id: str) -> Path:
    return folder.joinpath(*default_url(hub_id).split("/attn_patterns/")[1].split("/"))


def default_url(hub_id: str) -> str:
    published = default_pattern(hub_id)
    assert published is not None
    return published.url


@given(st.data())
def test_mask_has_the_exact_count_and_the_highest_scores(data: st.DataObject) -> None:
    layers, kv_heads = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    # few different values: ties everywhere
    values = st.lists(st.sampled_from([-1e-4, 0.0, 0.5, 1.0]), min_size=layers * kv_heads, max_size=layers * kv_heads)
    scores = np.array(data.draw(values)).reshape(layers, kv_heads)
    ratio = data.draw(st.floats(0, 1))
    mask = pattern(scores).retrieval_mask(ratio)
    assert mask.shape == scores.shape
    assert mask.sum() == round(ratio * scores.size)
    flat = scores.ravel().tolist()
    best = sorted(range(len(flat)), key=lambda index: (-flat[index], index))[: round(ratio * len(flat))]
    assert sorted(best) == np.flatnonzero(mask).tolist()


def test_ties_and_extremes() -> None:
    tied = pattern([[1.0, 1.0], [1.0, 1.0]])
    assert tied.retrieval_mask(0.5).tolist() == [[True, True], [False, False]]
    assert not tied.retrieval_mask(0).any()
    assert tied.retrieval_mask(1).all()
    # zero and negative zero are the same score
    assert pattern([[0.0, -0.0, 0.0]]).retrieval_mask(1 / 3).tolist() == [[True, False, False]]
    for ratio in (-0.1, 1.01, float("nan")):
        with pytest.raises(BadPattern, match="from 0 to 1"):
            tied.retrieval_mask(ratio)


def test_by_count_and_by_threshold() -> None:
    made = pattern([[0.9, 0.5], [0.5, 0.1]])
    assert made.best(2).tolist() == [[True, True], [False, False]]
    assert made.above(0.5).tolist() == [[True, True], [True, False]]
    assert not made.above(1.0).any()
    for count in (-1, 5):
        with pytest.raises(BadPattern, match="from 0 to 4"):
            made.best(count)


def test_a_larger_ratio_only_adds_heads() -> None:
    random = pattern(np.random.default_rng(0).random((8, 4)))
    masks = [random.retrieval_mask(step / 32) for step in range(33)]
    assert all((small <= large).all() for small, large in pairwise(masks))


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=6, max_size=6))
def test_save_and_load_are_exact(tmp_path_factory: pytest.TempPathFactory, values: list[float]) -> None:
    before = pattern(np.array(values).reshape(2, 3), sink=0, recent=7)
    folder = tmp_path_factory.getbasetemp() / "saved"
    before.save(folder)
    after = HeadPattern.load(folder)
    assert np.array_equal(before.scores, after.scores)
    assert (after.sink, after.recent, after.source) == (0, 7, "test")
    assert before.hash() == after.hash()
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "full_attention_heads.tsv"]


def test_a_budget_of_bits_comes_along(tmp_path: Path) -> None:
    before = HeadPattern(np.eye(2), 4, 8, "test", 5.5)
    before.save(tmp_path)
    after = HeadPattern.load(tmp_path)
    assert after.kv_bits == 5.5
    assert before.hash() == after.hash() != HeadPattern(np.eye(2), 4, 8, "test").hash()


def test_hash_tells_behaviour_apart() -> None:
    scores = [[0.1, 0.9], [0.4, 0.2]]
    hashes = [
        pattern(scores).hash(),
        pattern(scores, sink=5).hash(),
        pattern(scores, recent=9).hash(),
        pattern([[0.1, 0.9, 0.4, 0.2]]).hash(),
        pattern([[0.1, 0.9], [0.2, 0.4]]).hash(),
    ]
    assert len(set(hashes)) == 5
    assert pattern(scores).hash() == HeadPattern(np.array(scores), 4, 8, "elsewhere").hash()
    assert pattern([[0.0]]).hash() == pattern([[-0.0]]).hash()


def test_scores_cannot_be_changed_from_outside() -> None:
    scores = np.ones((2, 2))
    made = HeadPattern(scores, 4, 8, "test")
    scores[0, 0] = 0
    assert made.scores.all()
    with pytest.raises(ValueError, match="read-only"):
        made.scores[0, 0] = 0


@pytest.mark.parametrize("score", [float("nan"), float("inf"), float("-inf")])
def test_scores_must_be_finite(score: float) -> None:
    with pytest.raises(BadPattern, match="layer 1, head 0"):
        pattern([[0.5, 0.5], [score, 0.5]])


@pytest.mark.parametrize(
    ("table", "settings", "message"),
    [
        (None, '{"sink_size": 4, "recent_size": 8}', "needs full_attention_heads.tsv"),
        ("1.0\t0.5\n", None, "needs full_attention_heads.tsv and config.json"),
        ("1.0\tx\n", '{"sink_size": 4, "recent_size": 8}', r"line 1 is '1.0\\tx'"),
        ("1.0\t0.5\n1.0 0.5\n", '{"sink_size": 4, "recent_size": 8}', "line 2 is '1.0 0.5'"),
        ("1.0\t0.5\n\n1.0\t0.5\n", '{"sink_size": 4, "recent_size": 8}', "line 2 is ''"),
        ("1.0\t0.5\n1.0\n", '{"sink_size": 4, "recent_size": 8}', "line 2 has 1 scores, the first line 2"),
        ("", '{"sink_size": 4, "recent_size": 8}', "table of layers"),
        ("1.0\tnan\n", '{"sink_size": 4, "recent_size": 8}', "layer 0, head 1 is nan"),
        ("1.0\t0.5\n", "{", "cannot be read"),
        ("1.0\t0.5\n", "[]", "must hold one JSON object"),
        ("1.0\t0.5\n", '{"sink_size": 4}', "must name sink_size and recent_size"),
        ("1.0\t0.5\n", '{"sink_size": 4, "recent_size": -8}', "recent = -8"),
        ("1.0\t0.5\n", '{"sink_size": 4.5, "recent_size": 8}', "sink = 4.5"),
        ("1.0\t0.5\n", '{"sink_size": 4, "recent_size": 8, "kv_bits": "5"}', "kv_bits = '5'"),
        ("1.0\t0.5\n", '{"sink_size": 4, "recent_size": 8, "kv_bits": true}', "kv_bits = 'True'"),
        ("1.0\t0.5\n", '{"sink_size": 4, "recent_size": 8, "kv_bits": 8.6}', r"kv_bits = '8.6' .* 4 to 8\.5"),
    ],
)
def test_damaged_patterns_are_refused(table: str | None, settings: str | None, message: str, tmp_path: Path) -> None:
    if table is not None:
        (tmp_path / "full_attention_heads.tsv").write_text(table)
    if settings is not None:
        (tmp_path / "config.json").write_text(settings)
    with pytest.raises(BadPattern, match=message):
        HeadPattern.load(tmp_path)


def test_what_editors_leave_in_a_pattern_is_read(tmp_path: Path) -> None:
    (tmp_path / "full_attention_heads.tsv").write_bytes(b"\xef\xbb\xbf1.0\t0.5\r\n0.25\t0\t\r\n\r\n")
    settings = {"sink_size": 4, "recent_size": 8, "source": "from\nsome\x1b[31mwhere"}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    loaded = HeadPattern.load(tmp_path)
    assert loaded.scores.tolist() == [[1.0, 0.5], [0.25, 0.0]]
    assert loaded.source == "from some [31mwhere"


def test_a_pattern_can_be_read_by_whoever_may_read_its_folder(tmp_path: Path) -> None:
    pattern([[0.5, 0.5]]).save(tmp_path)
    (tmp_path / "other").write_text("")
    modes = {file.stat().st_mode for file in tmp_path.iterdir()}
    assert len(modes) == 1 and len(list(tmp_path.iterdir())) == 3


def test_a_pattern_of_another_model_is_refused_with_both_shapes() -> None:
    made = pattern(np.ones((3, 2)))
    made.check(model(3, 2))
    for other in (model(2, 3), model(3, 4), model(6, 1)):
        with pytest.raises(BadPattern) as caught:
            made.check(other)
        assert "3 layers of 2 KV heads" in str(caught.value)
        assert f"{other.num_layers} layers of {other.num_kv_heads}" in str(caught.value)


def test_without_a_pattern_every_head_keeps_everything() -> None:
    made = HeadPattern.all_retrieval(model(3, 2))
    made.check(model(3, 2))
    assert made.retrieval_mask(1.0).all()
    assert (made.sink, made.recent) == (128, 256)


@needs_published
@pytest.mark.parametrize("hub_id", HUB_IDS)
def test_published_patterns_read_and_match_their_pinned_hashes(hub_id: str) -> None:
    published, folder = default_pattern(hub_id), local_copy(PUBLISHED, hub_id)
    assert published is not None
    for name, sha256 in (
        ("full_attention_heads.tsv", published.scores_sha256),
        ("config.json", published.settings_sha256),
    ):
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == sha256
    made = HeadPattern.load(folder)
    assert (made.sink, made.recent) == (128, 256)
    assert made.scores.shape == ((32, 32) if "Llama-2" in hub_id else (32, 8))
    assert made.retrieval_mask(0.5).sum() == made.scores.size // 2


@needs_published
@pytest.mark.parametrize("hub_id", HUB_IDS)
@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75])
def test_published_patterns_give_the_set_of_their_own_quantile_rule(hub_id: str, ratio: float) -> None:
    made = HeadPattern.load(local_copy(PUBLISHED, hub_id))
    threshold = np.quantile(made.scores, 1 - ratio)
    theirs, ours = made.scores >= threshold, made.retrieval_mask(ratio)
    tied = made.scores == np.sort(made.scores, axis=None)[::-1][round(ratio * made.scores.size) - 1]
    assert (ours | tied).sum() > ours.sum() or (ours == theirs).all()
    assert ((ours != theirs) <= tied).all()  # they differ in heads of the one score at the boundary, if at all


@needs_published
def test_retrieval_heads_a_layer_of_the_default_model() -> None:
    mask = HeadPattern.load(local_copy(PUBLISHED, HUB_ID)).retrieval_mask(0.5)
    # Four heads tie at the threshold for one place; layer 14 is the first of them.
    expected = [2, 1, 3, 0, 2, 5, 2, 4, 5, 3, 4, 4, 1, 6, 5, 5, 5, 6, 3, 3, 6, 4, 5, 5, 5, 5, 5, 6, 5, 5, 8, 0]
    assert mask.sum(axis=1).tolist() == expected


def publish(folder: Path, monkeypatch: pytest.MonkeyPatch) -> HeadPattern:
    """Put a pattern in a folder and make it the published one of "org/model"."""
    made = pattern([[0.5, 1.0], [0.0, 0.25]])
    made.save(folder)
    hashes = [hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in (heads._SCORES, heads._SETTINGS)]
    monkeypatch.setitem(heads._PUBLISHED, "org/model", PublishedPattern(folder.as_uri(), *hashes))
    return made


def unreachable(*_: Any, **__: Any) -> Any:
    raise urllib.error.URLError("no route to host")


def test_fetch_then_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = publish(tmp_path / "remote", monkeypatch)
    assert fetch_pattern("org/model", tmp_path / "cache").hash() == made.hash()
    monkeypatch.setattr("urllib.request.urlopen", unreachable)
    assert fetch_pattern("org/model", tmp_path / "cache").hash() == made.hash()
    with pytest.raises(BadPattern, match=r"no route to host.*--pattern DIR"):
        fetch_pattern("org/model", tmp_path / "other-cache")


def test_a_damaged_cache_is_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = publish(tmp_path / "remote", monkeypatch)
    fetch_pattern("org/model", tmp_path / "cache")
    (cached,) = (tmp_path / "cache").rglob("*.tsv")
    cached.write_text("1.0\t1.0\n1.0\t1.0\n")
    assert fetch_pattern("org/model", tmp_path / "cache").hash() == made.hash()
    cached.write_text("")
    monkeypatch.setattr("urllib.request.urlopen", unreachable)
    with pytest.raises(BadPattern, match="could not be fetched"):
        fetch_pattern("org/model", tmp_path / "cache")


def test_other_content_is_never_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(tmp_path / "remote", monkeypatch)
    (tmp_path / "remote" / "full_attention_heads.tsv").write_text("1.0\t1.0\n1.0\t1.0\n")
    with pytest.raises(BadPattern, match="not the file that was published"):
        fetch_pattern("org/model", tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.*"))


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(tmp_path / "remote", monkeypatch)
    (tmp_path / "cache").write_text("a file, not a folder")
    with pytest.raises(BadPattern, match="could not be fetched"):
        fetch_pattern("org/model", tmp_path / "cache")


def test_models_without_a_published_pattern(tmp_path: Path) -> None:
    assert default_pattern("org/other") is None
    with pytest.raises(BadPattern, match="No head pattern is published for org/other"):
        fetch_pattern("org/other", tmp_path)
    assert default_url(HUB_ID) == (
        "https://raw.githubusercontent.com/mit-han-lab/duo-attention/03dca842639c64ed0d0daf9042da845cdea44637/"
        "attn_patterns/Llama-3-8B-Instruct-Gradient-4194k/lr=0.02-reg=0.05-ctx=1000_32000-multi_passkey10"
    )
