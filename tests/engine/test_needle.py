"""Retrieval through the whole engine (W8A8, 4-bit cache, chunked prefill), with weights that must find every needle."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from app.config import Settings
from app.engine.detokenize import Detokenizer
from app.engine.engine import Engine
from app.engine.runner import build_runner
from app.engine.types import GenerationRequest, SamplingParams
from kernels import native
from models.checkpoint import open_checkpoint
from tests import needle
from tests.fakes import FakeTokenizer


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


@pytest.mark.parametrize(("chunk", "length"), [(300, 903), (300, 643), (1000, 3003), (5000, 3003), (16_384, 100_003)])
def test_chunks_of_any_size_find_the_same(tmp_path: Path, chunk: int, length: int) -> None:
    """One token more than whole chunks, a part of one, all in one; what is asked for lies in the first of them."""
    checkpoint = open_checkpoint(needle.write_checkpoint(tmp_path, length))
    settings = Settings(context=length, cache_dir=tmp_path, chunk=chunk, library_quota=0)
    depths = (10, 100)
    found = needle.ask(build_runner(checkpoint, needle.pattern(), settings), length, depths)
    assert found == dict.fromkeys(depths, True)


def test_after_the_warm_up_no_length_waits_for_a_compiler(tmp_path: Path) -> None:
    """What compiles at its first use is used by the prompt that is read at the start; counted anew here."""
    native.library.cache_clear()
    for name, module in sys.modules.items():
        if name.startswith("kernels.") and hasattr(functions := getattr(module, "_functions", None), "cache_clear"):
            functions.cache_clear()
    checkpoint = open_checkpoint(needle.write_checkpoint(tmp_path, 2000))
    runner = build_runner(checkpoint, needle.pattern(), Settings(context=2000, cache_dir=tmp_path, library_quota=0))
    engine = Engine(runner, lambda stop: Detokenizer(FakeTokenizer(), stop))
    compiled = []
    try:
        for length in (256, 1, 2, 31, 97, 129, 300, 1111):
            prompt = tuple(needle.haystack(1200)[:length])
            engine.submit(GenerationRequest(prompt, SamplingParams(max_new_tokens=3))).result()
            compiled.append(native.library.cache_info().misses)
    finally:
        engine.close()
    assert set(compiled) == {compiled[0]}
