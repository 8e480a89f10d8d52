"""`python -m app heads`, and what a ratio costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.__main__ import main
from app.config import Settings
from app.embedded import embedded_model_path
from app.engine.sizing import resolve_shape
from app.evaluation.selftest import Seen
from app.head_costs import Heads, ratio_cost
from app.model import choose_pattern, find_model, plan_context
from app.ui.heads import comparison, what_is_kept
from app.ui.heads_map import heads_map
from app.ui.selftest import depth_chart
from models.cache.duo import DuoCache
from models.cache.pool import BlockPool
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
        (["--count", "91"], 2, "from 0 to 90"),
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
    shape = resolve_shape(config, pattern, settings, CPU)[1]
    assert sum(shape.wide_heads) == 11  # as the pattern asks for
    cache = DuoCache(BlockPool(shape, 80, CPU))
    cache.reserve(4096)
    real = cache.retrieval_bytes + cache.streaming_bytes
    unpacked = 4096 - shape.packed_blocks(4096) * shape.block  # the plan counts whole contexts
    assert half.cache_bytes == pytest.approx(real + unpacked * shape.bytes_per_token)
    assert (half.heads, full.heads, full.attention) == (45, 90, 1.0)
    # 45 heads see all, 45 see a window w: of 4096 tokens' pasts, w (w + 1) / 2 + (4096 - w) w of 4096 * 4097 / 2
    w = pattern.sink + pattern.recent
    assert half.attention == pytest.approx(0.5 + 0.5 * (w * (w + 1) / 2 + (4096 - w) * w) / (4096 * 4097 / 2))
    assert "-" in half.against(full)


def embedded_heads(settings: Settings) -> Heads:
    pattern, _ = choose_pattern(find_model(settings), settings)
    assert pattern is not None
    return Heads(open_checkpoint(embedded_model_path()).config, pattern, settings, CPU)


def test_other_settings_cost_what_the_plan_says() -> None:
    settings = Settings(model="embedded")
    heads = embedded_heads(settings)

    def rows(**values: Any) -> dict[str, tuple[str, str]]:
        return {what: (now, then) for what, now, then in heads.compare(replace(settings, **values), 8192, 2048)}

    plan, _, _ = plan_context(replace(settings, chunk=2048), 8192, gpu=False)
    same = rows()
    assert same["Heads that keep everything"] == ("45", "45")
    assert same["Of these in 8 bits, not 4"] == ("11", "11")
    assert rows(kv="kv8", kv_bits=None)["Of these in 8 bits, not 4"] == ("11", "45")
    assert same["Weights, workspace and cache of 8,192 tokens"] == (f"{plan.total_bytes / 1e6:,.0f} MB",) * 2
    assert same["One more token of cache"] == (f"{plan.bytes_per_token:,} bytes",) * 2
    wide, _, _ = plan_context(replace(settings, chunk=2048, kv="bf16"), 8192, gpu=False)
    change = (wide.total_bytes / plan.total_bytes - 1) * 100
    assert (
        rows(kv="bf16")["Weights, workspace and cache of 8,192 tokens"][1]
        == f"{wide.total_bytes / 1e6:,.0f} MB ({change:+.0f} %)"
    )
    total, token = "Weights, workspace and cache of 8,192 tokens", "One more token of cache"
    sink, recent = heads.window
    for more in ({"sink": 50 * (sink + 1)}, {"recent": 2 * recent}, {"chunk": 4096}):
        assert rows(**more)[total][1].endswith("%)") and "+" in rows(**more)[total][1]
        assert rows(**more)[token] == same[token]
    assert rows(retrieval_ratio=0.2)["Heads that keep everything"] == ("45", "18")
    assert "(-61 %)" in rows(retrieval_ratio=0.2)[token][1]


def test_the_page_previews_before_settings_are_used() -> None:
    settings = Settings(model="embedded")
    heads = embedded_heads(settings)
    now = comparison(heads, settings, 8192, 2048)
    assert "In force" in now and "As chosen" not in now and "<td>45</td>" in now
    then = comparison(heads, replace(settings, retrieval_ratio=0.2, kv="kv8"), 8192, 2048)
    assert "As chosen" in then and "<td>45</td><td>18</td>" in then
    assert heads_map(heads).count('<i class="oc-full" style') == 45


def test_endless_mode_and_models_without_a_pattern_are_told_too() -> None:
    config = open_checkpoint(embedded_model_path()).config
    endless = Heads(config, None, Settings(model="embedded", mode="endless"), CPU)
    assert endless.window == (4, 2044)
    rows = {what: then for what, _, then in endless.compare(replace(endless.settings, recent=1020), 2048, 2048)}
    assert "Heads that keep everything" not in rows and "(-50 %)" in rows["Cache of 2,048 tokens"]
    plain = Heads(config, None, Settings(model="embedded"), CPU)
    rows = {what: then for what, _, then in plain.compare(replace(plain.settings, kv="bf16"), 2048, 2048)}
    assert rows["Arithmetic of attention in reading"] == "100% of all heads full"


def test_the_panel_speaks_of_full_heads_only_where_there_are_some() -> None:
    config = open_checkpoint(embedded_model_path()).config
    endless = Heads(config, None, Settings(model="embedded", mode="endless"), CPU)
    told = comparison(endless, endless.settings, 2048, 2048)
    assert "Cache of 2,048 tokens" in told and "heads full" not in told
    assert "Every head keeps the beginning and the newest" in what_is_kept(endless)
    examiner = SimpleNamespace(settings={"mode": "endless"})
    test: Any = SimpleNamespace(examiner=examiner, count=1, tokens=9, of=9)
    assert "endless mode keeps the newest words only" in depth_chart(test, "a.txt", [Seen(0.0, False, "?")], "")
    plain = Heads(config, None, Settings(model="embedded"), CPU)
    assert "heads full" in comparison(plain, plain.settings, 2048, 2048)
    assert "Every head of this model keeps everything" in what_is_kept(plain)
    assert "Some heads" in what_is_kept(embedded_heads(plain.settings))
