"""Safetensors directories: what transformers saved comes back exactly; damage is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from models.checkpoint import open_checkpoint
from models.errors import BadCheckpoint, UnsupportedModel
from tests.models.tiny import HF, State, parameters, tiny_model


def assert_holds(path: Path, expected: State) -> None:
    checkpoint = open_checkpoint(path)
    assert sorted(checkpoint.names()) == sorted(expected)
    for name, tensor in checkpoint.tensors():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name]), name


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """An untied Llama in one file."""
    tiny_model("llama").save_pretrained(tmp_path)
    return tmp_path


def rewrite(folder: Path, changes: State, drop: tuple[str, ...] = ()) -> None:
    tensors = {**load_file(folder / "model.safetensors"), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if name not in drop}, folder / "model.safetensors")


@pytest.mark.parametrize("shard", ["1GB", "20KB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", HF)
def test_safetensors(name: str, dtype: torch.dtype, shard: str, tmp_path: Path) -> None:
    model = tiny_model(name, dtype)
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "20KB")
    assert_holds(tmp_path, parameters(model))
    assert "safetensors" in open_checkpoint(tmp_path).source


def test_shards_without_an_index(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    (tmp_path / "model.safetensors.index.json").unlink()
    assert_holds(tmp_path, parameters(model))


def test_a_stored_copy_of_the_tied_head_is_left_out(tmp_path: Path) -> None:
    model = tiny_model("llama-tied")
    model.save_pretrained(tmp_path)
    rewrite(tmp_path, {"lm_head.weight": model.lm_head.weight.detach().clone()})
    assert_holds(tmp_path, parameters(model))


def test_a_head_of_its_own_is_used_although_the_config_ties_it(tmp_path: Path) -> None:
    model = tiny_model("llama-tied")
    model.save_pretrained(tmp_path)
    head = torch.randn(96, 64)
    rewrite(tmp_path, {"lm_head.weight": head})
    assert not open_checkpoint(tmp_path).config.tied_embeddings
    assert_holds(tmp_path, {**parameters(model), "lm_head.weight": head})
    # transformers decides the same
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path).lm_head.weight, head)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_none_is_refused_with_its_tensor(dtype: torch.dtype, number: float, tmp_path: Path) -> None:
    tiny_model("llama", dtype).save_pretrained(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    weight = load_file(tmp_path / "model.safetensors")[name]
    weight[3, 5] = number
    rewrite(tmp_path, {name: weight})
    checkpoint = open_checkpoint(tmp_path)
    for read in (checkpoint.load, checkpoint.load_float):
        with pytest.raises(BadCheckpoint, match=f"{name} holds NaN or infinity"):
            read(name)
    assert checkpoint.load("model.layers.0.mlp.up_proj.weight") is not None


def test_old_rotary_buffers_are_redundant(saved: Path) -> None:
    rewrite(saved, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    assert "inv_freq" not in " ".join(open_checkpoint(saved).names())


def test_end_tokens_of_the_generation_config_count(saved: Path) -> None:
    (saved / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    assert open_checkpoint(saved).config.eos_ids == (2, 9)


def damage_missing(folder: Path) -> None:
    rewrite(folder, {}, ("model.layers.1.mlp.up_proj.weight", "model.norm.weight"))


def damage_extra(folder: Path) -> None:
    rewrite(folder, {"model.layers.0.self_attn.q_norm.weight": torch.ones(16)})


def damage_shape(folder: Path) -> None:
    rewrite(folder, {"model.layers.1.self_attn.k_proj.weight": torch.ones(64, 64)})


def damage_cut(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])


def damage_empty(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def damage_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def damage_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def damage_bad_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def damage_config_is_a_list(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


def damage_index(folder: Path) -> None:
    weight_map = {"model.norm.weight": "model-00001-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def damage_index_elsewhere(folder: Path) -> None:
    weight_map = {"model.norm.weight": "../model.safetensors"}
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def damage_twice(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    save_file({"model.norm.weight": torch.ones(64)}, folder / "b.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_missing, r"lacks tensors: model\.layers\.1\.mlp\.up_proj\.weight, model\.norm\.weight\."),
        (damage_extra, r"unknown tensors: model\.layers\.0\.self_attn\.q_norm\.weight"),
        (damage_shape, r"k_proj\.weight .* shape \(64, 64\); its config asks for \(32, 64\)"),
        (damage_cut, "model.safetensors is damaged or cut short"),
        (damage_empty, "model.safetensors is damaged or cut short"),
        (damage_no_weights, r"no \*\.safetensors"),
        (damage_no_config, "no config.json"),
        (damage_bad_config, "config.json cannot be read"),
        (damage_config_is_a_list, "one JSON object"),
        (damage_index, "names model-00001-of-00002.safetensors, which is not in"),
        (damage_index_elsewhere, "which is not in"),
        (damage_twice, "model.norm.weight in two files"),
    ],
)
def test_damage_is_named(damage: Any, message: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny_model("llama").save_pretrained(folder)
    open_checkpoint(folder)
    damage(folder)
    with pytest.raises(BadCheckpoint, match=message):
        open_checkpoint(folder)


def test_other_dtypes_and_files_are_refused_by_name(saved: Path) -> None:
    rewrite(saved, {"model.norm.weight": torch.ones(64, dtype=torch.int8)})
    with pytest.raises(UnsupportedModel, match=r"dtype of model\.norm\.weight = 'I8'"):
        open_checkpoint(saved)
    with pytest.raises(UnsupportedModel, match=r"model\.safetensors"):
        open_checkpoint(saved / "model.safetensors")
    with pytest.raises(BadCheckpoint, match="no model at"):
        open_checkpoint(saved / "absent.gguf")


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.sinks", "model.layers.0.self_attn.attention_sink_bias"])
def test_learned_sink_logits_are_refused_by_name(saved: Path, name: str) -> None:
    rewrite(saved, {name: torch.zeros(4)})
    with pytest.raises(UnsupportedModel, match=f"{name}.*learned sink logits"):
        open_checkpoint(saved)
