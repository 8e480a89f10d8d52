"""From --model to files, pattern and plan; nothing here touches the network."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import huggingface_hub
import numpy as np
import pytest
import torch
from huggingface_hub import errors

import app.embedded
import app.measured_heads
import app.model
from app.calibration import sample_texts
from app.config import DEFAULT_HUB_MODEL, Embedding, Settings
from app.embedded import embedded_model_path
from app.errors import OctavoError, UsageError
from app.model import ModelFiles, choose_pattern, find_model, plan_context
from app.tokenizer import Tokenizer
from models.checkpoint import open_checkpoint
from models.errors import BadPattern, DoesNotFit, UnsupportedModel
from models.heads import HeadPattern
from models.quantize import quantize_checkpoint
from quant import formats
from tests.models.tiny import tiny_model

LLAMA3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4194304,
    "rms_norm_eps": 1e-5,
    "rope_theta": 45_000_000_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA3_8B))
    return tmp_path / "config.json"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A hub that has every model; lists what was asked for."""
    asked: list[str] = []

    def snapshot(hub_id: str, **options: object) -> str:
        asked.append(hub_id)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(app.model, "_hub_answers", lambda: True)
    return asked


def no_hub(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(hub_id: str, *more: object, **options: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    monkeypatch.setattr(app.model, "_hub_answers", lambda: True)


def test_files_and_directories_are_taken_as_they_are(tmp_path: Path, hub: list[str]) -> None:
    (tmp_path / "m.gguf").touch()
    (tmp_path / "config.json").touch()
    assert find_model(Settings(model=str(tmp_path))) == ModelFiles(tmp_path.name, tmp_path)
    assert find_model(Settings(model=str(tmp_path / "m.gguf"))).name == "m.gguf"
    assert find_model(Settings(model="embedded")).path.suffix == ".gguf"
    assert hub == []


def test_a_directory_that_holds_no_model_is_told_before_anything_starts(tmp_path: Path, hub: list[str]) -> None:
    with pytest.raises(UsageError, match=r"holds no model: config\.json is missing"):
        find_model(Settings(model=str(tmp_path)))
    assert hub == []


@pytest.mark.parametrize("model", ["/no/such/place", "no/such/file.gguf", "word", "a/b/c", "../x", "a" * 300])
def test_what_is_nowhere_names_the_three_forms(model: str, hub: list[str]) -> None:
    with pytest.raises(UsageError, match=r"hub id .*directory of safetensors or a \.gguf file"):
        find_model(Settings(model=model))
    assert hub == []


def test_what_is_no_file_is_told_as_what_it_is(hub: list[str]) -> None:
    with pytest.raises(UsageError, match=r"/dev/null: this is a device, .*directory of safetensors or a \.gguf file"):
        find_model(Settings(model=os.devnull))
    with pytest.raises(UsageError, match="/dev/null: this is a device"):
        sample_texts(Path(os.devnull))
    assert hub == []


def test_hub_ids_are_fetched(hub: list[str], tmp_path: Path) -> None:
    assert find_model(Settings(model="owner/name")) == ModelFiles("owner/name", tmp_path, "owner/name")
    assert hub == ["owner/name"]


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (errors.LocalEntryNotFoundError("x"), "not on this machine"),
        (errors.OfflineModeIsEnabled("x"), "not on this machine"),
        (OSError("disk full"), "disk full"),
        (errors.HFValidationError("odd name"), "odd name"),
    ],
)
def test_a_hub_that_gives_nothing_is_told_clearly(monkeypatch: pytest.MonkeyPatch, error: Exception, says: str) -> None:
    no_hub(monkeypatch, error)
    with pytest.raises(OctavoError, match=says) as caught:
        find_model(Settings(model="owner/name"))
    assert "owner/name" in str(caught.value)


def test_a_hub_that_cannot_be_reached_is_asked_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[object] = []

    class Session:
        def head(self, url: str, timeout: float) -> None:
            asked.append(timeout)
            raise ConnectionError

    monkeypatch.setattr(huggingface_hub, "get_session", Session)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    for ask in (find_model, lambda settings: plan_context(settings, 1000)):
        with pytest.raises(OctavoError, match="not on this machine, and the hub cannot be reached"):
            ask(Settings(model="nobody/nothing"))
    assert asked == [5.0, 5.0]


