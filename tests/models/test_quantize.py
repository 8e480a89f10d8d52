"""The quantised checkpoint: folding changes nothing, loading needs nothing more, a stopped run continues."""

import errno
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from models.build import load_decoder, make_layer
from models.cache.duo import DuoCache
from models.cache.pool import BlockPool
from models.cache.shape import CacheShape
from models.checkpoint import open_checkpoint
from models.config import ModelConfig
from models.errors import OutputTaken, UnsupportedModel
from models.measured import FILE
from models.quantize import quantize_checkpoint
from models.turn import rotate_values, scale_gated, scale_values, turn_residual
from quant import formats
from quant.calibrate import gram, product_error, round_weight
from quant.formats import QuantizedWeight
from quant.w8a8 import quantize_weight
from tests.models.tiny import HF, SIZES, parameters, tiny_model

CPU = torch.device("cpu")
DESCRIBED = formats.metadata("tiny", "r1", {"method": "test"}, None)


@pytest.fixture(params=["llama", "llama-tied", "mistral", "qwen2", "qwen3"])
def folder(request, tmp_path):
    return _folder(tmp_path / request.param, request.param)


def _folder(path, name):
    model = tiny_model(name)
    for key, parameter in model.named_parameters():
        scale = 0.3 if "norm" in key else parameter.shape[-1] ** -0.5
        parameter.data.mul_(scale)
        if "norm" in key:
            parameter.data.add_(1)
    path.mkdir()
    save_file(
        {key: value.to(torch.bfloat16).contiguous() for key, value in parameters(model).items()},
        path / "model.safetensors",
    )
    HF[name].save_pretrained(path)
    return path


def _sample(n=3, length=150):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, SIZES["vocab_size"], (length,), generator=generator) for _ in range(n)]


