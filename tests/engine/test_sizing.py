"""The cache's shape on a CPU: what its attention runs in."""

from dataclasses import replace

import pytest
import torch

from app.config import Settings
from app.embedded import embedded_model_path
from app.engine.sizing import resolve_shape
from kernels import cpu
from kernels.attention_prefill import BLOCKS, WINDOW, blocks
from models.checkpoint import open_checkpoint

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
