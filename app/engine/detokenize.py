"""Token ids to text, one at a time: whole characters only, and nothing of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol


class TokenBytes(Protocol):
    """What detokenising needs of a tokenizer: the UTF-8 bytes behind an id, empty for a control token."""

    strip_leading_space: bool

    def token_bytes(self, token_id: int) -> bytes: ...


class Detokenizer:
    """Turns one answer's ids into text; all parts joined equal the answer.

    Half a character waits for its other half. Text that may be the start of one of `stop` waits too; once a stop
    string is complete, `stopped` is true and the answer ends before it.
    """

    def __init__(self, tokenizer: TokenBytes, stop: Sequence[str] = ()) -> None:
        self._bytes_of = tokenizer.token_bytes
        self._strip = tokenizer.strip_leading_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._held = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """The text that this token completes."""
        if self.stopped:
            return ""
        text = self._utf8.decode(self._bytes_of(token_id))
        if self._strip and text:
            text, self._strip = text.removeprefix(" "), False
        return self._release(text) if self._stop else text

    def flush(self) -> str:
        """The text still held back at the end of the answer; half a character is dropped."""
        text, self._held = self._held, ""
        self._utf8.reset()
        return "" if self.stopped else text

    def _release(self, text: str) -> str:
        held = self._held + text
        found = [at for at in (held.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return held[: min(found)]
        keep = 0
        for length in range(min(self._longest - 1, len(held)), 0, -1):
            if any(stop.startswith(held[-length:]) for stop in self._stop):
                keep = length
                break
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]