def _hidden(path, ids, weights="w8a8", mask=None, kv="fp32"):
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    mask = np.ones((config.num_layers, config.num_kv_heads), bool) if mask is None else mask
    shape = CacheShape.for_model(config, mask, kv, 16, 64, CPU)
    decoder = load_decoder(checkpoint, mask, weights, shape, CPU)
    return decoder.logits(decoder.forward(ids, DuoCache(BlockPool(shape, -(-len(ids) // shape.block), CPU))))


@pytest.mark.parametrize("calibrated", [False, True])
def test_it_loads_and_is_close_to_the_float_model(folder, tmp_path, calibrated):
    sample = _sample() if calibrated else []
    quantize_checkpoint(open_checkpoint(folder), tmp_path / "out", sample, DESCRIBED, CPU)
    ids = _sample(4)[3]
    exact, ours = _hidden(folder, ids, "fp32"), _hidden(tmp_path / "out", ids)
    assert (ours - exact).norm() < 0.05 * exact.norm()
    assert open_checkpoint(tmp_path / "out").config == open_checkpoint(folder).config
    assert not (tmp_path / "out.partial").exists()


def test_heads_are_measured_on_the_longest_text_wherever_it_stands(tmp_path):
    folder, (long, short) = _folder(tmp_path / "model", "llama"), (_sample(1, 300)[0], _sample(1, 3)[0])
    for out, sample in (("first", [long, short]), ("last", [short, long])):
        quantize_checkpoint(open_checkpoint(folder), tmp_path / out, sample, DESCRIBED, CPU)
    first, last = (load_file(tmp_path / out / FILE) for out in ("first", "last"))
    for name, tensor in first.items():
        torch.testing.assert_close(last[name], tensor, rtol=1e-3, atol=1e-4)


def test_rounding_to_the_nearest_is_what_loading_a_float_checkpoint_does(folder, tmp_path):
    quantize_checkpoint(open_checkpoint(folder), tmp_path / "out", [], DESCRIBED, CPU)
    ids = _sample()[0]
    mask = np.array([[True, False], [False, True]])
    for kv in ("fp32", "kv4"):
        first, again = (_hidden(path, ids, mask=mask, kv=kv) for path in (folder, tmp_path / "out"))
        assert (first - again).norm() < 0.01 * first.norm()


def test_a_run_that_was_stopped_continues_and_gives_the_same_files(tmp_path):
    source = open_checkpoint(_folder(tmp_path / "in", "qwen3"))

    class Stopped(Exception):
        pass

    def stop(stage, done):
        raise Stopped

    for _ in range(2):
        with pytest.raises(Stopped):
            quantize_checkpoint(source, tmp_path / "out", _sample(), DESCRIBED, CPU, stop)
        assert not (tmp_path / "out").exists()
        made = sorted(file.name for file in (tmp_path / "out.partial").glob("*.safetensors"))
    assert len(made) >= 2
    before = {name: (tmp_path / "out.partial" / name).stat().st_mtime_ns for name in made}
    quantize_checkpoint(source, tmp_path / "out", _sample(), DESCRIBED, CPU)
    assert before == {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in made}
    quantize_checkpoint(source, tmp_path / "whole", _sample(), DESCRIBED, CPU)
    for file in (tmp_path / "whole").glob("*.safetensors"):
        want, got = load_file(file), load_file(tmp_path / "out" / file.name)
        assert want.keys() == got.keys()
        assert all(torch.equal(want[name], got[name]) for name in want)


@pytest.mark.parametrize("calibrated_first", [True, False])
def test_calibrated_and_rounded_weights_are_never_mixed(tmp_path, calibrated_first):
    source = open_checkpoint(_folder(tmp_path / "in", "llama"))
    samples = [_sample(), []] if calibrated_first else [[], _sample()]

    def stop(stage, done):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(source, tmp_path / "out", samples[0], DESCRIBED, CPU, stop)
    for out in ("out", "afresh"):
        quantize_checkpoint(source, tmp_path / out, samples[1], DESCRIBED, CPU)
    for file in (tmp_path / "afresh").glob("*.safetensors"):
        want, got = load_file(file), load_file(tmp_path / "out" / file.name)
        assert all(torch.equal(want[name], got[name]) for name in want)


@pytest.mark.parametrize("job", [b"{}", b"", b"\xff\xfe"])
def test_a_working_directory_of_another_job_is_begun_anew(tmp_path, job):
    source = open_checkpoint(_folder(tmp_path / "in", "llama"))
    (tmp_path / "out.partial" / "folder").mkdir(parents=True)
    (tmp_path / "out.partial" / "job.json").write_bytes(job)
    (tmp_path / "out.partial" / "model-00002-of-00004.safetensors").write_bytes(b"damaged")
    quantize_checkpoint(source, tmp_path / "out", [], DESCRIBED, CPU)
    assert open_checkpoint(tmp_path / "out").int8_format is formats.OWN
    assert {file.suffix for file in (tmp_path / "out").iterdir()} == {".json", ".safetensors"}
    assert not (tmp_path / "out" / "job.json").exists()


@pytest.mark.parametrize("left", ["notes.txt", "job.json/notes.txt"])
def test_what_no_stopped_run_has_left_stays(tmp_path, left):
    file = tmp_path / "out.partial" / left
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    with pytest.raises(OutputTaken, match=r"out\.partial is not of a stopped run"):
        quantize_checkpoint(open_checkpoint(_folder(tmp_path / "in", "llama")), tmp_path / "out", [], DESCRIBED, CPU)
    assert file.read_text() == "mine"


@pytest.mark.parametrize("described", [DESCRIBED, {**DESCRIBED, "source": "another"}])
def test_a_second_run_into_the_same_place_is_refused_and_harms_nothing(tmp_path, described):
    source, refused = open_checkpoint(_folder(tmp_path / "in", "llama")), []

    def second(stage, done):
        if done < 1:
            with pytest.raises(OutputTaken, match=r"out\.partial: another run writes there"):
                quantize_checkpoint(source, tmp_path / "out", [], described, CPU)
            refused.append(done)

    quantize_checkpoint(source, tmp_path / "out", [], DESCRIBED, CPU, second)
    assert refused
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"] == DESCRIBED


def test_an_output_that_appears_meanwhile_stays_and_the_work_is_kept(tmp_path):
    source, out = open_checkpoint(_folder(tmp_path / "in", "llama")), tmp_path / "out"
    theirs = out / "theirs"

    def appear(folder):
        out.mkdir()
        theirs.write_text("mine")

    with pytest.raises(OutputTaken, match="out exists by now"):
        quantize_checkpoint(source, out, [], DESCRIBED, CPU, finish=appear)
    assert theirs.read_text() == "mine"
    out.rename(tmp_path / "moved")
    told = []
    quantize_checkpoint(source, out, [], DESCRIBED, CPU, lambda stage, done: told.append(done))
    assert open_checkpoint(out).config == source.config and told[-1] == 1


@pytest.mark.parametrize("sample", [[], _sample()])
@pytest.mark.parametrize("shard", ["model-00001-of-00004.safetensors", "model-00002-of-00004.safetensors"])
def test_a_shard_that_was_cut_is_written_anew(tmp_path, shard, sample):
    source = open_checkpoint(_folder(tmp_path / "in", "llama"))

    def stop(stage, done):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(source, tmp_path / "out", sample, DESCRIBED, CPU, stop)
    file = tmp_path / "out.partial" / shard
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    quantize_checkpoint(source, tmp_path / "out", sample, DESCRIBED, CPU)
    assert (tmp_path / "out" / shard).read_bytes() == whole


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG])
def test_what_the_disk_says_is_an_error_of_the_system(tmp_path, monkeypatch, number):
    def full(*_, **__):
        raise SafetensorError(f"Error while serializing: I/O error: {os.strerror(number)} (os error {number})")

    source = open_checkpoint(_folder(tmp_path / "in", "llama"))
    monkeypatch.setattr("models.quantize.save_file", full)
    with pytest.raises(OSError, match=r"model-00001-of-00004") as failed:
        quantize_checkpoint(source, tmp_path / "out", [], DESCRIBED, CPU)
    assert failed.value.errno == number


def test_metadata_is_kept_and_a_newer_version_refused(tmp_path):
    source = open_checkpoint(_folder(tmp_path / "in", "llama"))
    quantize_checkpoint(source, tmp_path / "out", [], formats.metadata("a/b", "abc", {"tokens": 5}, "hash"), CPU)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    section = config["quantization_config"]
    assert (section["source"], section["source_revision"], section["head_pattern_sha256"]) == ("a/b", "abc", "hash")
    section["version"] = 2
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=r"version = 2"):
        open_checkpoint(tmp_path / "out")


def test_what_is_quantised_is_not_quantised_again(tmp_path):
    quantize_checkpoint(open_checkpoint(_folder(tmp_path / "in", "llama")), tmp_path / "out", [], DESCRIBED, CPU)
    with pytest.raises(UnsupportedModel, match="not quantised yet"):
        quantize_checkpoint(open_checkpoint(tmp_path / "out"), tmp_path / "again", [], DESCRIBED, CPU)


def test_int8_weights_multiplied_out_are_close_too(tmp_path):
    quantize_checkpoint(open_checkpoint(_folder(tmp_path / "in", "llama")), tmp_path / "out", [], DESCRIBED, CPU)
    exact, ours = _hidden(tmp_path / "in", _sample()[0], "fp32"), _hidden(tmp_path / "out", _sample()[0], "fp32")
    assert (ours - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_scales_and_turns_cancel(tmp_path, name):
    checkpoint = open_checkpoint(_folder(tmp_path / "in", name))
    config = replace(checkpoint.config, num_layers=1)
    prefix = "model.layers.0."
    parts = {n.removeprefix(prefix): checkpoint.load_float(n) for n in checkpoint.names() if n.startswith(prefix)}
    rotate_values(config, parts)
    turn_residual(config, parts)
    scaled = dict(parts)
    scale_values(config, scaled, torch.rand(config.num_kv_heads) + 0.5)
    scale_gated(config, scaled, torch.rand(config.intermediate_size) + 0.5)
    from models.quantize import _Calibration, _watch

    run = _Calibration(checkpoint, _sample(1), CPU)
    mask = np.ones(config.num_kv_heads, bool)
    want, got = (run._run(make_layer(config, dict(p), mask, _watch))[0] for p in (parts, scaled))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_rounding_by_error_beats_the_nearest_on_what_it_was_shown_and_on_more():
    mixing = torch.randn(96, 96) * torch.logspace(0, -2, 96)[:, None]
    shown, more = (torch.randn(4000, 96) @ mixing for _ in range(2))
    weight = torch.randn(50, 96)
    ours, nearest = round_weight(weight, gram(shown)), QuantizedWeight(*quantize_weight(weight))
    assert torch.equal(ours.scale, nearest.scale)

    def error(rounded, x):
        return (x @ (rounded.dequantize() - weight).T).norm()

    for x in (shown, more):
        assert error(ours, x) < 0.5 * error(nearest, x)


def test_silent_and_singular_samples_still_give_weights():
    weight = torch.randn(8, 16)
    nearest = QuantizedWeight(*quantize_weight(weight))
    assert torch.equal(round_weight(weight, torch.zeros(16, 16)).codes, nearest.codes)
    one = torch.randn(1, 16)
    ours = round_weight(weight, gram(one))
    assert ((ours.dequantize() - weight) @ one.T).norm() < 0.3 * ((nearest.dequantize() - weight) @ one.T).norm()


def test_product_error_of_an_outlier_falls_with_its_scale():
    x, weight = torch.randn(200, 64), torch.randn(32, 64)
    x[:, 7] *= 50
    factor = torch.ones(64)
    factor[7] = 0.1
    assert product_error(weight / factor, x * factor) < 0.5 * product_error(weight, x)


@pytest.mark.parametrize("name", HF)
def test_a_config_is_read_back_as_it_was(name):
    config = ModelConfig.from_hf(HF[name].to_dict())
    assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        | {"original_max_position_embeddings": 8192},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192, "truncate": False},
        {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7},
    ],
)
def test_every_rope_is_read_back_as_it_was(scaling):
    data = HF["llama"].to_dict() | {"rope_scaling": scaling, "rope_theta": 5e5, "max_position_embeddings": 8192}
    data.pop("rope_parameters", None)
    config = ModelConfig.from_hf(data)
    assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


