"""Int8 checkpoints in the layouts that others publish: their codes are used as they are; others are refused by name."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from models.build import load_decoder
from models.cache.duo import DuoCache
from models.cache.pool import BlockPool
from models.cache.shape import CacheShape
from models.checkpoint import open_checkpoint
from models.errors import BadCheckpoint, UnsupportedModel
from models.quantize import quantize_checkpoint
from quant import formats
from quant.formats import QuantizedWeight
from quant.w8a8 import quantize_weight
from tests.models.tiny import HF, SIZES, parameters, tiny_model

CPU = torch.device("cpu")
WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
ACTIVATIONS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": ACTIVATIONS}
        | {"output_activations": None}
    },
    "kv_cache_scheme": None,
    "quantization_status": "compressed",
}
LLM_INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False, "llm_int8_threshold": 6.0}
SECTIONS = {"qserve": None, "compressed": COMPRESSED, "llm_int8": LLM_INT8}


def write(folder, kind, name="llama", section=None):
    """A checkpoint in a layout, and the fp32 weights that it stands for."""
    folder.mkdir()
    state, meant = {}, {}
    for key, tensor in parameters(tiny_model(name)).items():
        tensor = tensor * (0.1 if tensor.dim() == 2 else 1)
        meant[key] = tensor.half().float()
        if not key.endswith("_proj.weight"):
            state[key] = tensor.half()
            continue
        base = key.removesuffix(".weight")
        codes, scale = quantize_weight(tensor)
        if kind == "qserve":
            scale = scale.half()
            state |= {key: codes, f"{base}.dequant_scale": scale}
        elif kind == "compressed":
            scale = scale.bfloat16()
            state |= {key: codes, f"{base}.weight_scale": scale[:, None]}
        else:
            state |= {
                key: codes,
                f"{base}.SCB": scale * 127,
                f"{base}.weight_format": torch.tensor(0, dtype=torch.uint8),
            }
        meant[key] = codes.float() * scale.float()[:, None]
    save_file({key: tensor.contiguous() for key, tensor in state.items()}, folder / "model.safetensors")
    config = HF[name].to_dict()
    section = SECTIONS[kind] if section is None else section
    (folder / "config.json").write_text(json.dumps(config | ({"quantization_config": section} if section else {})))
    return meant


def logits(path, ids, weights="w8a8", kv="fp32", state=None):
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    mask = np.array([[True, False], [False, True]])
    shape = CacheShape.for_model(config, mask, kv, 200, 200, CPU)
    decoder = load_decoder(checkpoint, mask, weights, shape, CPU)
    return decoder.logits(decoder.forward(ids, DuoCache(BlockPool(shape, 2, CPU))))


@pytest.mark.parametrize("kind", SECTIONS)
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_it_answers_as_the_weights_that_it_stands_for(tmp_path, kind, name):
    meant = write(tmp_path / kind, kind, name)
    model = tiny_model(name)
    model.load_state_dict(meant, strict=False)
    model.tie_weights()
    ids = torch.randint(0, SIZES["vocab_size"], (130,))
    with torch.no_grad():
        want = model(ids[None]).logits[0]
    got = logits(tmp_path / kind, ids)
    assert (got - want).norm() < 0.05 * want.norm()  # activations have 8 bits now
    assert (logits(tmp_path / kind, ids, kv="kv8") - want).norm() < 0.06 * want.norm()


@pytest.mark.parametrize("kind", SECTIONS)
def test_codes_and_scales_are_read_as_they_were_written(tmp_path, kind):
    meant = write(tmp_path / kind, kind)
    checkpoint = open_checkpoint(tmp_path / kind)
    name = "model.layers.1.self_attn.k_proj.weight"
    weight = checkpoint.load(name)
    assert isinstance(weight, QuantizedWeight) and weight.codes.dtype == torch.int8
    assert torch.equal(weight.codes, load_file(tmp_path / kind / "model.safetensors")[name])
    torch.testing.assert_close(checkpoint.load_float(name), meant[name], rtol=1e-6, atol=0)
    assert checkpoint.int8_format.title in checkpoint.source
    assert checkpoint.load("model.norm.weight").dtype == torch.float16


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"quant_method": "awq"}, "quant_method = 'awq'"),
        ({"quant_method": "gptq", "bits": 8}, "quant_method = 'gptq'"),
        ({"quant_method": "fp8"}, "quant_method = 'fp8'"),
        ({**COMPRESSED, "format": "pack-quantized"}, "format = 'pack-quantized'"),
        ({**COMPRESSED, "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (
            {**COMPRESSED, "config_groups": {"g": {"targets": ["Linear"], "weights": {**WEIGHTS, "num_bits": 4}}}},
            "num_bits = 4",
        ),
        (
            {
                **COMPRESSED,
                "config_groups": {"g": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": None}},
            },
            "input_activations.num_bits = None",
        ),
        (
            COMPRESSED
            | {
                "config_groups": {
                    "g": {"targets": ["Linear"], "weights": WEIGHTS}
                    | {"input_activations": {**ACTIVATIONS, "dynamic": False, "strategy": "tensor"}}
                }
            },
            "input_activations.strategy = 'tensor'",
        ),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "load_in_8bit = None"),
        ({"quant_method": "octavo", "version": 99, "scheme": "w8a8"}, "version = 99"),
        ("w8a8", "quantization_config = 'w8a8'"),
    ],
)
def test_what_is_not_read_is_refused_by_name(tmp_path, change, named):
    write(tmp_path / "x", "compressed", section=change)
    with pytest.raises(UnsupportedModel) as caught:
        open_checkpoint(tmp_path / "x")
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("change", "error", "told"),
    [
        (
            lambda s: s.pop("model.layers.0.mlp.up_proj.dequant_scale"),
            BadCheckpoint,
            "up_proj.dequant_scale is missing",
        ),
        (
            lambda s: s.update({"model.layers.0.mlp.up_proj.dequant_scale": torch.ones(3)}),
            BadCheckpoint,
            r"needs 96 scales",
        ),
        (
            lambda s: s.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}),
            BadCheckpoint,
            "norm.dequant_scale",
        ),
        (
            lambda s: s.update({"model.layers.0.mlp.up_proj.weight": torch.ones(96, 64, dtype=torch.uint8)}),
            UnsupportedModel,
            "dtype of model.layers.0.mlp.up_proj.weight",
        ),
        (
            lambda s: s.update({"model.layers.0.mlp.up_proj.zeros": torch.ones(96)}),
            BadCheckpoint,
            "has unknown tensors: model.layers.0.mlp.up_proj.zeros",
        ),
    ],
)
def test_damaged_ones_are_told(tmp_path, change, error, told):
    write(tmp_path / "x", "qserve")
    file = tmp_path / "x" / "model.safetensors"
    state = load_file(file)
    change(state)
    save_file(state, file)
    with pytest.raises(error, match=told):
        open_checkpoint(tmp_path / "x")


def test_int8_without_a_format_is_refused(tmp_path):
    write(tmp_path / "x", "llm_int8")
    data = json.loads((tmp_path / "x" / "config.json").read_text())
    del data["quantization_config"]
    (tmp_path / "x" / "config.json").write_text(json.dumps(data))
    with pytest.raises(UnsupportedModel, match=r"dtype of .* = 'I8'"):
        open_checkpoint(tmp_path / "x")


def test_layers_left_unquantised_are_served_unquantised(tmp_path):
    meant = write(tmp_path / "x", "compressed")
    file = tmp_path / "x" / "model.safetensors"
    state = load_file(file)
    for name in ("gate_proj", "up_proj"):
        key = f"model.layers.0.mlp.{name}"
        state[f"{key}.weight"] = meant[f"{key}.weight"].half()
        del state[f"{key}.weight_scale"]
    save_file(state, file)
    ids = torch.randint(0, SIZES["vocab_size"], (60,))
    assert logits(tmp_path / "x", ids).isfinite().all()
    del state["model.layers.0.self_attn.k_proj.weight_scale"]
    state["model.layers.0.self_attn.k_proj.weight"] = meant["model.layers.0.self_attn.k_proj.weight"].half()
    save_file(state, file)
    with pytest.raises(UnsupportedModel, match="some of q, k, v"):
        logits(tmp_path / "x", ids)


@pytest.mark.parametrize(
    ("kind", "scale", "refused"),
    [
        *((kind, scale, True) for kind in (*SECTIONS, "octavo") for scale in (-1.0, float("nan"), float("inf"))),
        *((kind, 0.0, False) for kind in SECTIONS),  # of a row of zeros
        ("octavo", 0.0, True),  # which `quantize` gives a scale too
    ],
)
def test_scales_that_no_weight_has_are_refused_by_name(tmp_path, kind, scale, refused):
    if kind == "octavo":
        tiny = tiny_model("llama")
        tiny.model.layers[0].mlp.gate_proj.weight.data[3] = 0
        tiny.half().save_pretrained(tmp_path / "float")
        quantize_checkpoint(
            open_checkpoint(tmp_path / "float"), tmp_path / "model", [], formats.metadata("a/b", "abc", {}, None), CPU
        )
    else:
        write(tmp_path / "model", kind)
    name = "model.layers.0.mlp.gate_proj.weight"
    assert isinstance(open_checkpoint(tmp_path / "model").load(name), QuantizedWeight)
    for file in (tmp_path / "model").glob("*.safetensors"):
        tensors = load_file(file)
        for key in tensors:
            if (
                key.startswith(name.removesuffix("weight"))
                and key.rpartition(".")[2] != "weight"
                and tensors[key].dim()
            ):
                tensors[key].view(-1)[1] = scale
        save_file(tensors, file)
    checkpoint = open_checkpoint(tmp_path / "model")
    if not refused:
        checkpoint.load(name)
        return
    with pytest.raises(BadCheckpoint, match=r"layers\.0\.mlp\.gate_proj\.\w+ has a scale that is not"):
        checkpoint.load(name)
