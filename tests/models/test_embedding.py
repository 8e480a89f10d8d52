"""An embedding in int8: close to the unquantised one, as large as planned, and the same from a quantised checkpoint."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from models.build import load_decoder
from models.cache.duo import DuoCache
from models.cache.plan import weights_bytes
from models.cache.pool import BlockPool
from models.cache.shape import CacheShape
from models.checkpoint import open_checkpoint
from models.quantize import quantize_checkpoint
from quant import formats
from quant.formats import QuantizedWeight
from tests.models.tiny import HF, SIZES, parameters, tiny_model

CPU = torch.device("cpu")


@pytest.fixture(params=["llama", "llama-tied"])
def folder(request, tmp_path):
    model = tiny_model(request.param)
    state = {}
    for key, tensor in parameters(model).items():
        state[key] = tensor * (tensor.shape[-1] ** -0.5 if tensor.dim() == 2 else 0.1) + ("norm" in key)
    path = tmp_path / "in"
    path.mkdir()
    save_file({key: tensor.contiguous() for key, tensor in state.items()}, path / "model.safetensors")
    HF[request.param].save_pretrained(path)
    return path


def _decoder(path, weights, int8):
    checkpoint = open_checkpoint(path)
    mask = np.ones((checkpoint.config.num_layers, checkpoint.config.num_kv_heads), bool)
    shape = CacheShape.for_model(checkpoint.config, mask, "fp32", 4, 16, CPU)
    return load_decoder(checkpoint, mask, weights, shape, CPU, int8_embedding=int8), shape


def _logits(path, weights, int8):
    decoder, shape = _decoder(path, weights, int8)
    ids = torch.randint(0, SIZES["vocab_size"], (100,), generator=torch.Generator().manual_seed(2))
    return decoder.logits(decoder.forward(ids, DuoCache(BlockPool(shape, 2, CPU))))


@pytest.mark.parametrize("weights", ["fp32", "w8a8"])
def test_it_is_close_and_as_large_as_planned(folder, weights):
    exact, ours = _logits(folder, weights, False), _logits(folder, weights, True)
    assert 0 < (ours - exact).norm() < 0.03 * exact.norm()
    decoder, _ = _decoder(folder, weights, True)
    assert isinstance(decoder.embedding, QuantizedWeight) and decoder.embedding.codes.dtype == torch.int8
    if weights == "w8a8":
        planned = weights_bytes(decoder.config, weights, CPU, "int8")
        norms = 4 * SIZES["hidden_size"] * (2 * SIZES["num_hidden_layers"] + 1)
        assert planned - norms == decoder.nbytes
        assert planned < weights_bytes(decoder.config, weights, CPU)


def test_a_quantised_checkpoint_holds_the_same_codes_and_is_loaded_as_it_is(folder, tmp_path):
    described = formats.metadata("tiny", "r1", {}, None)
    for name, int8 in (("narrow", True), ("plain", False)):
        quantize_checkpoint(open_checkpoint(folder), tmp_path / name, [], described, CPU, int8_embedding=int8)
    stored = load_file(tmp_path / "narrow" / "model-00001-of-00004.safetensors")
    want, _ = _decoder(folder, "w8a8", True)
    assert torch.equal(stored["model.embed_tokens.weight"], want.embedding.codes)
    torch.testing.assert_close(stored["model.embed_tokens.weight_scale"], want.embedding.scale)
    loaded = _logits(tmp_path / "narrow", "w8a8", False)
    assert (loaded - _logits(folder, "w8a8", True)).norm() < 0.01 * loaded.norm()
    sizes = [sum(f.stat().st_size for f in (tmp_path / n).glob("*.safetensors")) for n in ("narrow", "plain")]
    assert sizes[0] < sizes[1]
