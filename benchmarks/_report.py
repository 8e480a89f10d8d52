"""What benchmarks share: the device's name, the commit, a table, and one JSON file each."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


class Wrong(Exception):
    """A result is not what the reference says, so no figure of it means anything."""


@dataclass(frozen=True)
class Bar:
    """A figure with the bar it is held to; `bar` is text such as ">= 1.2"."""

    name: str
    value: float
    unit: str
    bar: str
    holds: bool


def at_least(name: str, value: float, unit: str, bar: float) -> Bar:
    """A bar that holds from `bar` up."""
    return Bar(name, round(value, 4), unit, f">= {bar:g}", value >= bar)


def at_most(name: str, value: float, unit: str, bar: float) -> Bar:
    """A bar that holds up to `bar`."""
    return Bar(name, round(value, 4), unit, f"<= {bar:g}", value <= bar)


def parser_for(benchmark: str, description: str | None) -> argparse.ArgumentParser:
    """The flags that every benchmark has."""
    parser = argparse.ArgumentParser(prog=f"python -m app bench {benchmark}", description=description)
    parser.add_argument("--json", action="store_true", help="print the result as JSON on the last line")
    return parser


def threads_flag(parser: argparse.ArgumentParser) -> None:
    """Of those that a CPU can run: `torch.set_num_threads` is given it."""
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), metavar="N", help="CPU threads")


def device_name(threads: int) -> str:
    """The GPU's name, or the processor's with the threads used."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        model = next(
            (line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line), model
        )
    units = ", AMX" if torch.cpu._is_amx_tile_supported() else ""
    return f"{model} ({threads} threads, {torch.backends.cpu.get_cpu_capability()}{units})"


def commit() -> str:
    """The commit that runs, marked where sources differ from it; "unknown" without git, and for a person to fill in."""

    def git(*words: str) -> str:
        done = subprocess.run(("git", *words), capture_output=True, text=True, cwd=RESULTS.parents[1], check=False)
        return done.stdout.strip()

    try:
        commit = git("rev-parse", "--short", "HEAD")
        changed = git("status", "--porcelain", "--", *(f"*.{ending}" for ending in ("py", "c", "h", "cu", "cuh")))
    except OSError:
        return "unknown"
    return (commit or "unknown") + ("+changes" if changed else "")


def finish(benchmark: str, argv: list[str], bars: list[Bar], details: Any, as_json: bool, threads: int) -> None:
    """Prints the bars and writes benchmarks/results/<benchmark>.json; with `as_json` the last line is the JSON."""
    result = {
        "benchmark": benchmark,
        "device": device_name(threads),
        "commit": commit(),
        "command": " ".join(["python -m app bench", benchmark, *argv]),
        "bars": [asdict(bar) for bar in bars],
        "details": details,
    }
    width = max(len(bar.name) for bar in bars)
    for bar in bars:
        print(
            f"{bar.name:{width}}  {bar.value:>10.3f} {bar.unit:<12} {bar.bar:<10} {'holds' if bar.holds else 'MISSED'}"
        )
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{benchmark}.json").write_text(json.dumps(result, indent=1) + "\n")
    if as_json:
        print(json.dumps(result))
    sys.stdout.flush()
