"""Checkpoints: safetensors directories and GGUF files, opened with every tensor checked, read one tensor at a time."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from models.config import EMBEDDING, HEAD, LEARNED_SINKS, ModelConfig, refuse_sink_tensors
from models.errors import BadCheckpoint, UnsupportedModel
from models.files import read_json
from models.gguf import GgufFile, read_gguf
from models.rope import inverse_frequencies
from models.turn import FOLDED
from quant.formats import QSERVE, Int8Format, QuantizedWeight, UnreadableFormat, as_float, int8_format

_INDEX = "model.safetensors.index.json"
_DTYPES = ("BF16", "F16", "F32")
# Old Llama checkpoints carry their rotary frequencies, which the config already says.
_REDUNDANT = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


class Checkpoint(ABC):
    """A model on disk. Names are Hugging Face's; q and k rows are in its rotate-half order, whatever the file's."""

    def __init__(self, path: Path, config: ModelConfig, source: str, int8_format: Int8Format | None = None) -> None:
        self.path = path
        self.config = config
        self.source = source
        self.int8_format = int8_format

    def load(self, name: str) -> torch.Tensor | QuantizedWeight:
        """One tensor on the CPU in bf16, fp16 or fp32, or int8 with its scales. Do not write to it: it may be the file.

        Only a checkpoint with an `int8_format` has int8 weights. Raises BadCheckpoint for numbers that are none.
        """
        found = self._load(name)
        # One that is not finite makes the sum so, for which nothing as large as the tensor is needed.
        if isinstance(found, torch.Tensor) and not found.sum(dtype=torch.float32).isfinite():
            raise BadCheckpoint(
                f"{self.path.name}: {name} holds NaN or infinity. Download it again, or take another copy."
            )
        return found

    @abstractmethod
    def _load(self, name: str) -> torch.Tensor | QuantizedWeight:
        """As `load`, unchecked."""

    @property
    def int8_embedding(self) -> bool:
        """Whether the embedding is in int8, as it then stays."""
        return False

    def load_float(self, name: str) -> torch.Tensor:
        """As `load`, int8 weights multiplied out to fp32."""
        return as_float(self.load(name))

    def names(self) -> list[str]:
        """Every tensor's name, in the order of the forward pass; no lm_head when it is tied to the embedding."""
        turned = self.int8_format is not None and self.int8_format.turned
        return [name for name in self.config.tensor_shapes() if not (turned and name.endswith(FOLDED))]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor | QuantizedWeight]]:
        """Tensor by tensor; drop each before taking the next and the model is never in memory as a whole."""
        for name in self.names():
            yield name, self.load(name)


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a directory (config.json, *.safetensors) or a *.gguf file; reads headers only.

    Raises BadCheckpoint (missing, damaged, mis-shaped) or UnsupportedModel (names what is not supported).
    """
    if path.is_dir():
        return _SafetensorsCheckpoint(path)
    if not path.exists():
        raise BadCheckpoint(f"There is no model at {path}. Give a directory of safetensors or a .gguf file.")
    if path.suffix.lower() != ".gguf":
        raise UnsupportedModel("model file", path.name, "a .gguf file, or a directory of safetensors")
    return _GgufCheckpoint(path)


class _SafetensorsCheckpoint(Checkpoint):
    def __init__(self, path: Path) -> None:
        data = _read_json(path / "config.json")
        if (path / "generation_config.json").exists():
            # Chat models often name their end-of-turn token only here.
            ends = [
                _as_list(source.get("eos_token_id")) for source in (data, _read_json(path / "generation_config.json"))
            ]
            data = {**data, "eos_token_id": list(dict.fromkeys(ends[0] + ends[1]))}
        found: dict[str, _Stored] = {}
        for file in _shard_files(path):
            for name, stored in _read_shard(file):
                if name in found:
                    raise BadCheckpoint(f"{path} holds tensor {name} in two files. Keep one set of safetensors.")
                found[name] = stored
        form = _int8_format(data, found)
        self._stored = found
        # What the config says of quantisation is answered for here; the model itself is the same.
        config = ModelConfig.from_hf({key: value for key, value in data.items() if key != "quantization_config"})
        dtypes = Counter(stored.dtype for stored in found.values())
        named = form.title if form else "/".join(dtypes)
        super().__init__(path, config, f"{path.name} (safetensors, {named})", form)
        shapes = _weights_of(path, found, form)
        if config.tied_embeddings and shapes.get(HEAD) == shapes.get(EMBEDDING, ()):
            # Stored as well: a plain copy is left out; a head of its own is used, as transformers does.
            head, embedding = self._get(HEAD), self._get(EMBEDDING)
            if head.dtype == embedding.dtype and torch.equal(head, embedding):
                del shapes[HEAD]
            else:
                self.config = replace(config, tied_embeddings=False)
        shapes = {name: shape for name, shape in shapes.items() if not _REDUNDANT.match(name)}
        _check_tensors(path, {name: self.config.tensor_shapes()[name] for name in self.names()}, shapes)

    @property
    def int8_embedding(self) -> bool:
        return self.int8_format is not None and self._stored[EMBEDDING].dtype == "I8"

    def _load(self, name: str) -> torch.Tensor | QuantizedWeight:
        form = self.int8_format
        if form is None or self._stored[name].dtype != "I8":
            return self._get(name)
        named = name.removesuffix(".weight") + form.scale
        scale = self._get(named).float().flatten() * form.factor
        # Others write 0 for a row of zeros; quantising here gives such a row a scale too.
        if not bool((scale.isfinite() & (scale > 0 if form.turned else scale >= 0)).all()):
            least = "above 0" if form.turned else "0 or more"
            raise BadCheckpoint(
                f"{self.path.name}: {named} has a scale that is not a finite number {least}. Download it again, or "
                "quantize the model anew."
            )
        return QuantizedWeight(self._get(name), scale)

    def _get(self, name: str) -> torch.Tensor:
        # Opened anew for each tensor: what an open file has read stays in memory until it is closed.
        with safe_open(self._stored[name].file, framework="pt") as shard:
            tensor: torch.Tensor = shard.get_tensor(name)
        return tensor


@dataclass(frozen=True)
class _Stored:
    """Where a tensor lies, and what it is."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def _int8_format(data: Mapping[str, Any], found: Mapping[str, _Stored]) -> Int8Format | None:
    """The format of int8 weights that the config names, or that names of tensors tell of."""
    section = data.get("quantization_config")
    if section:
        try:
            return int8_format(section)
        except UnreadableFormat as error:
            raise UnsupportedModel(error.key, error.value, error.supported) from error
    return QSERVE if any(name.endswith(QSERVE.scale) for name in found) else None


