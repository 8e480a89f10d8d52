"""Retrieval at the whole window of 4,194,304 tokens, through the engine, at every depth."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from app.config import Settings
from app.engine.runner import build_runner
from models.checkpoint import open_checkpoint
from tests import needle

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize(("length", "declared"), [(300_000, False), (4_194_304, True)])
def test_needles(tmp_path: Path, length: int, declared: bool) -> None:
    """Every one is found; and none is, outside sinks and window, where the retrieval head is declared streaming."""
    settings = Settings(context=length, cache_dir=tmp_path)
    checkpoint = open_checkpoint(needle.write_checkpoint(tmp_path, length))
    runner = build_runner(checkpoint, needle.pattern(declared), settings)
    assert runner.graph is not None
    depths = needle.DEPTHS if declared else needle.DEPTHS[1:-1]
    found = needle.ask(runner, length, depths)
    assert found == dict.fromkeys(depths, declared)