def test_without_model_the_hardware_decides(monkeypatch: pytest.MonkeyPatch, hub: list[str]) -> None:
    settings = replace(Settings(), model=None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "135 million" in find_model(settings).note  # a stranger is told what answers
    assert hub == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    small = "SmolLM2-135M-Instruct"
    for size, major, name in ((80 << 30, 8, DEFAULT_HUB_MODEL), (32 << 30, 7, small), (4 << 30, 8, small)):
        properties = type("Properties", (), {"total_memory": size, "major": major, "name": "a card"})
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, value=properties: value)
        assert find_model(settings).name == name
    assert "a card has less" in find_model(settings).note
    properties.total_memory = 80 << 30
    no_hub(monkeypatch, errors.LocalEntryNotFoundError("x"))
    assert "Until then the small embedded model" in find_model(settings).note


def test_the_pattern_is_the_given_one_the_published_one_the_shipped_one_or_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given, published, shipped = (HeadPattern(np.eye(4), 4, 8, name) for name in ("given", "published", "shipped"))
    given.save(tmp_path / "given")
    shipped.save(tmp_path / "shipped" / "small")
    monkeypatch.setattr(app.embedded, "_PATTERNS", tmp_path / "shipped")
    monkeypatch.setattr(app.model, "fetch_pattern", lambda hub_id, cache: published)
    hub_files = ModelFiles("x", tmp_path, DEFAULT_HUB_MODEL)
    settings = Settings()
    for files, use, want in (
        (hub_files, replace(settings, pattern=tmp_path / "given"), "given"),
        (hub_files, settings, "published"),
        (ModelFiles("small", tmp_path / "small.gguf"), settings, "shipped"),
    ):
        pattern, note = choose_pattern(files, use)
        assert pattern is not None
        assert pattern.source == want
        assert note == f"8 of 16 heads keep everything ({want})."
    pattern, note = choose_pattern(ModelFiles("other", tmp_path), settings)
    assert pattern is None
    assert "every head keeps everything" in note

    def offline(hub_id: str, cache: Path) -> HeadPattern:
        raise BadPattern("It could not be fetched.")

    monkeypatch.setattr(app.model, "fetch_pattern", offline)
    assert choose_pattern(hub_files, settings) == (None, "Every head keeps everything. It could not be fetched.")


def test_the_plan_of_llama3_8b_is_the_arithmetic(config_file: Path) -> None:
    plan, config, _ = plan_context(Settings(), 4_194_304, config_file)
    assert (plan.bytes_per_token, config.max_positions) == (17_408, 4_194_304)
    assert 68 << 30 <= plan.retrieval_bytes < 69 << 30
    for kv, bytes_per_token in (("kv4", 2 * 17_408), ("bf16", 131_072)):
        settings = Settings.from_mapping({"kv": kv, "retrieval_ratio": 1.0})
        assert plan_context(settings, 1000, config_file)[0].bytes_per_token == bytes_per_token