def _weights_of(path: Path, found: Mapping[str, _Stored], form: Int8Format | None) -> dict[str, tuple[int, ...]]:
    """Shapes without the scales of int8 weights, which must be complete."""
    left = dict(found)
    for name, stored in found.items():
        if stored.dtype == "I8" and form is not None and name.endswith(".weight"):
            base = name.removesuffix(".weight")
            scale = left.pop(base + form.scale, None)
            rows = stored.shape[0]
            if scale is None or scale.shape not in ((rows,), (rows, 1)) or scale.dtype not in _DTYPES:
                told = "missing" if scale is None else f"{scale.dtype} {scale.shape}"
                raise BadCheckpoint(f"{path.name}: {base}{form.scale} is {told}; {name} needs {rows} scales.")
            if form.extra is not None:
                left.pop(base + form.extra, None)
        elif stored.dtype not in _DTYPES and not (form is not None and form.extra and name.endswith(form.extra)):
            raise UnsupportedModel(f"dtype of {name}", stored.dtype, ", ".join(_DTYPES))
    return {name: stored.shape for name, stored in left.items()}


def _shard_files(path: Path) -> list[Path]:
    if (path / _INDEX).exists():
        weight_map = _read_json(path / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise BadCheckpoint(f"{_INDEX} has no weight_map.")
        files = [path / str(name) for name in sorted(set(weight_map.values()))]
    elif (path / "model.safetensors").exists():
        files = [path / "model.safetensors"]
    else:
        files = sorted(path.glob("*.safetensors"))
    if not files:
        raise BadCheckpoint(f"{path} has no *.safetensors. Other weight formats must be converted first.")
    for file in files:
        if file.parent != path or not file.is_file():
            raise BadCheckpoint(f"{_INDEX} names {file.name}, which is not in {path}. Download the missing file.")
    return files


def _read_shard(file: Path) -> Iterator[tuple[str, _Stored]]:
    try:
        with safe_open(file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 - not a mapping
                view = shard.get_slice(name)
                yield name, _Stored(file, tuple(view.get_shape()), str(view.get_dtype()))
    except (SafetensorError, OSError) as error:
        raise BadCheckpoint(f"{file.name} is damaged or cut short: {error}. Download it again.") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except FileNotFoundError:
        raise BadCheckpoint(f"{path.parent} has no {path.name}: it is not a complete checkpoint.") from None
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"{path} cannot be read: {error}.") from error


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _check_tensors(path: Path, expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> None:
    refuse_sink_tensors(found)
    for label, names in (("lacks", expected.keys() - found), ("has unknown", found.keys() - expected)):
        if names:
            raise BadCheckpoint(f"{path.name} {label} tensors: {_some(names)}. It does not match its config.")
    for name, shape in expected.items():
        if found[name] != shape:
            raise BadCheckpoint(f"{name} in {path.name} has shape {found[name]}; its config asks for {shape}.")


def _some(names: Collection[str]) -> str:
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(sorted(names)[:3]) + rest


_GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
    "expert_count": "num_local_experts",
}
_GGUF_YARN = {
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
_GGUF_OTHER = {  # read below, or of no effect here
    "attention.value_length",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scale_linear",
    "rope.scaling.finetuned",
    "tensor_data_layout",
}
_GGUF_ROPE_FACTORS = "rope_freqs.weight"


class _GgufCheckpoint(Checkpoint):
    def __init__(self, path: Path) -> None:
        self._file = read_gguf(path)
        config = gguf_config(self._file)
        self._own_names = {_hf_name(name): name for name in self._file.tensors if name != _GGUF_ROPE_FACTORS}
        sizes: Counter[str] = Counter()
        for info in self._file.tensors.values():
            sizes[info.type_name] += info.nbytes
        super().__init__(path, config, f"{path.name} (GGUF, {sizes.most_common(1)[0][0]})")
        shapes = {name: self._file.tensors[own].shape for name, own in self._own_names.items()}
        _check_tensors(path, config.tensor_shapes(), shapes)
        # Converters to GGUF reorder q and k of these families from halves to adjacent pairs, and leave Qwen's alone.
        self._paired = self._file.metadata["general.architecture"] in ("llama", "mistral")

    def _load(self, name: str) -> torch.Tensor:
        tensor = self._file.load(self._own_names[name])
        if self._paired and ("q_proj" in name or "k_proj" in name):
            pairs = tensor.unflatten(0, (-1, self.config.head_dim // 2, 2))
            tensor = pairs.transpose(1, 2).flatten(0, 2).contiguous()
        return tensor


def _hf_name(name: str) -> str:
    """A GGUF tensor's Hugging Face name; an unknown one stays as it is and is then refused as unknown."""
    block = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if not block or block[2] not in _GGUF_NAMES:
        return name
    prefix = "" if block[1] is None else f"model.layers.{block[1]}."
    return f"{prefix}{_GGUF_NAMES[block[2]]}.{block[3]}"


def gguf_config(file: GgufFile) -> ModelConfig:
    """The config that a GGUF file's metadata stands for, held to the same rules as a config.json."""
    metadata, tensors = file.metadata, file.tensors
    family = metadata.get("general.architecture")
    if family in ("gpt-oss", "gpt_oss"):
        raise UnsupportedModel("general.architecture", family, LEARNED_SINKS)
    if family not in ("llama", "mistral", "qwen2", "qwen3"):
        raise UnsupportedModel("general.architecture", family, "llama, mistral, qwen2, qwen3")
    own = {key.removeprefix(f"{family}."): metadata[key] for key in metadata if key.startswith(f"{family}.")}
    for key, value in own.items():
        if value and key not in {*_GGUF_KEYS, *_GGUF_YARN, *_GGUF_OTHER}:
            raise UnsupportedModel(f"{family}.{key}", value, f"a file without {key}")
    for key in ("embedding_length", "attention.head_count", "attention.key_length", "rope.dimension_count"):
        if key in own and (not isinstance(own[key], int) or own[key] < 1):
            raise BadCheckpoint(f"{family}.{key} = {own[key]!r} must be a whole number above 0.")
    data: dict[str, Any] = {"model_type": family, "sliding_window": None}
    data |= {name: own[key] for key, name in _GGUF_KEYS.items() if key in own}
    data["use_sliding_window"] = bool(data["sliding_window"])
    data.setdefault("vocab_size", metadata.count("tokenizer.ggml.tokens"))
    if "head_dim" not in data and {"hidden_size", "num_attention_heads"} <= data.keys():
        data["head_dim"] = data["hidden_size"] // data["num_attention_heads"]
    if own.get("attention.value_length", data.get("head_dim")) != data.get("head_dim"):
        raise UnsupportedModel("attention.value_length", own["attention.value_length"], "the same as key_length")
    if "rope.dimension_count" in own and data.get("head_dim"):
        data["partial_rotary_factor"] = own["rope.dimension_count"] / data["head_dim"]
    data["rope_scaling"] = _gguf_rope(own)
    data["tie_word_embeddings"] = "output.weight" not in tensors
    data["attention_bias"] = "blk.0.attn_q.bias" in tensors
    data["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors
    ids = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    data["eos_token_id"] = list(dict.fromkeys(item for item in ids if item is not None))
    data["bos_token_id"] = metadata.get("tokenizer.ggml.bos_token_id")
    config = ModelConfig.from_hf(data)
    if _GGUF_ROPE_FACTORS in tensors:
        config = _with_rope_factors(config, data, file.load(_GGUF_ROPE_FACTORS).double())
    return config


def _gguf_rope(own: Mapping[str, Any]) -> dict[str, Any] | None:
    factor = own.get("rope.scaling.factor") or own.get("rope.scale_linear") or 1.0
    kind = own.get("rope.scaling.type") or "linear"
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    scaling = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling |= {name: own[key] for key, name in _GGUF_YARN.items() if key in own}
    return scaling


def _with_rope_factors(config: ModelConfig, data: dict[str, Any], factors: torch.Tensor) -> ModelConfig:
    """Llama 3.1's scaling is stored as a divisor for each pair: find the parameters, and make sure that they fit."""
    factor = float(factors.max())
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    supported = "the scaling of Llama 3.1 over 8,192 positions"
    if config.rope.kind != "default" or factors.shape != (config.head_dim // 2,) or not factor >= 1:
        raise UnsupportedModel(_GGUF_ROPE_FACTORS, tuple(factors.shape), supported)
    scaled = ModelConfig.from_hf({**data, "rope_scaling": scaling})
    plain, found = (inverse_frequencies(each.rope, each.head_dim) for each in (config, scaled))
    if not torch.allclose(plain / found, factors, rtol=1e-3):
        raise UnsupportedModel(_GGUF_ROPE_FACTORS, "other divisors", supported)
    return scaled
