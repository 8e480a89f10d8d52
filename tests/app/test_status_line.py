"""What is told of long work on a terminal and in a log, and the time that is left."""

from __future__ import annotations

import io

from app.status_line import StatusLine, TimeLeft


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
    left = TimeLeft(clock)
    assert left.told(0.1) == ""
    clock.now += 10
    assert left.told(0.2) == ", 80 s left"
    for done in (0.3, 0.4, 0.5, 0.6, 0.7):  # slower from here on
        clock.now += 60
        told = left.told(done)
    assert told == ", 3 min left"
    assert left.told(1.0) == ""
