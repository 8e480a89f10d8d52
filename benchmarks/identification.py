"""Minutes that finding the embedded model's retrieval heads anew takes, and whether published patterns read as made.

On a GPU the whole way, gates and refinement; on a CPU the training-free one.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from app.__main__ import main as command_line
from app.config import EMBEDDED_MODEL, Settings
from app.evaluation.examiner import Journal
from app.model import choose_pattern, find_model
from benchmarks._report import Bar, at_least, at_most, commit, finish, parser_for, threads_flag
from models.heads import HeadPattern
from models.identify import agreement


def main(argv: list[str]) -> int:
    """Runs the benchmark; exit code 1 when a bar is missed."""
    parser = parser_for("identification", __doc__)
    threads_flag(parser)
    parser.add_argument("--published", type=Path, metavar="DIR", help="check the published head patterns in DIR too")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    settings = Settings(model=EMBEDDED_MODEL)
    pattern, _ = choose_pattern(find_model(settings), settings)
    assert pattern is not None
    published = [] if args.published is None else published_bars(args.published)
    with tempfile.TemporaryDirectory() as folder:
        found = timed_identification(Path(folder), pattern, args.threads)
    bars = [*identification_bars(found, args.threads), *published]
    finish("identification", argv, bars, found, args.json, args.threads)
    return 0 if all(bar.holds for bar in bars) else 1


def timed_identification(folder: Path, pattern: HeadPattern, threads: int) -> dict[str, Any]:
    """Minutes of identification, and how far its heads are the shipped pattern's.

    On a GPU the whole way, as that pattern was made; on a CPU the training-free one.
    """
    out = folder / "pattern"
    done = Journal(folder / "identification.jsonl", {"commit": commit()})
    if "it" not in done:
        flags = ["identify", "--model", EMBEDDED_MODEL, "--out", str(out), "--sink", "128", "--recent", "512"]
        gpu = torch.cuda.is_available()
        flags += ["--steps", "120", "--refine", "3"] if gpu else ["--training-free", "--threads", str(threads)]
        begin = time.perf_counter()
        if command_line(flags) != 0:
            raise RuntimeError("identification failed")
        minutes = (time.perf_counter() - begin) / 60
        figures = json.loads((out / "identify.json").read_text(encoding="utf-8"))
        common, correlation = agreement(HeadPattern.load(out).scores, pattern.scores, 0.5)
        shipped = {"common_heads": common, "rank_correlation": correlation}
        done.add("it", gpu=gpu, minutes=minutes, agreement_with_the_shipped_pattern=shipped, figures=figures)
    found = done.rows["it"]
    common, correlation = found["agreement_with_the_shipped_pattern"].values()
    print(f"found anew, {common:.0%} of the heads are the shipped pattern's, rank correlation {correlation:.2f}")
    return found


def identification_bars(found: dict[str, Any], threads: int) -> list[Bar]:
    """Minutes, of a run that found the heads: half of them would be the shipped pattern's by chance."""
    common = found["agreement_with_the_shipped_pattern"]["common_heads"]
    if found["gpu"]:
        name, limit, least = "identification, gates and refinement, one GPU", 10, 0.9
    else:
        name, limit, least = f"identification, training-free, {threads} CPU cores", 15, 0.75
    return [
        at_most(name, found["minutes"], "min", limit),
        at_least("heads found that are the shipped pattern's", common, "of them", least),
    ]


def published_bars(folder: Path) -> list[Bar]:
    """Published patterns whose retrieval set at 50 % is that of their own quantile rule, but for ties."""
    files = sorted(folder.rglob("full_attention_heads.tsv"))
    if not files:
        raise FileNotFoundError(f"no head pattern lies in {folder}")
    agreeing = 0
    for file in files:
        made = HeadPattern.load(file.parent)
        ours, theirs = made.retrieval_mask(0.5), made.scores >= np.quantile(made.scores, 0.5)
        tied = made.scores == np.sort(made.scores, axis=None)[::-1][made.scores.size // 2 - 1]
        agreeing += bool(((ours != theirs) <= tied).all())
    return [at_least("published patterns with the set of their quantile rule", agreeing, "patterns", len(files))]
