"""`python -m app heads`, and what a ratio costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from app.__main__ import main
from app.config import Settings
from app.embedded import embedded_model_path
from app.head_costs import Heads, ratio_cost
from app.model import choose_pattern, find_model, plan_context
from app.ui.heads import cost_table
from models.cache.duo import DuoCache
from models.cache.pool import BlockPool
from models.cache.shape import BLOCK, CacheShape
from models.checkpoint import open_checkpoint

CPU = torch.device("cpu")


def test_table_curve_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["heads", "--model", "embedded", "--plot", str(tmp_path / "heads.png")]) == 0
    out = capsys.readouterr().out
    rows = [
        line.split()[1] for line in out.splitlines() if line[:4].strip().isdigit() and set(line.split()[1]) <= {*"#."}
    ]
    assert len(rows) == 30 and "".join(rows).count("#") == 45
    assert "50%: 45 heads keep everything" in out
    assert (tmp_path / "heads.png").read_bytes().startswith(b"\x89PNG")


def test_by_count_and_threshold(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["heads", "--model", "embedded", "--count", "9"]) == 0
    assert "10%: 9 heads" in capsys.readouterr().out
    assert main(["heads", "--model", "embedded", "--threshold", "0.9"]) == 0
    assert "9 heads keep everything" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--count", "1", "--threshold", "1"], 2, "not both"),
        (["--count", "91"], 1, "from 0 to 90"),
        (["--plot", "/nowhere/heads.png"], 2, "no directory /nowhere"),
    ],
)
def test_wrong_usage(flags: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["heads", "--model", "embedded", *flags]) == code
    assert message in capsys.readouterr().err


def test_costs_are_those_of_the_cache() -> None:
    settings = Settings(model="embedded")
    config = open_checkpoint(embedded_model_path()).config
    pattern, _ = choose_pattern(find_model(settings), settings)
    assert pattern is not None
    half, full = (ratio_cost(config, pattern, settings, ratio, 4096, CPU) for ratio in (0.5, 1.0))
    mask = pattern.retrieval_mask(0.5)
    shape = CacheShape.for_model(config, mask, "kv4", pattern.sink, pattern.recent, CPU)
    cache = DuoCache(BlockPool(shape, 40, CPU))
    cache.reserve(4096)
    real = cache.retrieval_bytes + cache.streaming_bytes
    assert half.cache_bytes == pytest.approx(real + BLOCK * shape.bytes_per_token)  # the plan counts whole contexts
    assert (half.heads, full.heads, full.attention) == (45, 90, 1.0)
    # 45 heads see all, 45 see a window w: of 4096 tokens' pasts, w (w + 1) / 2 + (4096 - w) w of 4096 * 4097 / 2
    w = pattern.sink + pattern.recent
    assert half.attention == pytest.approx(0.5 + 0.5 * (w * (w + 1) / 2 + (4096 - w) * w) / (4096 * 4097 / 2))
    assert "-" in half.against(full)


def test_other_settings_cost_what_the_plan_says() -> None:
    settings = Settings(model="embedded")
    pattern, _ = choose_pattern(find_model(settings), settings)
    assert pattern is not None
    heads = Heads(open_checkpoint(embedded_model_path()).config, pattern, settings, CPU)
    costs = {cost.flags: cost for cost in heads.other_settings(8192, 2048)}
    assert [flags for flags, cost in costs.items() if cost.in_force] == [
        "--kv kv4",
        f"--sink-tokens {pattern.sink}",
        f"--recent {pattern.recent}",
        "--chunk 2048",
    ]
    assert len({cost.total_bytes for cost in costs.values() if cost.in_force}) == 1
    plan, _, _ = plan_context(replace(settings, chunk=2048), 8192, gpu=False)
    now, wide = costs["--kv kv4"], costs["--kv bf16"]
    assert (now.total_bytes, now.bytes_per_token) == (plan.total_bytes, plan.bytes_per_token)
    assert wide.bytes_per_token > costs["--kv kv8"].bytes_per_token > now.bytes_per_token
    for more in (f"--sink-tokens {2 * pattern.sink}", f"--recent {2 * pattern.recent}", "--chunk 4096"):
        assert costs[more].total_bytes > now.total_bytes
        assert costs[more].bytes_per_token == now.bytes_per_token
    table = cost_table(list(costs.values()), 8192)
    assert table.count("(in force)") == 4 and "8,192 tokens" in table and "--kv kv8" in table


def test_the_page_previews_before_a_ratio_is_applied() -> None:
    settings = Settings(model="embedded")
    pattern, _ = choose_pattern(find_model(settings), settings)
    assert pattern is not None
    heads = Heads(open_checkpoint(embedded_model_path()).config, pattern, settings, CPU)
    assert "50%: 45 heads" in heads.preview(0.5, 8192) and "the same" in heads.preview(0.5, 8192)
    assert "20%: 18 heads" in heads.preview(0.2, 8192) and "-40 %" in heads.preview(0.2, 8192)
    assert heads.picture(8192).startswith(b"\x89PNG")
