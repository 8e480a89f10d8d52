"""What is told of long work on a terminal and in a log, and the time that is left."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest

from app.engine.types import Progress
from app.status_line import StatusLine, TimeLeft, left
from app.ui.selftest import _where
from app.words import duration


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_a_line_every_ten_seconds_and_none_for_short_work() -> None:
    out, clock = io.StringIO(), Clock()
    status = StatusLine(out, clock)
    for second in range(0, 35, 3):
        clock.now = 100.0 + second
        status.show(f"Quantising {second}%")
    status.clear()
    assert out.getvalue() == "octavo: Quantising 12%\noctavo: Quantising 24%\n"


def test_a_terminal_shows_one_line_that_goes() -> None:
    out = Terminal()
    status = StatusLine(out)
    status.show("first")
    status.show("second")
    status.clear()
    assert out.getvalue() == "\r\x1b[Kfirst\r\x1b[Ksecond\r\x1b[K"


def test_time_left_follows_the_last_steps() -> None:
    clock = Clock()
    remaining = TimeLeft(clock)
    assert remaining.told(0.1) == ""
    clock.now += 10
    assert remaining.told(0.2) == ", 80 s left"
    for done in (0.3, 0.4, 0.5, 0.6, 0.7):  # slower from here on
        clock.now += 60
        told = remaining.told(done)
    assert told == ", 3 min left"
    assert remaining.told(1.0) == ""


@pytest.mark.parametrize(
    ("seconds", "told"), [(0.2, "1 s"), (95, "95 s"), (150, "2 min"), (7500, "2 h 05 min"), (200_000, "55 h 33 min")]
)
def test_terminal_and_page_tell_a_time_alike(seconds: float, told: str) -> None:
    assert duration(seconds) == told
    assert left(seconds) == f", {told} left"
    examiner = SimpleNamespace(at=Progress(1, 2, 0, 1.0, seconds))
    test: Any = SimpleNamespace(count=4, examiner=examiner)
    where = _where(test, [])
    assert where.endswith(f", {told} left." if seconds >= 1 else "1 of 2 tokens.")
