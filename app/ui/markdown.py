"""Texts as Markdown for the conversation: questions exactly as typed, answers without any HTML of their own."""

from __future__ import annotations

import re
from bisect import bisect_left
from operator import contains

from markdown_it import MarkdownIt
from markdown_it.token import Token

_SPECIAL = re.compile(r"[\\`*_{}\[\]()#+\-.!|~$>&<]")
_TAG = re.compile(r"<(?=[A-Za-z/!?])")
# Code that the page would draw a picture from, with any HTML that is in it.
_DRAWN = "mermaid"
# What is looked at within a line: escapes, backticks, links in brackets, what could open a tag or begin a picture.
_MARK = re.compile(
    r"\\(?P<escaped>.)|(?P<ticks>`+)|<(?P<link>https?://[^\s<>`\\]+)>|<(?=[A-Za-z/!?])|(?<=```)m(?=ermaid)",
    re.DOTALL,
)
# What the page takes for formulas, in its order, before it looks for code.
_FORMULAS = tuple(re.compile(form, re.DOTALL) for form in (r"\$\$.+?\$\$", r"\\\[.+?\\\]", r"\\\(.+?\\\)"))
_RUN = re.compile("```|~~~")
_ODD_LINE = re.compile(r"\]:\s*$|^[\s>]*([-*+]|\d+[.)])\s*$|\t")  # a link's definition, an item without text
_ODD_INFO = re.compile(r"[$\\<`~]")
# Blocks of Markdown without HTML, which an answer has none of; what is within them does not matter here.
BLOCKS = MarkdownIt("commonmark", {"html": False}).enable("table").disable("inline")


def plain(text: str) -> str:
    """Markdown that shows a text exactly as it was typed.

    Marks become entities: a backslash before a bracket would make a formula of what is in it.
    """
    lines = (_SPECIAL.sub(lambda mark: f"&#{ord(mark[0])};", line) for line in text.split("\n"))
    return "\n".join(re.sub(r"^[ \t]+", lambda run: "&nbsp;" * len(run[0].expandtabs(4)), line) for line in lines)


def harmless(text: str) -> str:
    """A model's Markdown in which HTML is text like any other; the page's sanitiser sees none of it.

    Where a block is code is asked of a Markdown parser, and the page's own one is left no doubt about it: fences are
    longer than any in them, and all other code that holds a tag becomes `<code>` without a single mark in it.
    """
    if not _TAG.search(text) and _DRAWN not in text:
        return text
    text = re.sub("\r\n?", "\n", text).replace("\0", "\ufffd")
    fences = not _formula_over_lines(text)
    lines, at, before, item = text.split("\n"), 0, "", ""
    parts: list[str] = []
    for token in BLOCKS.parse(text + "\n"):
        if token.type in ("fence", "code_block", "inline") and token.map and token.map[0] >= at:
            first, end = token.map
            parts += map(_line, lines[at:first])
            at, block = end, lines[first:end]
            if before in ("th_open", "td_open"):
                parts += ("".join(_line(cell, "\\|") for cell in re.split(r"((?<!\\)\|)", line)) for line in block)
            elif token.type == "inline":
                parts += _paragraph(block, token.content.split("\n"))
            elif fences and _is_plain(token, (item, *lines[max(0, first - 1) : first + 1])):
                parts += _fence(block, token)
            elif (
                _TAG.search(code := token.markup + token.info + token.content)
                or _DRAWN in code
                or (fences and _RUN.search(code))
            ):
                parts.append(_preformatted(block[0], token))
            else:
                parts += block
        elif token.type == "list_item_open" and token.map and not _ODD_LINE.search(item):
            item = lines[token.map[0]]
        before = token.type
    return "\n".join([*parts, *map(_line, lines[at:])])


def _formula_over_lines(text: str) -> bool:
    """Whether the page could take lines for a formula in which code begins or ends."""
    for form in _FORMULAS:
        if any("\n" in found[0] for found in form.finditer(text)):
            return True
        text = form.sub("", text)
    return False