_KILLED_HALF_WAY = """
import os, signal, sys
from pathlib import Path
import torch
from models import quantize
from models.checkpoint import open_checkpoint
from tests.models.test_quantize import DESCRIBED

save = quantize.save_file

def half(tensors, path, metadata):
    save(tensors, path, metadata=metadata)
    if "00003" in path.name:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        os.kill(os.getpid(), signal.SIGKILL)

quantize.save_file = half
quantize.quantize_checkpoint(open_checkpoint(Path(sys.argv[1])), Path(sys.argv[2]), [], DESCRIBED, torch.device("cpu"))
"""


def test_a_killed_run_leaves_no_half_file_and_is_continued(tmp_path):
    source, out = _folder(tmp_path / "in", "llama"), tmp_path / "out"
    killed = subprocess.run([sys.executable, "-c", _KILLED_HALF_WAY, str(source), str(out)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not out.exists()
    left = {file.name: load_file(file) for file in (tmp_path / "out.partial").glob("*.safetensors")}
    assert len(left) == 2 and all(left.values())  # each whole
    quantize_checkpoint(open_checkpoint(source), out, [], DESCRIBED, CPU)
    quantize_checkpoint(open_checkpoint(source), tmp_path / "whole", [], DESCRIBED, CPU)
    assert {file.name for file in out.iterdir()} == {file.name for file in (tmp_path / "whole").iterdir()}
    for file in out.glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "whole" / file.name).read_bytes()
