"""Which heads lose most by 4 bits, measured; and what 8 bits for them give back."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from app.config import Settings
from app.embedded import embedded_model_path
from app.engine.sizing import resolve_shape
from app.errors import UsageError
from app.measured_heads import measured_heads
from models.build import load_decoder
from models.cache.duo import DuoCache
from models.cache.pool import BlockPool
from models.cache.shape import CacheShape
from models.checkpoint import open_checkpoint
from models.errors import UnsupportedModel
from models.fingerprint import fingerprint
from models.heads import HeadPattern
from models.measured import FILE, MeasuredHeads, choose_wide, measure_heads
from models.quantize import quantize_checkpoint
from quant import formats
from tests.models.tiny import HF, SIZES, parameters, tiny_model

CPU = torch.device("cpu")
EVERY = np.ones((2, 2), dtype=bool)


@pytest.fixture
def folder(tmp_path):
    """A Qwen2 whose KV head 1 of layer 1 has large keys: an error of theirs moves a score far."""
    state = {}
    for key, tensor in parameters(tiny_model("qwen2")).items():
        state[key] = tensor * (tensor.shape[-1] ** -0.5 if tensor.dim() == 2 else 0) + ("norm" in key)
    state["model.layers.1.self_attn.k_proj.weight"][16:32] *= 8
    state["model.layers.0.self_attn.v_proj.weight"] *= 0.1  # what the layer in front errs by, those keys would blow up
    save_file({key: tensor.contiguous() for key, tensor in state.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(
        json.dumps(HF["qwen2"].to_dict() | {"rope_parameters": None, "rope_theta": 1e6})
    )
    return tmp_path


def _ids(n=500):
    return torch.randint(0, SIZES["vocab_size"], (n,), generator=torch.Generator().manual_seed(5))


def _logits(path, kv, wide=None, mask=EVERY, heads=None):
    checkpoint = open_checkpoint(path)
    shape = CacheShape.for_model(checkpoint.config, mask, kv, 16, 64, CPU, wide)
    decoder = load_decoder(
        checkpoint, mask, "fp32", shape, CPU, wide=wide, keys=heads and heads.form(checkpoint.config)
    )
    cache = DuoCache(BlockPool(shape, -(-500 // shape.block), CPU))
    first = decoder.forward(_ids()[:300], cache)
    return decoder.logits(torch.cat([first, *(decoder.forward(_ids()[n : n + 1], cache) for n in range(300, 500))]))


def test_the_head_that_loses_most_is_found_and_8_bits_for_it_mend_the_model(folder):
    heads = measure_heads(open_checkpoint(folder), _ids(), CPU)
    losses = heads.losses
    assert losses.shape == (2, 2) and (losses >= 0).all()
    assert np.unravel_index(losses.argmax(), losses.shape) == (1, 1)
    wide = choose_wide(EVERY, losses, 6.0, 64)  # of 4.5 to 8.5: 3 in 8, one head of four
    assert wide.sum() == 1 and wide[1, 1]
    exact = _logits(folder, "fp32")
    error = {}
    for head in ((0, 0), (0, 1), (1, 0), (1, 1)):
        alone = np.zeros((2, 2), dtype=bool)
        alone[head] = True
        error[head] = (_logits(folder, "kv4", alone, heads=heads) - exact).norm().item()
    plain = (_logits(folder, "kv4", heads=heads) - exact).norm().item()
    assert error.pop((1, 1)) < 0.9 * min(plain, *error.values())  # the best of all choices of one head


@pytest.mark.parametrize("mask", [EVERY, np.array([[False, True], [True, True]])])
def test_all_heads_in_8_bits_is_kv8(folder, mask):
    """In whatever place a head lies: the order of heads follows the choice."""
    torch.testing.assert_close(_logits(folder, "kv4", mask.copy(), mask), _logits(folder, "kv8", None, mask))
    some = mask & np.array([[False, False], [False, True]])
    apart = (_logits(folder, "kv4", some, mask) - _logits(folder, "kv8", None, mask)).norm()
    assert 0 < apart < (_logits(folder, "kv4", None, mask) - _logits(folder, "kv8", None, mask)).norm()


def test_a_budget_gives_its_share_of_heads_and_no_more():
    mask = np.random.default_rng(0).random((9, 7)) < 0.5
    losses = torch.from_numpy(np.random.default_rng(1).random((9, 7)))
    heads = int(mask.sum())
    for bits in (4.25, 4.5, 5.0, 6.1, 8.25):
        wide = choose_wide(mask, losses, bits, 128)
        assert not (wide & ~mask).any()
        assert 4.25 + 4 * wide.sum() / heads <= bits < 4.25 + 4 * (wide.sum() + 1) / heads
        rest = losses[torch.from_numpy(mask & ~wide)]
        assert not wide.any() or not len(rest) or losses[torch.from_numpy(wide)].min() >= rest.max()
        assert choose_wide(mask, None, bits, 128).sum() == wide.sum()
    for bits in (4.2, 8.3, 16):
        with pytest.raises(UnsupportedModel, match=r"4\.25 to 8\.25"):
            choose_wide(mask, losses, bits, 128)


@pytest.mark.parametrize(("size", "told"), [(4, "none at"), (16, "6 to 8.5 at"), (64, "4.5 to 8.5 at")])
def test_no_budget_is_told_as_allowed_that_flag_and_pattern_refuse(size, told):
    with pytest.raises(UnsupportedModel, match=told):
        choose_wide(np.ones((2, 2), dtype=bool), None, 8.6, size)


def test_the_plan_counts_what_the_cache_takes(folder):
    config = open_checkpoint(folder).config
    _, shape = resolve_shape(config, None, Settings(kv_bits=7.0), CPU)
    assert config.head_dim == 16 and sum(shape.wide_heads) == 1
    pool = BlockPool(shape, 3, CPU)
    assert sum(stored.nbytes for stored, _ in pool._stored()) == 3 * shape.block * shape.bytes_per_token
    assert shape.bytes_per_token == 2 * (3 * (8 + 4) + 16 + 4)
    with pytest.raises(UsageError, match="--kv-bits"):
        Settings(kv="kv8", kv_bits=5.0)


def test_a_pattern_may_ask_for_more_bits_unless_the_person_says_otherwise(folder):
    config = open_checkpoint(folder).config
    pattern = replace(HeadPattern.all_retrieval(config), kv_bits=7.0)

    def wide(**chosen):
        return sum(resolve_shape(config, pattern, Settings(retrieval_ratio=1.0, **chosen), CPU)[1].wide_heads)

    assert (wide(), wide(kv_bits=6.0), wide(kv_bits=8.0)) == (1, 0, 2)
    assert wide(kv="kv8") == wide(kv="bf16") == wide(mode="endless") == 0


class _Words:
    """A tokenizer that gives every character a token."""

    def encode_text(self, text, **more):
        return [ord(letter) % SIZES["vocab_size"] for letter in text]


def _equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(vars(a).values(), vars(b).values(), strict=True))


def test_heads_are_measured_once_and_come_with_a_checkpoint_of_ours(folder, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    checkpoint = open_checkpoint(folder)
    first = measured_heads(checkpoint, _Words(), cache, CPU)
    quantize_checkpoint(checkpoint, tmp_path / "out", [_ids()], formats.metadata("a", "b", {}, None), CPU)
    monkeypatch.setattr("app.measured_heads.measure_heads", None)
    assert _equal(measured_heads(checkpoint, _Words(), cache, CPU), first)
    told = MeasuredHeads.load(tmp_path / "out" / FILE, checkpoint.config)
    ours = measured_heads(open_checkpoint(tmp_path / "out"), _Words(), cache, CPU)
    assert _equal(ours, told) and ours.losses.argmax() == 3


def test_two_processes_that_measure_at_once_end_with_the_same_heads(folder, tmp_path, monkeypatch):
    checkpoint = open_checkpoint(folder)
    first = measure_heads(checkpoint, _ids(), CPU)
    later = replace(first, key_means=first.key_means + 1)

    def measure(*_):
        (file,) = (tmp_path / "cache").glob("weights.json")
        name = f"{fingerprint(folder, file)}.measured"
        first.save(tmp_path / "cache" / "heads" / name)
        return later

    monkeypatch.setattr("app.measured_heads.measure_heads", measure)
    assert _equal(measured_heads(checkpoint, _Words(), tmp_path / "cache", CPU), first)


def test_a_file_that_is_none_or_of_another_model_is_measured_anew(folder, tmp_path):
    config = open_checkpoint(folder).config
    heads = measure_heads(open_checkpoint(folder), _ids(), CPU)
    heads.save(tmp_path / "whole")
    assert _equal(MeasuredHeads.load(tmp_path / "whole", config), heads)
    (tmp_path / "cut").write_bytes((tmp_path / "whole").read_bytes()[:-5])
    MeasuredHeads(*(part[:1] for part in vars(heads).values())).save(tmp_path / "other")
    wrong = {
        "nan": {"key_means": heads.key_means * torch.nan},
        "far": {"key_means": heads.key_means + 1e5},
        "zero": {"key_scales": heads.key_scales * 0},
        "narrow": {"key_means": heads.key_means.bfloat16()},
        "byte": {"losses": heads.losses.to(torch.float8_e4m3fn)},
    }
    for name, parts in wrong.items():
        replace(heads, **parts).save(tmp_path / name)
    (tmp_path / "folder").mkdir()
    for name in ("cut", "other", "none", "folder", "whole/inside", *wrong):
        assert MeasuredHeads.load(tmp_path / name, config) is None


def test_the_embedded_model_is_measured_by_this_machines_kernels(tmp_path):
    """And near what comes along for it, which was measured on a longer text."""
    checkpoint = open_checkpoint(embedded_model_path())
    ours = measure_heads(checkpoint, torch.arange(100, 400), CPU)
    assert ours.losses.shape == (30, 3) and (ours.losses > 0).all() and ours.losses.max() < 0.1
    shipped = measured_heads(checkpoint, None, tmp_path, CPU)
    apart = (ours.key_means - shipped.key_means).norm(dim=-1) / shipped.key_means.norm(dim=-1)
    assert apart.max() < 1
