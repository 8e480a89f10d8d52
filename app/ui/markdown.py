"""Texts as Markdown for the conversation: questions exactly as typed, answers without any HTML of their own."""

from __future__ import annotations

import re

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
