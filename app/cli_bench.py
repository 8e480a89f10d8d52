"""`python -m app bench NAME`: benchmarks/NAME.py's `main(argv)`."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

from app.errors import UsageError

_FOLDER = Path(__file__).parents[1] / "benchmarks"


def benchmarks() -> list[str]:
    """The names of all."""
    return sorted(path.stem for path in _FOLDER.glob("*.py") if not path.stem.startswith("_"))


def bench(name: str, argv: Sequence[str]) -> int:
    """Run one benchmark; its exit code."""
    if name not in (known := benchmarks()):
        raise UsageError(f"There is no benchmark {name!r}. Choose one of: {', '.join(known)}.")
    return int(importlib.import_module(f"benchmarks.{name}").main(list(argv)) or 0)