def _is_plain(token: Token, around: tuple[str, ...]) -> bool:
    """Whether code is a fenced block that no parser takes for something else, given that it closes in time.

    `around`: a list item's first line (an odd one's if there is any), the line before the block, and its first line.
    """
    if token.type != "fence" or (token.level == 0 and around[-1].startswith(" ")):  # indented less than an item's text
        return False
    return not _ODD_INFO.search(token.info) and not any(map(_ODD_LINE.search, around))


def _fence(lines: list[str], token: Token) -> list[str]:
    """A fenced block behind marks longer than any in it; four at least: the page draws ```mermaid alone."""
    mark = token.markup[0]
    length = max([3, *map(len, re.findall(re.escape(mark) + "+", token.content))]) + 1
    indent = lines[0].index(token.markup)
    closed = len(lines) - 2 == token.content.count("\n")
    last = [lines[-1].rstrip().rstrip(mark) + mark * length] if closed else lines[-1:] if len(lines) > 1 else []
    return [lines[0][:indent] + mark * length + token.info, *lines[1:-1], *last]


def _preformatted(line: str, token: Token) -> str:
    """Code on one line; `line` is the first that it was written on, whose beginning may be a list's or a quote's."""
    if token.level == 0:
        ahead = ""
    elif token.type == "fence":
        ahead = line[: line.index(token.markup)]
    else:  # indented by four columns more
        code = token.content.split("\n", 1)[0].expandtabs(4)
        deep = 4 + len(code) - len(code.lstrip())
        ahead = re.sub(f" {{0,{deep}}}$", "", line[: line.rfind(code.strip())].expandtabs(4))
    return f"{ahead}<pre>{_code(token.content)}</pre>"


def _code(text: str) -> str:
    return "<code>" + re.sub(r"[^\w ]|_", lambda mark: f"&#{ord(mark[0])};", text) + "</code>"


def _paragraph(lines: list[str], content: list[str]) -> list[str]:
    """The lines of a paragraph or heading whose text the parser found to be `content`; no code spans two of them."""
    content = [own if own in line else own.lstrip() for line, own in zip(lines, content, strict=False)]
    if not all(map(contains, lines, content)):
        return [_line(line) for line in lines]
    found = [
        (line[: (begin := line.rfind(own))], line[begin + len(own) :])
        for line, own in zip(lines, content, strict=False)
    ]
    parts, at = [], 0
    for line in _line("\n".join(content)).split("\n"):
        merged = line.count("\0")
        parts.append(found[at][0] + line.replace("\0", "") + found[at + merged][1])
        at += merged + 1
    return parts + lines[len(content) :]


def _line(text: str, pipe: str = "|") -> str:
    """Text without tags; NULs tell how many lines code has joined. `pipe`: how code spells a `|` (which ends cells)."""
    runs: dict[int, list[int]] = {}
    for run in re.finditer("`+", text):
        runs.setdefault(len(run[0]), []).append(run.start())
    parts, at, look = [], 0, 0
    while mark := _MARK.search(text, look):
        look = mark.end()
        if mark["ticks"]:
            closing = runs.get(len(mark["ticks"]), [])
            which = bisect_left(closing, look)
            if which == len(closing):
                if len(mark["ticks"]) > 2:  # without other backticks on its line it could open a block
                    parts += [text[at : mark.start()], "&#96;" * len(mark["ticks"])]
                    at = look
                continue
            code, look = text[look : closing[which]], closing[which] + len(mark["ticks"])
            if not _TAG.search(code) and "\n" not in code and len(mark["ticks"]) < 3:
                continue
            shown = _code_span(code.replace(pipe, "|").replace("\n", " ")) + "\0" * code.count("\n")
        elif mark["escaped"]:
            shown = "&#60;" if mark["escaped"] == "<" else mark[0]
        else:
            shown = f"&#60;{mark['link']}&#62;" if mark["link"] else f"&#{ord(mark[0])};"
        parts += [text[at : mark.start()], shown]
        at = look
    return "".join([*parts, text[at:]])


def _code_span(text: str) -> str:
    padded = text[0] == text[-1] == " " and not text.isspace()
    return _code(text[1:-1] if padded else text)
