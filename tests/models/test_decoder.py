"""The decoder against transformers in fp32: tiny random models of each family, and real weights."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from app.embedded import embedded_model_path
from models.build import Build, build_decoder, load_decoder
from models.cache.duo import DuoCache
from models.cache.pool import BlockPool
from models.cache.shape import CacheShape
from models.checkpoint import open_checkpoint
from models.heads import HeadPattern
from models.turn import narrow_turn
from quant import kv4
from quant.w8a8 import DenseLinear

CPU = torch.device("cpu")
TINY = {
    "vocab_size": 257,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
CASES = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 20}),
    "llama-mha": ("llama", {"num_key_value_heads": 6}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama-dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("qwen2", {"use_sliding_window": False}),
    "qwen2-tied": ("qwen2", {"use_sliding_window": False, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16, "use_sliding_window": False}),
}


def _all_heads(config):
    return np.ones((config.num_layers, config.num_kv_heads), dtype=bool)


def _load(path, weights="fp32", kv="fp32", mask=None, sink=4, recent=16):
    checkpoint = open_checkpoint(path)
    mask = _all_heads(checkpoint.config) if mask is None else mask
    shape = CacheShape.for_model(checkpoint.config, mask, kv, sink, recent, CPU)
    if weights == "fp32":
        shape = replace(shape, exact_dtype=torch.float32, compute_dtype=torch.float32)
    return load_decoder(checkpoint, mask, weights, shape, CPU), shape


def _logits(decoder, shape, ids, sizes):
    cache = DuoCache(BlockPool(shape, len(ids) // shape.block + 1, CPU))
    hidden, start = [], 0
    for size in sizes:
        hidden.append(decoder.forward(ids[start : start + size], cache))
        start += size
    assert start == len(ids)
    return decoder.logits(torch.cat(hidden))


@pytest.fixture(params=CASES, scope="module")
def tiny(request, tmp_path_factory):
    """(folder of safetensors, the transformers model)"""
    torch.manual_seed(1)
    family, extra = CASES[request.param]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**TINY, **extra})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)  # not their zeros and ones
            else:
                parameter.mul_(4)  # attention that attends
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return folder, model


@pytest.mark.parametrize("sizes", [[300], [1, 2, 130, 1, 166]], ids=["whole", "chunks"])
def test_logits_equal_transformers(tiny, sizes):
    folder, model = tiny
    ids = torch.randint(0, TINY["vocab_size"], (300,))
    with torch.no_grad():
        want = model(ids[None]).logits[0]
    out = _logits(*_load(folder), ids, sizes)
    assert want.std() > 0.05
    assert (out - want).abs().max() <= 1e-3
    assert torch.equal(out.argmax(-1), want.argmax(-1))


@pytest.mark.parametrize(("kv", "length"), [("fp32", 120), ("kv8", 96)])
def test_a_pattern_only_moves_heads(tiny, kv, length):
    """With windows longer than the prompt, any pattern is full attention; head order and rotation fold away.

    Of 96 tokens a CPU's cache has packed none for its queries yet: 32 first ones and one block of 64.
    """
    folder, model = tiny
    ids = torch.randint(0, TINY["vocab_size"], (length,))
    with torch.no_grad():
        want = model(ids[None]).logits[0]
    config = open_checkpoint(folder).config
    mask = np.zeros((config.num_layers, config.num_kv_heads), dtype=bool)
    mask[0, -1:] = mask[1] = True
    out = _logits(*_load(folder, kv=kv, mask=mask, recent=200), ids, [length])
    assert (out - want).abs().max() <= 1e-3


def test_turning_the_residual_stream_changes_nothing(tiny):
    folder, model = tiny
    ids = torch.randint(0, TINY["vocab_size"], (50,))
    with torch.no_grad():
        want = model(ids[None]).logits[0]
    checkpoint = open_checkpoint(folder)
    shape = CacheShape.for_model(checkpoint.config, _all_heads(checkpoint.config), "fp32", 4, 16, CPU)
    how = Build(_all_heads(checkpoint.config), DenseLinear, DenseLinear, torch.Tensor.float, False, True, CPU)
    out = _logits(build_decoder(checkpoint.config, checkpoint.tensors(), how), shape, ids, [50])
    assert (out - want).abs().max() <= 1e-3


def test_real_weights_equal_transformers_over_2000_tokens(prose_ids, reference_model):
    ids = torch.tensor(prose_ids[:2000])
    with torch.no_grad():
        want = reference_model(ids[None]).logits[0]
    out = _logits(*_load(embedded_model_path()), ids, [2000])
    assert (out - want).abs().max() <= 1e-3
    assert torch.equal(out.argmax(-1), want.argmax(-1))


def test_quantised_stays_close_on_real_text(prose_ids):
    ids = torch.tensor(prose_ids[:1500])

    def loss(weights, kv):
        logits = _logits(*_load(embedded_model_path(), weights, kv), ids, [1024, 476])
        return torch.nn.functional.cross_entropy(logits[:-1], ids[1:])

    exact = loss("fp32", "fp32")
    assert loss("w8a8", "kv4") < exact + 0.06
    assert loss("fp32", "kv4") < exact + 0.02


def test_a_pattern_of_the_wrong_shape_is_refused_with_both_shapes():
    config = open_checkpoint(embedded_model_path()).config
    with pytest.raises(Exception, match=r"32.*8.*30.*3"):
        HeadPattern(np.zeros((32, 8)), 128, 256, "test").check(config)


@pytest.mark.parametrize("size", [1, 2, 4, 12, 16, 32, 48, 64, 128, 256, 512, 576, 1024])
def test_a_rotation_is_narrow_where_bf16_holds_it_exactly(size):
    """The plan counts it by its size alone, so the rule must be what rounding says."""
    turn = kv4.rotation(size)
    assert narrow_turn(size) == torch.equal(turn.bfloat16().float(), turn)
