"""From a checkpoint's tensors to a decoder: heads in order, norms and rotations folded in, layers converted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from models.cache.shape import CacheShape
from models.checkpoint import Checkpoint
from models.config import EMBEDDING, HEAD, ModelConfig
from models.decoder import Decoder, Layer
from models.errors import BadCheckpoint, UnsupportedModel
from models.keys import KeyForm
from models.turn import FOLDED, rotate_values, turn_residual
from quant import kv4, llm_int8
from quant.formats import QuantizedWeight, as_float
from quant.llm_int8 import LlmInt8Linear
from quant.w8a8 import DenseLinear, Head, Linear, W8A8Head, W8A8Linear, dense_dtype, int8_head, quantize_weight

_NORM = "model.norm.weight"


Weight = Tensor | QuantizedWeight
Parts = dict[str, Weight]


@dataclass(frozen=True)
class Build:
    """How to convert a checkpoint.

    mask: bool [layers, kv_heads], True for a retrieval head; wide: those of them that keep 8 bits of a 4-bit cache, or
    None for none. `make_linear` turns a weight [out, in] and bias into a layer, `make_head` the output head; `place`
    puts unquantised tensors in their dtype and device. `rotate_values` folds the rotation of the heads' values into
    their projections; `rotate_residual` turns the whole residual stream, which takes the outliers out of what W8A8
    layers read (QuaRot, Ashkboos et al., 2024). `turned`: the checkpoint has both folded in already. `int8_embedding`
    rounds the embedding, and the head with it; one that is in int8 already stays so. `keys`: the form of rotated
    keys, or None to keep them as they are.
    """

    mask: np.ndarray
    make_linear: Callable[[Weight, Tensor | None], Linear]
    make_head: Callable[[Tensor], Head]
    place: Callable[[Tensor], Tensor]
    rotate_values: bool
    rotate_residual: bool
    device: torch.device
    turned: bool = False
    wide: np.ndarray | None = None
    int8_embedding: bool = False
    keys: KeyForm | None = None


def build_decoder(
    config: ModelConfig,
    tensors: Iterable[tuple[str, Weight]],
    how: Build,
    progress: Callable[[float], None] = lambda done: None,
) -> Decoder:
    """A decoder from named tensors; one layer at most waits unconverted. Raises BadCheckpoint."""
    shapes = config.tensor_shapes()
    parts: list[Parts] = [{} for _ in range(config.num_layers)]
    wanted = [layer_names(config, i, how.turned) for i in range(len(parts))]
    layers: list[Layer | None] = [None] * config.num_layers
    top: dict[str, Weight] = {}
    for count, (name, tensor) in enumerate(tensors):
        if name.startswith("model.layers."):
            index, rest = name.removeprefix("model.layers.").split(".", 1)
            i = int(index)
            parts[i][rest] = tensor.to(how.device)
            if parts[i].keys() == wanted[i]:
                layers[i] = layer_from(config, how, i, parts[i])
                parts[i] = {}
        else:
            top[name] = tensor
        progress((count + 1) / len(shapes))
    missing = {EMBEDDING, _NORM} - top.keys() | {f"layer {i}" for i, layer in enumerate(layers) if layer is None}
    if missing:
        raise BadCheckpoint(f"The checkpoint lacks tensors of: {', '.join(sorted(missing))}.")
    embedding, head = _ends(how, top[EMBEDDING], top.get(HEAD))
    norm = top[_NORM]
    assert isinstance(norm, Tensor)
    return Decoder(
        config,
        embedding,
        [layer for layer in layers if layer is not None],
        norm.to(how.device, torch.float32),
        head,
        kv4.rotation(config.hidden_size).to(how.device) if how.rotate_residual or how.turned else None,
    )


def _ends(how: Build, embedding: Weight, head: Weight | None) -> tuple[Weight, Head]:
    """Embedding and output head; `head` is None where it is the embedding's weight."""
    if not (how.int8_embedding or isinstance(embedding, QuantizedWeight)):
        placed = how.place(embedding)
        return placed, how.make_head(placed if head is None else how.place(as_float(head)))
    rounded = embedding if isinstance(embedding, QuantizedWeight) else QuantizedWeight(*quantize_weight(embedding))
    rounded = rounded.to(how.device)
    return rounded, W8A8Linear.from_float(rounded if head is None else head.to(how.device))


def layer_names(config: ModelConfig, index: int, turned: bool) -> set[str]:
    """Names of a layer's tensors behind "model.layers.N."; a turned one has no norms left."""
    prefix = f"model.layers.{index}."
    names = {name.removeprefix(prefix) for name in config.tensor_shapes() if name.startswith(prefix)}
    return names - set(FOLDED) if turned else names


def load_decoder(
    checkpoint: Checkpoint,
    mask: np.ndarray,
    weights: str,
    shape: CacheShape,
    device: torch.device,
    progress: Callable[[float], None] = lambda done: None,
    wide: np.ndarray | None = None,
    int8_embedding: bool = False,
    keys: KeyForm | None = None,
) -> Decoder:
    """The decoder of a checkpoint with "w8a8", "bf16", "llm.int8" or (for comparisons) "fp32" weights on `device`.

    A checkpoint that holds int8 weights is multiplied out for all but "w8a8". keys: see `Build`.
    """

    form = checkpoint.int8_format
    if weights == "llm.int8" and (reason := llm_int8.missing()):
        raise UnsupportedModel("weights", weights, f"w8a8 and bf16, since {reason}")

    def linear(weight: Weight, bias: Tensor | None) -> Linear:
        if weights == "llm.int8":
            return LlmInt8Linear(weight, bias)
        if weights == "w8a8" and (form is None or isinstance(weight, QuantizedWeight)):
            return W8A8Linear.from_float(weight, bias)
        return DenseLinear(as_float(weight).to(torch.float32 if weights == "fp32" else torch.bfloat16), bias)

    config = checkpoint.config
    how = Build(
        mask,
        linear,
        W8A8Head if weights == "w8a8" and int8_head(device) else DenseLinear,
        lambda tensor: tensor.to(device=device, dtype=dense_dtype(device)),
        # Int8 weights stay as they were published; rotated values spread the outliers of `output`'s input too.
        rotate_values=form is None and (shape.rotated or weights == "w8a8"),
        rotate_residual=form is None and weights == "w8a8",
        device=device,
        turned=form is not None and form.turned,
        wide=wide,
        int8_embedding=int8_embedding,
        keys=keys if shape.rotated else None,
    )
    return build_decoder(config, checkpoint.tensors(), how, progress)


