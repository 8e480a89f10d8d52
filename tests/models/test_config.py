"""ModelConfig: reads what transformers writes, refuses by name what the decoder does not do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from models.config import _ROPE_KEYS, ModelConfig, RopeKind
from models.errors import BadCheckpoint, ModelError, UnsupportedModel
from models.rope import Rope

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 3,
    "bos_token_id": 1,
}
HF: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**TINY),
    "llama-biases": LlamaConfig(**TINY, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "llama-wide-head": LlamaConfig(**TINY, head_dim=24),
    "mistral": MistralConfig(**TINY, sliding_window=None),
    "mistral-wide-window": MistralConfig(**TINY, sliding_window=512, head_dim=16),
    "qwen2": Qwen2Config(**TINY, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**TINY, head_dim=16),
    "qwen3-biases": Qwen3Config(**TINY, head_dim=16, attention_bias=True),
}
# As transformers 4 wrote it, and as on the hub for most models.
OLD: dict[str, Any] = {
    **TINY,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_scaling": None,
    "rope_theta": 500_000.0,
    "attention_bias": False,
    "pretraining_tp": 1,
    "torch_dtype": "bfloat16",
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
    "rope_type": "llama3",
}


def old(**changes: Any) -> dict[str, Any]:
    return {**OLD, **changes}


@pytest.mark.parametrize("name", HF)
def test_reads_what_transformers_saves(name: str, tmp_path: Path) -> None:
    hf = HF[name]
    model = AutoModelForCausalLM.from_config(hf)
    model.config.save_pretrained(tmp_path)
    config = ModelConfig.from_hf(json.loads((tmp_path / "config.json").read_text()))
    assert config.family == hf.model_type == name.partition("-")[0]
    assert (config.vocab_size, config.max_positions, config.eos_ids, config.bos_id) == (96, 512, (3,), 1)
    assert config.norm_eps == hf.rms_norm_eps
    assert config.rope.theta == hf.rope_parameters["rope_theta"]
    names = {key for key, _ in model.named_parameters()}  # leaves out a tied lm_head
    assert config.tensor_shapes() == {key: tuple(model.state_dict()[key].shape) for key in names}


def test_old_and_new_rope_styles_are_the_same() -> None:
    before = ModelConfig.from_hf(old(rope_scaling=LLAMA3))
    no_theta = {key: value for key, value in OLD.items() if key not in ("rope_theta", "rope_scaling")}
    after = ModelConfig.from_hf({**no_theta, "rope_parameters": {**LLAMA3, "rope_theta": 500_000.0}})
    legacy_name = {key: value for key, value in LLAMA3.items() if key != "rope_type"} | {"type": "llama3"}
    assert before == after == ModelConfig.from_hf(old(rope_scaling=legacy_name))
    assert before.rope["original_max_positions"] == 128
    assert hash(before) == hash(after)


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        (None, 512),
        ({"rope_type": "linear", "factor": 4.0}, 512),
        ({"rope_type": "dynamic", "factor": 4.0}, 2048),
        (LLAMA3, 512),
        ({"rope_type": "yarn", "factor": 4.0}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 128}, 512),
    ],
)
def test_longest_context(scaling: dict[str, Any] | None, longest: int) -> None:
    assert ModelConfig.from_hf(old(rope_scaling=scaling)).max_positions == longest


def test_yarn_defaults_are_resolved() -> None:
    rope = ModelConfig.from_hf(old(rope_scaling={"rope_type": "yarn", "factor": 4.0, "beta_fast": None})).rope
    assert (rope["beta_fast"], rope["beta_slow"], rope["truncate"]) == (32, 1, 1)
    assert rope["attention_factor"] == pytest.approx(1.138629436)
    given = {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.5, "truncate": False}
    rope = ModelConfig.from_hf(old(rope_scaling=given)).rope
    assert (rope["attention_factor"], rope["truncate"]) == (0.5, 0)


@pytest.mark.parametrize(("value", "ids"), [(None, ()), (5, (5,)), ([5, 6], (5, 6)), ([], ())])
def test_end_tokens(value: Any, ids: tuple[int, ...]) -> None:
    assert ModelConfig.from_hf(old(eos_token_id=value)).eos_ids == ids


def test_defaults_are_those_of_transformers() -> None:
    bare = {key: value for key, value in OLD.items() if key not in ("num_key_value_heads", "rope_theta", "hidden_act")}
    config = ModelConfig.from_hf({key: value for key, value in bare.items() if key != "architectures"})
    hf = LlamaConfig(**{key: value for key, value in bare.items() if key not in ("model_type", "rope_scaling")})
    assert (config.num_kv_heads, config.head_dim) == (hf.num_key_value_heads, hf.head_dim) == (4, 8)
    assert config.rope.theta == dict(hf.rope_parameters or {})["rope_theta"]
    assert ModelConfig.from_hf({**OLD, "architectures": None, "model_type": "qwen3"}).head_dim == 128


UNSUPPORTED: list[tuple[str, dict[str, Any]]] = [
    ("architectures", {"architectures": ["LlamaForSequenceClassification"]}),
    ("model_type", {"architectures": None, "model_type": "gemma3"}),
    ("model_type", {"architectures": None, "model_type": None}),
    ("model_type", {"architectures": ["MistralForCausalLM"]}),
    ("hidden_act", {"hidden_act": "gelu"}),
    ("quantization_config", {"quantization_config": {"quant_method": "gptq", "bits": 4}}),
    ("num_local_experts", {"num_local_experts": 8}),
    ("logits_scaling", {"logits_scaling": 8.0}),
    ("qkv_bias", {"qkv_bias": True}),
    (
        "attention_bias",
        {"model_type": "mistral", "architectures": None, "attention_bias": True, "sliding_window": None},
    ),
    ("mlp_bias", {"model_type": "qwen3", "architectures": None, "mlp_bias": True}),
    ("attention_bias", {"model_type": "qwen2", "architectures": None}),
    ("sliding_window", {"model_type": "mistral", "architectures": None, "sliding_window": 511}),
    ("sliding_window", {"model_type": "mistral", "architectures": None, "max_position_embeddings": 8192}),
    ("sliding_window", {"sliding_window": 64}),
    ("layer_types", {"layer_types": ["full_attention", "sliding_attention"]}),
    ("partial_rotary_factor", {"partial_rotary_factor": 0.5}),
    ("rope_type", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}),
    ("rope_type", {"rope_scaling": {"type": "su", "factor": 2.0}}),
    ("rope_parameters.type", {"rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [1]}}),
    ("rope_parameters.alpha", {"rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 1000.0}}),
    ("rope_parameters.low_freq_factor", {"rope_scaling": {"type": "yarn", "factor": 2.0, "low_freq_factor": 1.0}}),
    ("rope_parameters", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}),
]


@pytest.mark.parametrize(("key", "changes"), UNSUPPORTED)
def test_unsupported_is_refused_by_name(key: str, changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        ModelConfig.from_hf(old(**changes))
    assert caught.value.key == key
    assert str(caught.value).startswith(key)


def qwen(**changes: Any) -> dict[str, Any]:
    return old(model_type="qwen3", architectures=None, sliding_window=64, max_window_layers=1, **changes)


def test_qwen_windows_count_only_in_use() -> None:
    assert ModelConfig.from_hf(qwen(use_sliding_window=False)).family == "qwen3"
    assert ModelConfig.from_hf(qwen(use_sliding_window=True) | {"max_window_layers": 2}).family == "qwen3"
    with pytest.raises(UnsupportedModel, match="sliding_window = 64"):
        ModelConfig.from_hf(qwen(use_sliding_window=True))


@pytest.mark.parametrize(
    ("part", "changes"),
    [
        ("no vocab_size", {"vocab_size": None}),
        ("no rms_norm_eps", {"rms_norm_eps": None}),
        ("hidden_size = 0", {"hidden_size": 0}),
        ("hidden_size = '32'", {"hidden_size": "32"}),
        ("num_hidden_layers = True", {"num_hidden_layers": True}),
        ("not a multiple", {"num_key_value_heads": 3}),
        ("head_dim = 7", {"head_dim": 7}),
        ("rms_norm_eps = nan", {"rms_norm_eps": float("nan")}),
        ("tie_word_embeddings = 'yes'", {"tie_word_embeddings": "yes"}),
        ("eos_token_id", {"eos_token_id": "</s>"}),
        ("needs factor", {"rope_scaling": {"rope_type": "linear"}}),
        ("factor = 0.5", {"rope_scaling": {"rope_type": "linear", "factor": 0.5}}),
        ("high_freq_factor above", {"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}),
        ("rope_theta", {"rope_theta": -1.0}),
        ("rope_theta", {"rope_theta": 1.0}),
    ],
)
def test_bad_values_are_refused(part: str, changes: dict[str, Any]) -> None:
    with pytest.raises(BadCheckpoint) as caught:
        ModelConfig.from_hf(old(**changes))
    assert part in str(caught.value)


def test_mistral_and_qwen_must_say_how_many_kv_heads() -> None:
    bare = {key: value for key, value in OLD.items() if key != "num_key_value_heads"}
    with pytest.raises(BadCheckpoint, match="no num_key_value_heads"):
        ModelConfig.from_hf({**bare, "model_type": "mistral", "architectures": None, "sliding_window": None})


_JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(sorted(LLAMA3)), inner, max_size=3),
    max_leaves=4,
)
_KEYS = sorted({*OLD, "head_dim", "layer_types", "sliding_window", "mlp_bias", "rope_parameters", "max_window_layers"})


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["llama", "qwen2", "qwen3"]), st.dictionaries(st.sampled_from(_KEYS), _JUNK, max_size=2))
def test_any_junk_gives_a_config_or_a_model_error(family: str, changes: dict[str, Any]) -> None:
    assert_config_or_model_error({**OLD, "architectures": None, "model_type": family, **changes})


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["linear", "dynamic", "llama3", "yarn"]), st.data())
def test_any_rope_junk_gives_a_config_or_a_model_error(kind: str, data: st.DataObject) -> None:
    required, optional = _ROPE_KEYS[cast(RopeKind, kind)]
    value = st.floats(1, 64) | st.integers(1, 512) | _JUNK
    values = {key: data.draw(value) for key in sorted(required)}
    values |= data.draw(st.dictionaries(st.sampled_from([*sorted(optional), "rope_theta"]), value, max_size=3))
    assert_config_or_model_error(old(rope_scaling={"rope_type": kind, **values}))


def assert_config_or_model_error(data: dict[str, Any]) -> None:
    try:
        config = ModelConfig.from_hf(data)
    except ModelError:
        return
    table = Rope(config.rope, config.head_dim, config.max_positions).table(torch.tensor([0]))
    assert table.isfinite().all()


def test_an_absurd_number_of_layers_is_refused_at_once() -> None:
    with pytest.raises(BadCheckpoint, match=r"num_hidden_layers = 2147483647.*4,096"):
        ModelConfig.from_hf({**OLD, "num_hidden_layers": 2**31 - 1})


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["GptOssForCausalLM"]},
        {"model_type": "gpt_oss", "architectures": None},
        {"add_full_attention_sink_bias": True},
        {"attn_sink": True},
        {"learned_sinks": [0.1]},
    ],
)
def test_learned_sink_logits_are_refused_by_name(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match="learned sink logits") as refusal:
        ModelConfig.from_hf({**OLD, **changes})
    assert refusal.value.key in changes
