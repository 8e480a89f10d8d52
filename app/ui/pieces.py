"""A growing answer as pieces of Markdown, so that the browser draws only what is new."""

from __future__ import annotations

import re
from itertools import accumulate

from markdown_it.token import Token

from app.ui.markdown import BLOCKS, harmless

_DEFINITION = re.compile(r"^ {0,3}\[[^\]\n]+\]:", re.MULTILINE)  # a link's, which may serve any other block
_PIECE_CHARS = 2_000


class Pieces:
    """A growing text as pieces of whole blocks, made harmless: each but the last stays as it is whatever follows.

    The browser draws only what changed, so an answer of any length costs an update what its last piece costs. A table
    or block of code that is longer than a piece is continued in the next one while it grows.
    """

    def __init__(self) -> None:
        self._settled: list[str] = []
        self._text = ""  # what the settled pieces were made of
        self._head = ""  # what the rest goes on with: the head of a table, the first line of a block of code
        self._look_at = 0  # length of the rest below which there is nothing to look for

    def of(self, text: str, growing: bool = True) -> list[str]:
        """The pieces of a text; cheap when it goes on where the last one ended. Long blocks stay whole in one that has
        ended."""
        if not text.startswith(self._text):
            self._settled, self._text, self._head, self._look_at = [], "", "", 0
        while len(rest := self._head + text[len(self._text) :]) >= max(self._look_at, _PIECE_CHARS):
            end, tail, head = _cut(rest), "", ""
            if end is None and growing and len(rest) >= 2 * _PIECE_CHARS and (within := _within(rest)) is not None:
                end, tail, head = within
            # Blocks without an end are not read at each update.
            self._look_at = 0 if end else len(rest) + len(rest) // 4
            if end:
                self._settled.append(harmless(rest[:end] + tail))
                self._text += rest[len(self._head) : end]
                self._head = head
        return [*self._settled, harmless(rest)]


def _within(rest: str) -> tuple[int, str, str] | None:
    """Where a piece can end within a long last table or block of code: there, what ends it, and what the next begins
    with."""
    blocks = [token for token in BLOCKS.parse(rest) if token.map and token.nesting >= 0 and token.level == 0]
    lines = rest.split("\n")
    at = len(lines) - 3  # two whole lines stay for the next piece, which so is never an empty block
    if not blocks or blocks[-1].map is None:
        return None
    last, (begin, end) = blocks[-1], blocks[-1].map
    length = sum(len(line) + 1 for line in lines[:at])
    if end < at + 2 or at < begin + 3 or length < _PIECE_CHARS:
        return None
    if last.type == "table_open":
        return length, "", "".join(f"{line}\n" for line in lines[begin : begin + 2])
    if last.type == "fence" and not any(line.strip().startswith(last.markup) for line in lines[at:]):
        return length, f"{last.markup}\n", f"{lines[begin]}\n"
    return None


def _cut(rest: str) -> int | None:
    """Where a piece can end: before a block or item of a list that has ended too, so that none grows backwards."""
    if _DEFINITION.search(rest):
        return None
    ends = list(accumulate((len(line) + 1 for line in rest.split("\n")), initial=0))
    begins = [ends[token.map[0]] for token in BLOCKS.parse(rest) if token.map and _begins(token)]
    for begin in begins[1:-1]:
        piece = rest[:begin]
        formulas = piece.count("$$") % 2 or piece.count("\\[") != piece.count("\\]")
        if begin >= _PIECE_CHARS and not formulas:
            return begin
    return None


def _begins(token: Token) -> bool:
    """Whether a piece can begin with this token of the block parser: a block, or an item of a list that is in none."""
    return token.nesting >= 0 and (token.level == 0 or (token.level == 1 and token.type == "list_item_open"))