def test_the_plan_of_the_embedded_model_needs_no_pattern(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(app.embedded, "_PATTERNS", tmp_path)
    plan, config, _ = plan_context(Settings(model="embedded"), 8192, gpu=False)
    assert config.max_positions == 8192
    assert plan.bytes_per_token == 30 * 3 * 2 * (64 // 2 + 4)
    assert 130e6 < plan.weights_bytes < 270e6


def test_an_embedding_that_is_stored_in_int8_is_planned_so(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "in")
    planned = {}
    for name, int8 in (("plain", False), ("narrow", True)):
        described = formats.metadata("tiny", "r1", {}, None)
        source = open_checkpoint(tmp_path / "in")
        quantize_checkpoint(source, tmp_path / name, [], described, torch.device("cpu"), int8_embedding=int8)
        for told in get_args(Embedding):
            settings = Settings(model=str(tmp_path / name), embedding=told)
            planned[name, told] = plan_context(settings, 64, gpu=False)[0].weights_bytes
    assert planned["narrow", "bf16"] == planned["narrow", "int8"] == planned["plain", "int8"] < planned["plain", "bf16"]


def test_plans_that_cannot_be_made_say_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config_file: Path) -> None:
    with pytest.raises(UsageError, match="at least 1"):
        plan_context(Settings(), 0, config_file)
    with pytest.raises(UsageError, match=r"cannot be read as a config\.json"):
        plan_context(Settings(), 1000, tmp_path / "missing.json")
    with pytest.raises(UsageError, match="--sink-tokens is 4,194,305; this model's window is 4,194,304 tokens"):
        plan_context(Settings(sink=4194305), 1000, config_file)
    with pytest.raises(UsageError, match="--recent is 4,194,305; this"):
        plan_context(Settings(recent=4194305), 1000, config_file)
    with pytest.raises(UsageError, match="no such file"):
        plan_context(Settings(model="/no/where"), 1000)
    no_hub(monkeypatch, errors.OfflineModeIsEnabled("x"))
    with pytest.raises(OctavoError, match="not on this machine"):
        plan_context(Settings(model="owner/name"), 1000)


@pytest.mark.parametrize(("mode", "told"), [("duo", True), ("endless", False)])
def test_keys_too_large_for_4_bits_are_told_where_there_are_4_bits(
    monkeypatch: pytest.MonkeyPatch, mode: str, told: bool
) -> None:
    monkeypatch.setattr(app.model, "key_warning", lambda checkpoint: "Keys are too large.")
    runner = SimpleNamespace(
        plan=None,
        describe=lambda: {"retrieval_ratio": 1.0},
        decoder=SimpleNamespace(device=torch.device("cpu")),
        warm_up=lambda: None,
    )
    monkeypatch.setattr(app.model, "build_runner", lambda *_: runner)
    opened = app.model.open_model(Settings(model="embedded", mode=mode), lambda stage, done: None)  # type: ignore[arg-type]
    assert ("too large" in opened.note) == told


@pytest.fixture
def unmeasured(tmp_path: Path) -> Path:
    """The embedded model under a name for which no measurements come along."""
    (tmp_path / "other.gguf").symlink_to(embedded_model_path())
    return tmp_path / "other.gguf"


class _Measuring(Exception):
    pass


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"context": 999_999}, "window is 8,192"),
        ({"context": 8192, "chunk": 1 << 40}, "are free"),
        ({"kv_bits": 4.0}, "--kv-bits"),
    ],
)
def test_what_cannot_run_is_told_before_heads_are_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, unmeasured: Path, changes: dict[str, object], told: str
) -> None:
    monkeypatch.setattr(app.measured_heads, "measure_heads", None)
    settings = Settings(model=str(unmeasured), cache_dir=tmp_path / "cache", **changes)  # type: ignore[arg-type]
    with pytest.raises((UsageError, DoesNotFit, UnsupportedModel), match=told):
        app.model.open_model(settings, lambda stage, done: None)


@pytest.mark.parametrize(
    ("changes", "measures"), [({}, True), ({"retrieval_ratio": 0.0}, False), ({"kv": "bf16"}, False)]
)
def test_heads_are_measured_where_keys_are_rounded_with_the_threads_in_force(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, unmeasured: Path, changes: dict[str, object], measures: bool
) -> None:
    before, seen = torch.get_num_threads(), []

    def measure(*_: object) -> None:
        seen.append(torch.get_num_threads())
        raise _Measuring

    def build(*_: object) -> None:
        raise _Measuring

    monkeypatch.setattr(app.measured_heads, "measure_heads", measure)
    monkeypatch.setattr(app.model, "build_runner", build)
    pattern = tmp_path / "pattern"
    HeadPattern.all_retrieval(open_checkpoint(unmeasured).config).save(pattern)
    settings = Settings(
        model=str(unmeasured), cache_dir=tmp_path / "cache", threads=before + 1, pattern=pattern, **changes
    )  # type: ignore[arg-type]
    try:
        with pytest.raises(_Measuring):
            app.model.open_model(settings, lambda stage, done: None)
    finally:
        torch.set_num_threads(before)
    assert seen == ([before + 1] if measures else [])


def test_what_a_gpu_held_to_measure_is_free_again_when_the_context_is_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, unmeasured: Path
) -> None:
    done = []
    heads = SimpleNamespace(save=lambda path: None)
    monkeypatch.setattr(app.measured_heads, "measure_heads", lambda *_: done.append("measured") or heads)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("emptied"))
    checkpoint, tokenizer = open_checkpoint(unmeasured), Tokenizer(unmeasured)
    app.measured_heads.measured_heads(checkpoint, tokenizer, tmp_path, torch.device("cuda"))
    assert done == ["measured", "emptied"]
