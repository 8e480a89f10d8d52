"""What the decoder needs to know of a model, read from a Hugging Face config; refuses what it does not do, by name."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from models.errors import BadCheckpoint, UnsupportedModel

Family = Literal["llama", "mistral", "qwen2", "qwen3"]
RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"  # as checkpoints name them

_ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_MOST = 10**12  # no size, length or base of a real model comes near; larger ones overflow further down
_MOST_LAYERS = 4096  # every layer is listed tensor by tensor: a damaged number must not take minutes and gigabytes
# Keys of related models that change the arithmetic: refused when set, since ignoring them gives a wrong model.
_MUST_BE_UNSET = (
    "quantization_config",
    "num_local_experts",
    "num_experts",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "attention_chunk_size",
    "no_rope_layers",
    "use_qk_norm",
    "qk_layernorm",
)
_MUST_BE_ONE = ("logit_scale", "logits_scaling", "embedding_multiplier", "residual_multiplier", "attention_multiplier")
# Trained numbers in the softmax of each head (gpt-oss). They are no tokens: nothing here computes with them.
LEARNED_SINKS = (
    "models without learned sink logits, which are trained numbers in each head's softmax; the sink tokens of "
    "--mode endless and of streaming heads are another thing"
)
# Parameters of each rope kind: (required, optional). Others are refused: an ignored one gives wrong positions.
_ROPE_KEYS: dict[RopeKind, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "dynamic": ({"factor"}, set()),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor"}, {"original_max_position_embeddings"}),
    "yarn": (
        set(),
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
            "finetuned",  # a remark of the checkpoint's makers: it changes nothing
        },
    ),
}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position encoding: its kind, base and the kind's parameters, with every default resolved.

    linear: factor. dynamic: factor, original_max_positions. llama3: those and low_freq_factor, high_freq_factor.
    yarn: factor, original_max_positions, attention_factor, beta_fast, beta_slow, truncate (0 or 1).
    """

    kind: RopeKind = "default"
    theta: float = 10_000.0
    params: tuple[tuple[str, float], ...] = ()

    def __getitem__(self, name: str) -> float:
        return dict(self.params)[name]


