"""Numbers that a command's flags take: a value that can be none is refused before anything is loaded."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable

TOKENS = 2**40  # more than any text has
_TIMES = 10**6  # of anything that is done one after the other; more was mistyped


def whole(least: int, most: int = _TIMES) -> Callable[[str], int]:
    """A flag's type: a whole number from `least` to `most`."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ArgumentTypeError(f"is {text[:40]!r}; it must be a whole number") from None
        if not least <= value <= most:
            raise ArgumentTypeError(f"is {text[:40]}; it must be a whole number from {least:,} to {most:,}")
        return value

    return number
