"""Texts as Markdown for the conversation: questions exactly as typed, answers without any HTML of their own."""

from __future__ import annotations

import re
from itertools import accumulate

from markdown_it import MarkdownIt
from markdown_it.token import Token

_SPECIAL = re.compile(r"[\\`*_{}\[\]()#+\-.!|~$>&<]")
# Fenced blocks, to the end where one is not closed yet, and code within a line.
_CODE = re.compile(
    r"^ {0,3}(?P<fence>`{3,}|~{3,})[^\n]*(?:\n.*?(?:^ {0,3}(?P=fence)[`~]*[ \t]*$|\Z)|\Z)"
    r"|(?<!`)(?P<ticks>`+)(?!`)[^\n]*?(?<!`)(?P=ticks)(?!`)",
    re.MULTILINE | re.DOTALL,
)
_TAG = re.compile(r"<(?=[A-Za-z/!?])")


def plain(text: str) -> str:
    """Markdown that shows a text exactly as it was typed.

    Marks become entities: a backslash before a bracket would make a formula of what is in it.
    """
    lines = (_SPECIAL.sub(lambda mark: f"&#{ord(mark[0])};", line) for line in text.split("\n"))
    return "\n".join(re.sub(r"^[ \t]+", lambda run: "&nbsp;" * len(run[0].expandtabs(4)), line) for line in lines)


def harmless(text: str) -> str:
    """A model's Markdown in which HTML is text like any other; the page's sanitiser sees none of it.

    Code stays as it is, since there a `<` is one already.
    """
    parts: list[str] = []
    at = 0
    for code in _CODE.finditer(text):
        parts += [_TAG.sub("&lt;", text[at : code.start()]), code[0]]
        at = code.end()
    return "".join(parts) + _TAG.sub("&lt;", text[at:])


# Blocks of Markdown as the page's own reader sees them; what is within them does not matter here.
_BLOCKS = MarkdownIt("commonmark").enable("table").disable("inline")
_DEFINITION = re.compile(r"^ {0,3}\[[^\]\n]+\]:", re.MULTILINE)  # a link's, which may serve any other block
_PIECE_CHARS = 2_000


class Pieces:
    """A growing text as pieces of whole blocks, made harmless: each but the last stays as it is whatever follows.

    The browser draws only what changed, so an answer of any length costs an update what its last piece costs.
    """

    def __init__(self) -> None:
        self._settled: list[str] = []
        self._text = ""  # what the settled pieces were made of
        self._look_at = 0  # length of the rest below which there is nothing to look for

    def of(self, text: str) -> list[str]:
        """The pieces of a text; cheap when it goes on where the last one ended."""
        if not text.startswith(self._text):
            self._settled, self._text, self._look_at = [], "", 0
        while len(rest := text[len(self._text) :]) >= max(self._look_at, _PIECE_CHARS):
            end = _cut(rest)
            # Blocks without an end are not read at each update.
            self._look_at = 0 if end else len(rest) + len(rest) // 4
            if end:
                self._settled.append(harmless(rest[:end]))
                self._text += rest[:end]
        return [*self._settled, harmless(rest)]


def _cut(rest: str) -> int | None:
    """Where a piece can end: before a block or item of a list that has ended too, so that none grows backwards."""
    if _DEFINITION.search(rest):
        return None
    ends = list(accumulate((len(line) + 1 for line in rest.split("\n")), initial=0))
    begins = [ends[token.map[0]] for token in _BLOCKS.parse(rest) if token.map and _begins(token)]
    for begin in begins[1:-1]:
        piece = rest[:begin]
        formulas = piece.count("$$") % 2 or piece.count("\\[") != piece.count("\\]")
        if begin >= _PIECE_CHARS and not formulas:
            return begin
    return None


def _begins(token: Token) -> bool:
    """Whether a piece can begin with this token of the block parser: a block, or an item of a list that is in none."""
    return token.nesting >= 0 and (token.level == 0 or (token.level == 1 and token.type == "list_item_open"))
