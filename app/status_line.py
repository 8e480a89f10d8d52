"""How far a long piece of work is, on stderr: one line written over on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

from app.words import duration

_EVERY_S = 10.0  # between two lines where there is no terminal: a log shows that something goes on


class StatusLine:
    """Shows the newest of many messages."""

    def __init__(self, out: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._clock = clock
        self._shown = False
        self._told_at = clock()

    def show(self, text: str) -> None:
        """Replace the line; elsewhere than on a terminal, write it if the last one is some seconds old."""
        if self._out.isatty():
            self._out.write(f"\r\x1b[K{text}")
            self._shown = True
        elif self._clock() - self._told_at >= _EVERY_S:
            self._out.write(f"octavo: {text}\n")
            self._told_at = self._clock()
        else:
            return
        self._out.flush()

    def clear(self) -> None:
        """Take the line away."""
        if self._shown:
            self._out.write("\r\x1b[K")
            self._out.flush()
            self._shown = False


class TimeLeft:
    """How long a piece of work will still take, judged by its last steps."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._steps: deque[tuple[float, float]] = deque(maxlen=6)

    def told(self, done: float) -> str:
        """Such as ", 4 min left" for a share done from 0 to 1; "" while nothing is known."""
        now = self._clock()
        self._steps.append((now, done))
        began_at, before = self._steps[0]
        if not before < done < 1:
            return ""
        return left((now - began_at) * (1 - done) / (done - before))


def left(seconds: float) -> str:
    """Such as ", 4 min left"."""
    return f", {duration(seconds)} left"
