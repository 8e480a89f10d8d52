"""`python -m app heads`: a model's head pattern as a table, a picture, and what each ratio would cost."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import torch

from app.config import Settings
from app.errors import UsageError
from app.head_costs import draw, ratio_cost
from app.model import choose_pattern, find_model
from app.writable import file_to_write
from models.checkpoint import open_checkpoint

_STEPS = 20


def heads(settings: Settings, flags: Namespace) -> int:
    """Print which heads keep everything and the costs by ratio; with --plot also a PNG."""
    plot: Path | None = flags.plot
    if plot is not None:
        file_to_write("--plot", plot)
    given = [name for name, value in (("--count", flags.count), ("--threshold", flags.threshold)) if value is not None]
    if len(given) == 2:
        raise UsageError("Give --count or --threshold, not both.")
    files = find_model(settings)
    config = open_checkpoint(files.path).config
    pattern, note = choose_pattern(files, settings)
    if pattern is None:
        raise UsageError(f"{note} Find one: python -m app identify --model {settings.model or files.name} --out DIR.")
    pattern.check(config)
    if flags.count is not None and not 0 <= flags.count <= pattern.scores.size:
        raise UsageError(f"--count is {flags.count}; it must be from 0 to {pattern.scores.size}, all of the heads.")
    if flags.count is not None:
        mask = pattern.best(flags.count)
    elif flags.threshold is not None:
        mask = pattern.above(flags.threshold)
    else:
        mask = pattern.retrieval_mask(settings.retrieval_ratio)
    ratio = float(mask.mean())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    context = min(settings.context or config.max_positions, config.max_positions)
    costs = [ratio_cost(config, pattern, settings, i / _STEPS, context, device) for i in range(_STEPS + 1)]
    print(f"{files.name}: {pattern.source}; sink {pattern.sink}, recent {pattern.recent}")
    for layer, row in enumerate(mask):
        marks = "".join("#" if keep else "." for keep in row)
        print(f"{layer:>4} {marks}  " + " ".join(f"{score:5.2f}" for score in pattern.scores[layer]))
    print(ratio_cost(config, pattern, settings, ratio, context, device).against(costs[-1]))
    print(f"{'ratio':>6} {'heads':>6} {'cache MB':>10} {'read MB':>9} {'attention':>10}")
    for cost in costs[:: _STEPS // 10]:
        print(
            f"{cost.ratio:>6.0%} {cost.heads:>6} {cost.cache_bytes / 1e6:>10,.1f} {cost.read_bytes / 1e6:>9,.1f} "
            f"{cost.attention:>10.0%}"
        )
    if plot is not None:
        draw(pattern, mask, costs, ratio, plot)
        print(plot)
    return 0
