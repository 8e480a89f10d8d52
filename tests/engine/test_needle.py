"""Retrieval through the whole engine (W8A8, 4-bit cache, chunked prefill), with weights that must find every needle."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.config import Settings
from app.engine.runner import build_runner
from models.checkpoint import open_checkpoint
from tests import needle


def ask(folder: Path, length: int, declared: bool, depths: tuple[int, ...] = needle.DEPTHS) -> dict[int, bool]:
    checkpoint = open_checkpoint(needle.write_checkpoint(folder, length))
    settings = Settings(context=length, cache_dir=folder)
    return needle.ask(build_runner(checkpoint, needle.pattern(declared), settings), length, depths)


def test_every_needle_is_found_in_131072_tokens(tmp_path: Path) -> None:
    assert ask(tmp_path, 131_072, True) == dict.fromkeys(needle.DEPTHS, True)


@pytest.mark.parametrize("length", [4096, 5000])
def test_the_test_notices_a_retrieval_head_that_is_declared_streaming(tmp_path: Path, length: int) -> None:
    assert all(ask(tmp_path, length, True).values())
    # The first needle lies in the sinks, the last one in the window.
    found = ask(tmp_path, length, False, needle.DEPTHS[1:-1])
    assert not any(found.values())
