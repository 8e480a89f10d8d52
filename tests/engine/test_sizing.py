"""The cache's shape on a CPU: what its attention runs in."""

import re
from dataclasses import replace

import pytest
import torch

from app.config import Settings
from app.embedded import embedded_model_path
from app.engine.sizing import fit, resolve_shape
from kernels import cpu
from kernels.attention_prefill import BLOCKS, WINDOW, blocks
from models.checkpoint import open_checkpoint
from models.errors import BadPattern, DoesNotFit
from models.heads import HeadPattern

CPU = torch.device("cpu")
WHY = blocks.declines(CPU, 64, True, torch.bfloat16)


@pytest.mark.parametrize(
    "served", [pytest.param(True, marks=pytest.mark.skipif(WHY is not None, reason=str(WHY))), False]
)
def test_attention_runs_in_bf16_where_matrix_units_or_our_kernels_are_fast_in_it(monkeypatch, served):
    monkeypatch.setattr(cpu, "fast_bf16", lambda: False)
    monkeypatch.setattr(cpu, "bf16_products", lambda: served)
    for kernel in (BLOCKS, WINDOW):
        monkeypatch.setattr(kernel, "_choices", {})  # is asked anew
    config = open_checkpoint(embedded_model_path()).config

    def compute(config=config, **changes):
        return resolve_shape(config, None, Settings(**changes), CPU)[1].compute_dtype

    assert compute(kv="kv4") == compute(kv="kv8") == (torch.bfloat16 if served else torch.float32)
    # These are torch's to attend over: an unpacked history, endless windows, heads of a size that no kernel takes.
    assert compute(kv="bf16") == compute(kv="kv4", mode="endless") == torch.float32
    assert compute(replace(config, head_dim=48), kv="kv4") == torch.float32
    monkeypatch.setattr(cpu, "fast_bf16", lambda: True)
    assert compute(kv="bf16") == compute(kv="kv4", mode="endless") == torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "gib", "told"),
    [
        ({"context": 8192, "chunk": 999_999_999}, 4, r"in chunks of 999,999,999 needs .* free\. --chunk 2048 fits\.$"),
        ({"chunk": 999_999_999}, 4, r"in chunks of 999,999,999 .* --chunk 2048 fits\.$"),
        ({"chunk": 999_999_999, "mode": "endless"}, 4, r"in chunks of 999,999,999 .* --chunk 2048 fits\.$"),
        ({"context": 8192, "chunk": 2048}, None, r"in chunks of 2,048 .* --chunk 1024 or --context \d+ fits\.$"),
        ({"context": 8192, "chunk": 1}, 0.01, r"chunks of 1 .* free\. Use a smaller model or more memory\.$"),
        ({"context": 8192}, 0.01, r"of 8,192 tokens needs .* free\. Use a smaller model or more memory\.$"),
    ],
)
def test_what_does_not_fit_names_what_would(changes, gib, told):
    config, settings = open_checkpoint(embedded_model_path()).config, Settings(**changes)
    _, shape = resolve_shape(config, None, settings, CPU)
    # None is a hundredth less than it needs, of which a tenth is kept for other programs.
    free = int(gib * 2**30) if gib else int(fit(config, shape, settings, CPU, 1 << 40)[0].total_bytes * 1.1)
    with pytest.raises(DoesNotFit, match=told) as caught:
        fit(config, shape, settings, CPU, free)
    for flag, value in re.findall(r"--(chunk|context) (\d+)", str(caught.value)):
        fit(config, shape, replace(settings, **{flag: int(value)}), CPU, free)


@pytest.mark.parametrize("name", ["sink", "recent"])
def test_a_pattern_whose_windows_are_longer_than_the_models_is_refused_by_name(name):
    config = open_checkpoint(embedded_model_path()).config
    pattern = replace(HeadPattern.all_retrieval(config), **{name: 10**12})
    with pytest.raises(BadPattern, match=rf"{name}_size of the head pattern .* is 1,000,000,000,000; .* --"):
        resolve_shape(config, pattern, Settings(), CPU)
    resolve_shape(config, pattern, Settings(**{name: 8}), CPU)  # what the person says counts
