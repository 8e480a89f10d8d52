"""How int8 weights lie in checkpoints: this program's own versioned format, and three that others publish."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

METHOD, VERSION = "octavo", 1  # of config.json's quantization_config


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight ~ codes * scale: int8 codes [out, in] and an fp32 scale [out]."""

    codes: Tensor
    scale: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scale.nbytes

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.codes.device

    def rows(self, index: Tensor) -> QuantizedWeight:
        """The output channels in `index`."""
        return QuantizedWeight(self.codes[index], self.scale[index])

    def columns(self, index: Tensor) -> QuantizedWeight:
        """The input channels in `index`."""
        return QuantizedWeight(self.codes[:, index], self.scale)

    def to(self, device: torch.device) -> QuantizedWeight:
        """The same on `device`."""
        return QuantizedWeight(self.codes.to(device), self.scale.to(device))

    def dequantize(self) -> Tensor:
        """fp32 [out, in]."""
        return self.codes.float() * self.scale[:, None]

    @staticmethod
    def join(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
        """Several weights with one input as one."""
        return QuantizedWeight(torch.cat([part.codes for part in parts]), torch.cat([part.scale for part in parts]))


def as_float(weight: Tensor | QuantizedWeight) -> Tensor:
    """A weight [out, in] as it is, or in fp32 where it has codes."""
    return weight.dequantize() if isinstance(weight, QuantizedWeight) else weight


@dataclass(frozen=True)
class Int8Format:
    """Names of a layout: the scales of `x.weight` are under `x` + `scale`, times `factor`.

    turned: norms and rotations are folded into the weights already (models/turn.py), as version 1 of this program's
    format has them: the residual stream by rotation(hidden_size), values by rotation(head_dim), the input of
    `down_proj` in blocks.
    """

    title: str
    scale: str
    factor: float = 1.0
    extra: str | None = None  # a tensor beside each weight that holds nothing new
    turned: bool = False


OWN = Int8Format("Octavo W8A8", ".weight_scale", turned=True)
COMPRESSED_TENSORS = Int8Format("compressed-tensors W8A8", ".weight_scale")
LLM_INT8 = Int8Format("bitsandbytes LLM.int8", ".SCB", 1 / 127, ".weight_format")
QSERVE = Int8Format("QServe W8A8", ".dequant_scale")


class UnreadableFormat(Exception):
    """A quantised checkpoint of a kind that is not read: names the key, its value and what is read."""

    def __init__(self, key: str, value: object, supported: str) -> None:
        super().__init__(key)
        self.key, self.value, self.supported = key, value, supported


def metadata(source: str, revision: str, calibration: Mapping[str, Any], pattern_hash: str | None) -> dict[str, Any]:
    """The quantization_config of a checkpoint that this program writes."""
    return {
        "quant_method": METHOD,
        "version": VERSION,
        "scheme": "w8a8",
        "weights": "int8, symmetric, a scale an output channel",
        "activations": "int8, symmetric, a scale a token, dynamic",
        "source": source,
        "source_revision": revision,
        "calibration": dict(calibration),
        "head_pattern_sha256": pattern_hash,
    }


def int8_format(section: Any) -> Int8Format:
    """The format that a config.json's quantization_config tells of; raises UnreadableFormat for any other."""
    if not isinstance(section, Mapping):
        raise UnreadableFormat("quantization_config", section, "a set of named values")
    method = section.get("quant_method")
    if method == METHOD:
        _require(section, "version", (VERSION,))
        _require(section, "scheme", ("w8a8",))
        return OWN
    if method == "compressed-tensors":
        _compressed_tensors(section)
        return COMPRESSED_TENSORS
    if method == "bitsandbytes":
        if not section.get("load_in_8bit"):
            raise UnreadableFormat("quantization_config.load_in_8bit", section.get("load_in_8bit"), "true (LLM.int8)")
        return LLM_INT8
    known = f"{METHOD}, compressed-tensors (W8A8), bitsandbytes (LLM.int8), QServe W8A8 per channel"
    raise UnreadableFormat("quantization_config.quant_method", method, known)


def _require(section: Any, key: str, allowed: tuple[object, ...], path: str = "quantization_config") -> None:
    value = section.get(key) if isinstance(section, Mapping) else None
    if value not in allowed:
        raise UnreadableFormat(f"{path}.{key}", value, ", ".join(map(str, allowed)))


def _compressed_tensors(section: Mapping[str, Any]) -> None:
    """Int8 weights a channel and int8 activations a token, chosen at run time; nothing else is read."""
    _require(section, "format", ("int-quantized",))
    groups = section.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise UnreadableFormat("quantization_config.config_groups", groups, "one group")
    (name, group), *_ = groups.items()
    path = f"quantization_config.config_groups.{name}"
    _require(group, "targets", (["Linear"],), path)
    if group.get("output_activations"):
        raise UnreadableFormat(f"{path}.output_activations", group["output_activations"], "null")
    for part, strategy, dynamic in (("weights", "channel", (False, None)), ("input_activations", "token", (True,))):
        inner = group.get(part)
        for key, allowed in (
            ("num_bits", (8,)),
            ("type", ("int",)),
            ("symmetric", (True,)),
            ("strategy", (strategy,)),
            ("dynamic", dynamic),
        ):
            _require(inner, key, allowed, f"{path}.{part}")
    if section.get("kv_cache_scheme"):
        raise UnreadableFormat("quantization_config.kv_cache_scheme", section["kv_cache_scheme"], "null")
    if section.get("sparsity_config"):
        raise UnreadableFormat("quantization_config.sparsity_config", section["sparsity_config"], "none")
