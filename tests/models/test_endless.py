"""The decoder in endless mode: against transformers' sliding windows, against its definition, and far out."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from models.build import load_decoder
from models.cache.endless import EndlessCache
from models.cache.shape import CacheShape
from models.checkpoint import open_checkpoint
from models.rope import EndlessRope, Rope
from tests.cache import endless_dense
from tests.models.test_decoder import CASES, TINY

CPU = torch.device("cpu")


def _save(path, kind, **changes):
    config = AutoConfig.for_model(kind, **{**TINY, **changes})
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3 if parameter.dim() > 1 else 1.0)
    model.save_pretrained(path)
    return model


def _load(path, sink, recent):
    config = open_checkpoint(path).config
    mask = np.zeros((config.num_layers, config.num_kv_heads), dtype=bool)
    shape = CacheShape.for_model(config, mask, "fp32", sink, recent, CPU)
    shape = replace(shape, compute_dtype=torch.float32)
    decoder = load_decoder(open_checkpoint(path), mask, "fp32", shape, CPU)
    return decoder, shape


def _read(decoder, shape, ids, sizes):
    cache = EndlessCache(shape, decoder.rope, CPU)
    hidden, start = [], 0
    for size in sizes:
        hidden.append(decoder.forward(ids[start : start + size], cache))
        start += size
    assert start == len(ids) == cache.length
    return torch.cat(hidden)


class _NoPositions:
    def table(self, positions, device=None):
        return torch.ones(len(positions), self.pairs, dtype=torch.complex64)


class _Definition:
    """A cache that gets a whole text in one chunk, without positions, and attends as endless mode is defined."""

    def __init__(self, shape, table):
        self.shape, self.length, self._table = shape, 0, table

    def begin(self, n):
        return torch.arange(n)

    def attend(self, layer, q, k, v):
        return endless_dense.attend(self.shape, self._table, q, k, v).float()

    def commit(self):
        pass


@pytest.mark.parametrize("window", [1, 2, 7, 32])
@pytest.mark.parametrize("sizes", [[120], [1] * 120, [50, 1, 69]])
def test_without_sinks_it_is_transformers_sliding_window(tmp_path, poisoned, window, sizes):
    """Only distances matter then, so transformers' absolute positions and masks give the same."""
    _save(tmp_path, "mistral", sliding_window=None, head_dim=16)
    decoder, shape = _load(tmp_path, 0, window)
    decoder.rope = EndlessRope(decoder.rope, window)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, sliding_window=window, attn_implementation="eager").eval()
    ids = torch.randint(0, 257, (120,))
    with torch.no_grad():
        want = theirs(ids[None]).logits[0]
    got = decoder.logits(_read(decoder, shape, ids, sizes))
    torch.testing.assert_close(got, want, rtol=0, atol=2e-3 * float(want.abs().max()))


@pytest.mark.parametrize(
    ("name", "sink", "recent"), [*((name, 4, 28) for name in CASES), ("llama", 1, 1), ("llama-yarn", 50, 3)]
)
def test_equals_its_definition(tmp_path, poisoned, name, sink, recent):
    """Every layer reads hidden states that came about with earlier windows, as in StreamingLLM; every kind of rope."""
    kind, changes = CASES[name]
    _save(tmp_path, kind, **changes)
    decoder, shape = _load(tmp_path, sink, recent)
    plain, ids = decoder.rope, torch.randint(0, 257, (70,))
    none = _NoPositions()
    none.pairs = shape.head_dim // 2
    decoder.rope = none
    want = decoder.forward(ids, _Definition(shape, lambda places: plain.table(places, seq_len=sink + recent)))
    decoder.rope = EndlessRope(plain, sink + recent)
    for sizes in ([70], [1] * 70, [20, 13, 1, 36]):
        got = _read(decoder, shape, ids, sizes)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4 * float(want.abs().max()))


def test_before_anything_is_forgotten_it_is_the_plain_model(tmp_path, poisoned):
    model = _save(tmp_path, "llama")
    decoder, shape = _load(tmp_path, 4, 60)
    decoder.rope = EndlessRope(decoder.rope, 64)
    ids = torch.randint(0, 257, (64,))
    with torch.no_grad():
        want = model(ids[None]).logits[0]
    got = decoder.logits(_read(decoder, shape, ids, [30, 1, 33]))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4 * float(want.abs().max()))


def test_places_beyond_the_models_window_are_never_asked_for(tmp_path):
    """An endless cache reads on where the plain positions would end."""
    _save(tmp_path, "llama", max_position_embeddings=64)
    decoder, shape = _load(tmp_path, 4, 28)
    assert isinstance(decoder.rope, Rope)
    decoder.rope = EndlessRope(decoder.rope, 32)
    assert _read(decoder, shape, torch.randint(0, 257, (200,)), [150, 1, 49]).isfinite().all()