@dataclass(frozen=True)
class ModelConfig:
    """Shape and options of a dense decoder. `max_positions` is the longest context that the model was made for."""

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    rope: RopeConfig
    tied_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> ModelConfig:
        """Read a config.json's content, of transformers 4 or 5. Raises UnsupportedModel or BadCheckpoint."""
        _refuse_learned_sinks(data)
        family = _family(data)
        _refuse_extras(data, family)
        heads = _integer(data, "num_attention_heads")
        # Absent means the same as in transformers: only Llama's default is one KV head for each query head.
        kv_heads = heads if family == "llama" or "num_key_value_heads" in data else None
        kv_heads = _integer(data, "num_key_value_heads", kv_heads)
        hidden = _integer(data, "hidden_size")
        head_dim = _integer(data, "head_dim", 128 if family == "qwen3" and "head_dim" not in data else hidden // heads)
        layers = _integer(data, "num_hidden_layers", most=_MOST_LAYERS)
        if heads % kv_heads:
            raise BadCheckpoint(f"num_attention_heads = {heads} is not a multiple of num_key_value_heads = {kv_heads}.")
        if head_dim < 4 or head_dim % 2:
            raise BadCheckpoint(f"head_dim = {head_dim} cannot be rotated in pairs: it must be even and at least 4.")
        stated = _integer(data, "max_position_embeddings")
        rope = _rope(data, stated)
        max_positions = _max_positions(rope, stated)
        _refuse_windows(data, family, layers, max_positions)
        attention_bias = _flag(data, "attention_bias", family == "qwen2")
        return cls(
            family=family,
            vocab_size=_integer(data, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_integer(data, "intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            norm_eps=_number(data, "rms_norm_eps"),
            max_positions=max_positions,
            rope=rope,
            tied_embeddings=_flag(data, "tie_word_embeddings"),
            qkv_bias=attention_bias,
            o_bias=attention_bias and family != "qwen2",
            mlp_bias=_flag(data, "mlp_bias"),
            qk_norm=family == "qwen3",
            eos_ids=_ids(data, "eos_token_id"),
            bos_id=next(iter(_ids(data, "bos_token_id")), None),
        )

    def to_hf(self) -> dict[str, Any]:
        """A config.json's content that `from_hf` reads back as this."""
        architecture = next(name for name, family in _ARCHITECTURES.items() if family == self.family)
        data: dict[str, Any] = {
            "architectures": [architecture],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": self.tied_embeddings,
            "eos_token_id": list(self.eos_ids),
            "bos_token_id": self.bos_id,
            "sliding_window": None,
            "rope_parameters": {"rope_type": self.rope.kind, "rope_theta": self.rope.theta},
        }
        if self.family in ("llama", "qwen3"):
            data["attention_bias"] = self.qkv_bias
        if self.family == "llama":
            data["mlp_bias"] = self.mlp_bias
        rope = dict(self.rope.params)
        original = rope.pop("original_max_positions", None)
        if "truncate" in rope:
            data["rope_parameters"]["truncate"] = bool(rope.pop("truncate"))
        data["rope_parameters"] |= rope
        if self.rope.kind == "dynamic":  # takes the length before scaling from the model's own
            data["max_position_embeddings"] = int(original or self.max_positions)
        elif original is not None:
            data["rope_parameters"]["original_max_position_embeddings"] = int(original)
        return data

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the model by its Hugging Face name, in the order of the forward pass; linear is [out, in]."""
        hidden, inner = self.hidden_size, self.intermediate_size
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        linears = (
            ("self_attn.q_proj", q, hidden, self.qkv_bias),
            ("self_attn.k_proj", kv, hidden, self.qkv_bias),
            ("self_attn.v_proj", kv, hidden, self.qkv_bias),
            ("self_attn.o_proj", hidden, q, self.o_bias),
            ("mlp.gate_proj", inner, hidden, self.mlp_bias),
            ("mlp.up_proj", inner, hidden, self.mlp_bias),
            ("mlp.down_proj", hidden, inner, self.mlp_bias),
        )
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocab_size, hidden)}
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            shapes[prefix + "input_layernorm.weight"] = (hidden,)
            for name, rows, columns, bias in linears:
                shapes[f"{prefix}{name}.weight"] = (rows, columns)
                if bias:
                    shapes[f"{prefix}{name}.bias"] = (rows,)
            if self.qk_norm:
                shapes[prefix + "self_attn.q_norm.weight"] = (self.head_dim,)
                shapes[prefix + "self_attn.k_norm.weight"] = (self.head_dim,)
            shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        shapes["model.norm.weight"] = (hidden,)
        if not self.tied_embeddings:
            shapes[HEAD] = (self.vocab_size, hidden)
        return shapes


def _refuse_learned_sinks(data: Mapping[str, Any]) -> None:
    names = data.get("architectures")
    for name in names if isinstance(names, list) else []:
        if isinstance(name, str) and name.startswith("GptOss"):
            raise UnsupportedModel("architectures", name, LEARNED_SINKS)
    if data.get("model_type") == "gpt_oss":
        raise UnsupportedModel("model_type", "gpt_oss", LEARNED_SINKS)
    for key, value in data.items():
        if value and re.search(r"(^|_)(attn|attention|learned)_sinks?(_|$)", key):
            raise UnsupportedModel(key, value, LEARNED_SINKS)


def refuse_sink_tensors(names: Iterable[str]) -> None:
    """Raise UnsupportedModel for tensors of learned sink logits, whatever the config says."""
    for name in names:
        if re.search(r"(^|[._])sinks?(_bias|_logits?)?(\.|$)", name):
            raise UnsupportedModel("tensor", name, LEARNED_SINKS)


def _family(data: Mapping[str, Any]) -> Family:
    known = ", ".join(_ARCHITECTURES)
    names = data.get("architectures") or []
    if not isinstance(names, list):
        raise BadCheckpoint(f"architectures = {names!r} in the model's config must be a list of names.")
    for name in names:
        if not isinstance(name, str) or name not in _ARCHITECTURES:
            raise UnsupportedModel("architectures", name, known)
    family = data.get("model_type") or (_ARCHITECTURES[names[0]] if names else None)
    if family not in _ARCHITECTURES.values() or any(_ARCHITECTURES[name] != family for name in names):
        raise UnsupportedModel("model_type", family, f"the model types of {known}")
    return cast(Family, family)


def _refuse_extras(data: Mapping[str, Any], family: Family) -> None:
    activation = data.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModel("hidden_act", activation, "silu")
    for key in _MUST_BE_UNSET:
        if value := data.get(key):
            named = value.get("quant_method", value) if isinstance(value, Mapping) else value
            raise UnsupportedModel(key, named, f"a model without {key}")
    for key in _MUST_BE_ONE:
        if data.get(key) not in (None, 1):
            raise UnsupportedModel(key, data[key], "1")
    biases = {"llama": ("attention_bias", "mlp_bias"), "qwen2": ("attention_bias",), "qwen3": ("attention_bias",)}
    for key, value in data.items():
        if key.endswith("bias") and value and key not in biases.get(family, ()):
            raise UnsupportedModel(key, value, f"no such bias in the {family} family")
    if family == "qwen2" and data.get("attention_bias") is False:
        raise UnsupportedModel("attention_bias", False, "true: the qwen2 family has biases on q, k and v")


def _refuse_windows(data: Mapping[str, Any], family: Family, layers: int, max_positions: int) -> None:
    """A sliding window of the model's own is accepted only where it can never cut anything off."""
    kinds = data.get("layer_types")
    if kinds and (not isinstance(kinds, list) or set(map(str, kinds)) != {"full_attention"}):
        raise UnsupportedModel("layer_types", kinds, "full_attention in every layer")
    if family in ("qwen2", "qwen3") and (
        kinds or not _flag(data, "use_sliding_window") or _integer(data, "max_window_layers", 28, least=0) >= layers
    ):
        return
    window = data.get("sliding_window", 4096 if family in ("mistral", "qwen2", "qwen3") else None)
    if window is not None and (not isinstance(window, int) or window < max_positions):
        raise UnsupportedModel("sliding_window", window, f"null, or at least the whole context of {max_positions:,}")


def _rope(data: Mapping[str, Any], max_positions: int) -> RopeConfig:
    section = data.get("rope_scaling") or data.get("rope_parameters") or {}
    if not isinstance(section, Mapping):
        raise BadCheckpoint(f"rope_parameters = {section!r} is not a set of named values.")
    if any(isinstance(value, Mapping) for value in section.values()):
        raise UnsupportedModel("rope_parameters", sorted(section), "one set of values for all layers")
    given = {key: data[key] for key in ("rope_theta", "partial_rotary_factor") if key in data} | dict(section)
    given = {key: value for key, value in given.items() if value is not None}
    old_name = given.pop("type", "default")
    kind = given.pop("rope_type", old_name)
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        raise UnsupportedModel("rope_type", kind, ", ".join(_ROPE_KEYS))
    if old_name not in ("default", kind):
        raise UnsupportedModel("rope_parameters.type", old_name, f"the same as rope_type, {kind}")
    theta = _number(given, "rope_theta", 10_000.0)
    if theta <= 1:
        raise BadCheckpoint(f"rope_theta = {theta} must be above 1.")
    if _number(given, "partial_rotary_factor", 1.0) != 1:
        raise UnsupportedModel("partial_rotary_factor", given["partial_rotary_factor"], "1: the whole head is rotated")
    required, optional = _ROPE_KEYS[kind]
    for key in sorted(given.keys() - required - optional - {"rope_theta", "partial_rotary_factor"}):
        raise UnsupportedModel(f"rope_parameters.{key}", given[key], f"no such key for rope type {kind}")
    for key in sorted(required - given.keys()):
        raise BadCheckpoint(f"rope type {kind} needs {key}, which the model's config does not give.")
    if kind in ("llama3", "yarn") and data.get("original_max_position_embeddings"):
        given["original_max_position_embeddings"] = data["original_max_position_embeddings"]
    return RopeConfig(cast(RopeKind, kind), theta, _rope_params(kind, given, max_positions))


def _rope_params(kind: str, given: Mapping[str, Any], max_positions: int) -> tuple[tuple[str, float], ...]:
    if kind == "default":
        return ()
    original = _integer(given, "original_max_position_embeddings", max_positions)
    factor = _number(given, "factor", max_positions / original)
    if factor < 1:
        raise BadCheckpoint(f"rope factor = {factor} would shorten the context: it must be at least 1.")
    params = {"factor": factor}
    if kind != "linear":
        params["original_max_positions"] = float(original)
    if kind == "llama3":
        params |= {key: _number(given, key) for key in ("low_freq_factor", "high_freq_factor")}
        if params["high_freq_factor"] <= params["low_freq_factor"]:
            raise BadCheckpoint("rope type llama3 needs high_freq_factor above low_freq_factor.")
    if kind == "yarn":
        for key, default in (("beta_fast", 32.0), ("beta_slow", 1.0)):  # 0 means the default, as in transformers
            params[key] = _number({key: given.get(key) or default}, key)
        params["truncate"] = float(_flag(given, "truncate", True))
        params["attention_factor"] = _yarn_attention_factor(given, factor)
    return tuple(sorted(params.items()))


def _yarn_attention_factor(given: Mapping[str, Any], factor: float) -> float:
    """What cos and sin are multiplied by: as given, else from mscale, else the paper's (arXiv 2309.00071, eq. 22)."""
    if "attention_factor" in given:
        return _number(given, "attention_factor")

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0

    if given.get("mscale") and given.get("mscale_all_dim"):
        return scale(_number(given, "mscale")) / scale(_number(given, "mscale_all_dim"))
    return scale(1.0)


def _max_positions(rope: RopeConfig, stated: int) -> int:
    """The context that the encoding was made for.

    dynamic and yarn configs usually state the length before scaling; linear and llama3 ones the length after it.
    """
    if rope.kind in ("dynamic", "yarn"):
        return max(stated, int(rope["original_max_positions"] * rope["factor"]))
    return stated


def _require(data: Mapping[str, Any], key: str, default: object) -> Any:
    value = data.get(key)
    value = default if value is None else value
    if value is None:
        raise BadCheckpoint(f"The model's config has no {key}. Use a complete checkpoint.")
    return value


def _integer(data: Mapping[str, Any], key: str, default: int | None = None, least: int = 1, most: int = _MOST) -> int:
    value = _require(data, key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise BadCheckpoint(f"{key} = {value!r} in the model's config must be a whole number from {least} to {most:,}.")
    return value


def _number(data: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = _require(data, key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= _MOST:
        raise BadCheckpoint(f"{key} = {value!r} in the model's config must be a number above 0, at most {_MOST:,}.")
    return float(value)


def _flag(data: Mapping[str, Any], key: str, default: bool = False) -> bool:
    value = _require(data, key, default)
    if not isinstance(value, bool):
        raise BadCheckpoint(f"{key} = {value!r} in the model's config must be true or false.")
    return value


def _ids(data: Mapping[str, Any], key: str) -> tuple[int, ...]:
    value = data.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(item, bool) or not isinstance(item, int) for item in ids):
        raise BadCheckpoint(f"{key} = {value!r} in the model's config must be one token id, a list of them, or null.")
    return tuple(ids)
