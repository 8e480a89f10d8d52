"""What the engine has done, and how long reading takes: a cost model fitted on the chunks that were read."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass, field
from typing import Any

_FADE = 0.97  # what stays of older chunks with each new one
_FORGET = 0.05  # what stays of older chunks when one took less than half of what they foretold
_COUNTING = threading.Lock()  # requests end in the worker, and in whatever thread cancels one that waits


@dataclass
class Totals:
    """Counts since the start: requests by how they ended ("failed" too), tokens, seconds on the device."""

    requests: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0

    def ended(self, how: str) -> None:
        """One more request ended; from any thread."""
        with _COUNTING:
            self.requests[how] = self.requests.get(how, 0) + 1

    def as_dict(self) -> dict[str, Any]:
        """A copy as plain values; from any thread."""
        with _COUNTING:
            return asdict(self)


class CostModel:
    """Seconds to read tokens: `linear * n + quadratic * n^2` over the context's length, from observed chunks.

    Old chunks fade, so the model follows the machine. `ratio` is quadratic / linear as the model's arithmetic suggests
    it; it stands in until chunks of different depth have been seen.
    """

    def __init__(self, ratio: float = 0.0) -> None:
        self._ratio = ratio
        self._count = 0
        self._xx = self._xy = self._yy = self._xt = self._yt = 0.0

    def observe(self, start: int, end: int, seconds: float) -> None:
        """Tokens `start` to `end` of a context took this long."""
        if end <= start:
            return
        # Per token, weighted by the square of tokens: what a small chunk costs beside them must not pass for their
        # price. And by depth: what is left is deeper still, and the first chunks cost less than the curve of the rest.
        y, t = float(end + start), seconds / (end - start)
        weight = y * (end - start) ** 2
        expected = self.seconds(start, end)
        # No machine is faster than it can be: what was slower before was other load, and says nothing any more.
        keep = _FORGET if expected is not None and seconds < expected / 2 else _FADE
        self._xx = keep * self._xx + weight
        self._xy = keep * self._xy + weight * y
        self._yy = keep * self._yy + weight * y * y
        self._xt = keep * self._xt + weight * t
        self._yt = keep * self._yt + weight * y * t
        self._count += 1

    def seconds(self, start: int, end: int) -> float | None:
        """Estimate for reading tokens `start` to `end`; None before anything was observed."""
        if not self._count:
            return None
        linear, quadratic = self._fit()
        return max(0, end - start) * (linear + quadratic * (start + end))

    def _fit(self) -> tuple[float, float]:
        spread = self._xx * self._yy - self._xy**2
        if self._count >= 4 and spread > 1e-3 * self._xx * self._yy:
            linear = (self._xt * self._yy - self._yt * self._xy) / spread
            quadratic = (self._yt * self._xx - self._xt * self._xy) / spread
            if linear >= 0 and quadratic >= 0:
                return linear, quadratic
        r = self._ratio
        linear = (self._xt + r * self._yt) / (self._xx + 2 * r * self._xy + r * r * self._yy)
        return linear, r * linear