def layer_from(config: ModelConfig, how: Build, index: int, parts: Parts) -> Layer:
    """A layer of its tensors by their names behind "model.layers.N.", converted."""
    if how.rotate_values or how.rotate_residual:
        plain = {name: part for name, part in parts.items() if isinstance(part, Tensor)}
        if how.rotate_values:
            rotate_values(config, plain)
        if how.rotate_residual:
            turn_residual(config, plain)
        parts = {**plain}
    wide = None if how.wide is None else how.wide[index]
    keys = None if how.keys is None else how.keys.layer(index)
    return make_layer(config, parts, how.mask[index], how.make_linear, wide, keys)


def make_layer(
    config: ModelConfig,
    parts: Parts,
    mask: np.ndarray,
    make_linear: Callable[[Weight, Tensor | None], Linear],
    wide: np.ndarray | None = None,
    keys: KeyForm | None = None,
) -> Layer:
    """A layer of its tensors by their names behind "model.layers.N."; the rest as in `Build`, of this layer."""
    d, group = config.head_dim, config.num_heads // config.num_kv_heads
    # Retrieval heads first, and of them those with 8 bits.
    order = torch.from_numpy(np.argsort(~mask if wide is None else 2 - mask.astype(int) - wide, kind="stable"))
    pairs = torch.arange(d).view(2, d // 2).T.flatten()  # channels i and i + d / 2 become neighbours
    kv_rows = torch.arange(config.num_kv_heads * d).view(-1, 1, d)[order]
    q_rows = torch.arange(config.num_heads * d).view(-1, group, d)[order]

    def get(name: str, rows: Tensor | None = None) -> tuple[Weight, Tensor | None]:
        weight, bias = parts[f"{name}.weight"], parts.get(f"{name}.bias")
        assert not isinstance(bias, QuantizedWeight)
        if rows is None:
            return weight, bias
        index = rows.flatten().to(_device(weight))
        taken = weight.rows(index) if isinstance(weight, QuantizedWeight) else weight[index]
        return taken, None if bias is None else bias[index]

    def norm(name: str, index: Tensor | None = None) -> Tensor | None:
        weight = parts.get(f"{name}.weight")
        assert not isinstance(weight, QuantizedWeight)
        return None if weight is None else (weight if index is None else weight[index.to(weight.device)]).float()

    output, output_bias = get("self_attn.o_proj")
    columns = q_rows.flatten().to(_device(output))
    output = output.columns(columns) if isinstance(output, QuantizedWeight) else output[:, columns]
    q, k = get("self_attn.q_proj", q_rows[:, :, pairs]), get("self_attn.k_proj", kv_rows[:, :, pairs])
    q_norm, k_norm = norm("self_attn.q_norm", pairs), norm("self_attn.k_norm", pairs)
    centres = None
    if keys is not None:
        device = _device(output)
        centres = keys.centres[order[: int(mask.sum())]].to(device).contiguous()
        scales = keys.scales[order].repeat_interleave(2, -1).to(device)
        if q_norm is None or k_norm is None:
            q, k = _times(*q, scales.repeat_interleave(group, 0).flatten()), _times(*k, 1 / scales.flatten())
        else:  # of one length whatever their weight: the norms' weights, which all heads share, come behind
            q_norm, k_norm = q_norm * scales[0], k_norm / scales[0]
    return Layer(
        make_linear(*_join(q, k, get("self_attn.v_proj", kv_rows))),
        make_linear(output, output_bias),
        make_linear(*_join(get("mlp.gate_proj"), get("mlp.up_proj"))),
        make_linear(*get("mlp.down_proj")),
        norm("input_layernorm"),
        norm("post_attention_layernorm"),
        q_norm,
        k_norm,
        int(mask.sum()),
        centres,
    )


def _device(weight: Weight) -> torch.device:
    return weight.codes.device if isinstance(weight, QuantizedWeight) else weight.device


def _times(weight: Weight, bias: Tensor | None, factor: Tensor) -> tuple[Weight, Tensor | None]:
    """Output channels times factor [out]."""
    if isinstance(weight, QuantizedWeight):
        return QuantizedWeight(weight.codes, weight.scale * factor), None if bias is None else bias * factor
    return weight.float() * factor[:, None], None if bias is None else bias * factor


def _join(*parts: tuple[Weight, Tensor | None]) -> tuple[Weight, Tensor | None]:
    """Several layers with one input as one; all of them have a bias or none has."""
    weights = [weight for weight, _ in parts]
    biases = [bias for _, bias in parts if bias is not None]
    bias = torch.cat(biases) if biases else None
    quantised = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    if not quantised:
        return torch.cat([weight for weight in weights if isinstance(weight, Tensor)]), bias
    if len(quantised) != len(weights):
        raise UnsupportedModel("weights", "some of q, k, v or of gate, up in int8", "all of them in int8, or none")
    return QuantizedWeight.join(quantised), bias
