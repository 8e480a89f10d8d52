"""Milliseconds a token over context, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw(steps: dict[str, Any], limit: float, path: Path | None) -> None:
    """This project's step, the other designs and the limit of the bandwidth (TB/s), as SVG; nothing without a path."""
    if path is None:
        return
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "octavo"
    figure, axes = pyplot.subplots(figsize=(7.2, 4.2), layout="constrained")
    ours, dense, expanded = steps["ms"], steps["dense_ms"], steps["expanded_ms"]
    million = 1e6
    axes.plot([n / million for n in dense], list(dense.values()), "s-", color="#b0413e", label="bf16, full attention")
    axes.plot([n / million for n in expanded], list(expanded.values()), "^", color="#8a6d3b", label="4 bits, expanded")
    axes.plot([n / million for n in ours], list(ours.values()), "o-", color="#1f5fa8", label="Octavo")
    at = [0, max(ours)]
    floor = [(steps["weight_bytes"] + steps["bytes_a_token"] * n) / limit / 1e9 for n in at]
    axes.plot([n / million for n in at], floor, ":", color="#555555", label=f"its bytes at {limit:.2f} TB/s")
    axes.set(xlabel="context, million tokens", ylabel="ms a token", xlim=(0, 4.4), ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, format="svg", metadata={"Date": None})
