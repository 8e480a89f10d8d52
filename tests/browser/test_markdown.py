"""Questions as typed and answers without HTML, as Markdown."""

from __future__ import annotations

import html
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from app.ui.markdown import harmless, plain
from app.ui.pieces import Pieces


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Zs", "Zl", "Zp"]), min_size=1))
def test_a_question_shows_as_it_was_typed(text: str) -> None:
    shown = MarkdownIt("commonmark").render(plain(text))
    assert html.unescape(shown) == f"<p>{text}</p>\n"


@pytest.mark.parametrize(
    "text", ["(1)", "[x] and \\(y\\)", "$$a$$", "# no *title*", "<b onclick=x>", "1. one", "a\n    b"]
)
def test_nothing_typed_is_markup(text: str) -> None:
    shown = MarkdownIt("commonmark").render(plain(text))
    assert html.unescape(shown).replace("\xa0", " ") == f"<p>{text}</p>\n"
    assert "\\(" not in plain(text)
    assert "\\[" not in plain(text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a <b>bold</b> word", "a &#60;b>bold&#60;/b> word"),
        ("1 < 2 and a<3", "1 < 2 and a<3"),
        ("use `<div>` here", "use <code>&#60;div&#62;</code> here"),
        ("``a ` <b>`` <i>", "<code>a &#96; &#60;b&#62;</code> &#60;i>"),
        ("a ` stray <b>\n\nnext ` line", "a ` stray &#60;b>\n\nnext ` line"),
        ("a `code <b>\nnext` line", "a <code>code &#60;b&#62; next</code> line"),
        ("> a `code\n> <b>` line\n> end", "> a <code>code &#60;b&#62;</code> line\n> end"),
        (r"\`<u id=zz>bold</u>\`", r"\`&#60;u id=zz>bold&#60;/u>\`"),
        (r"\<b> and \\<b>", r"&#60;b> and \\&#60;b>"),
        ("```html\n<p>\n```\n<p>", "````html\n<p>\n````\n&#60;p>"),
        ("```\n<p> still open", "````\n<p> still open"),
        ("~~~\n<p>\n~~~\n<!-- x -->", "~~~~\n<p>\n~~~~\n&#60;!-- x -->"),
        ("````\n```\n<p>\n````\n<p>", "````\n```\n<p>\n````\n&#60;p>"),
        ("```\n<p>\n```~\n<b>\n```", "````\n<p>\n```~\n<b>\n````"),
        ("- ```\n  <p>\n  ```\n<p>", "- ````\n  <p>\n  ````\n&#60;p>"),
        ("1. ```\n   ls\n   ```\n\nUse the <title> tag", "1. ````\n   ls\n   ````\n\nUse the &#60;title> tag"),
        ("a\n\n    <p>\n    b", "a\n\n<pre><code>&#60;p&#62;&#10;b&#10;</code></pre>"),
        ("- a\n\n      <p>", "- a\n\n  <pre><code>&#60;p&#62;&#10;</code></pre>"),
        ("```mermaid\n<form>\n```", "````mermaid\n<form>\n````"),
        ("$$\n```\n$$\n<p>\n```", "$$\n<pre><code>&#36;&#36;&#10;&#60;p&#62;&#10;</code></pre>"),
        ("> quote <q>", "> quote &#60;q>"),
        ("<https://example.org>", "&#60;https://example.org&#62;"),
        ("|a|b|\n|-|-|\n|`<p> \\| q`|<q>|", "|a|b|\n|-|-|\n|<code>&#60;p&#62; &#124; q</code>|&#60;q>|"),
    ],
)
def test_html_of_an_answer_is_text(text: str, shown: str) -> None:
    assert harmless(text) == shown


PARTS = (
    "`", "``", "```", "````", "~~~", "```\n", "\n```\n", "```html\n", "```mermaid\n", "```~\n", "\n", "\n\n", "\n",
    " ", "  ", "   ", "    ", "\t",
    "- ", "* ", "1. ", "> ", "# ", "<b>", "</b>", "<div\n", "<!--", "-->", "<?x", "<a href='`'>",
    "<title>", "\n<div>\n", "\n    <i>\n", "\\", "|", "\n|-|-|\n", "\\|", "a", "b c", "*", "$$", "\\(", "\\)",
    "\\[", "\\]",    "---", "\n===\n", "&lt;", "[a]: ", "[a]", "\r", "<https://a.b>", "%%%", "$",
)  # fmt: skip


@settings(max_examples=1500, deadline=None)
@given(st.lists(st.sampled_from(PARTS), max_size=30).map("".join))
def test_an_answer_shows_as_if_there_were_no_html(text: str) -> None:
    shown = harmless(text)
    with_html = MarkdownIt("commonmark").enable("table")
    for token in with_html.parse(shown):
        if token.type == "html_block":
            assert re.fullmatch(r"<pre><code>[\w &#;]*</code></pre>\n?", token.content.lstrip(" "))
        for part in token.children or ():
            assert part.type != "html_inline" or part.content in ("<code>", "</code>")
    without = MarkdownIt("commonmark", {"html": False}).enable("table")
    for markdown in (with_html, without):
        markdown.disable(["autolink", "link", "image"])
    assert _words(with_html.render(shown)) == _words(without.render(text + "\n"))


def _words(page: str) -> str:
    page = re.sub(r' class="language-[^"]*"', "", html.unescape(page)).strip()
    return re.sub(r"\s+(?=<)", "", page)


@pytest.mark.parametrize(
    "unit",
    [
        "`",
        "``` ",
        "<",
        "<a ",
        "<b>`",
        "- ",
        "> <b>",
        "1. ```\n<b>",
        "- `<b>\n",
        "\\`<b>``",
        "$$<b>\n",
        "|<b>`",
        "```\n",
        "~~~\n`",
        "` `` ",
    ],
)
def test_hostile_answers_take_no_time(unit: str) -> None:
    before = time.monotonic()
    harmless(unit * (40_000 // len(unit)))
    assert time.monotonic() - before < 2


TABLE = ["| ship | tons |", "|---|---|", *(f"| ship {n} | {n} |" for n in range(2000))]
CODE = ["```python", *(f"ships[{n}] = 'a ship with a name'" for n in range(2000)), "```"]


@pytest.mark.parametrize(("lines", "cell"), [(TABLE, "ship {} |"), (CODE, "ships[{}] =")])
def test_a_long_block_that_grows_is_drawn_in_pieces(lines: list[str], cell: str) -> None:
    pieces, before, text = Pieces(), [""], "Before it.\n\n"
    for number, line in enumerate([*lines, "", "And after it."]):
        text += line + "\n"
        if number % 7 == 0:
            now = pieces.of(text)
            assert now[: len(before) - 1] == before[:-1]  # what is settled stays
            before = now
    now = pieces.of(text)
    assert max(map(len, now)) < 6_000
    joined = "".join(now)
    assert all(joined.count(cell.format(n)) == 1 for n in range(2000))
    for piece in now:  # each is a whole block of its own
        shown = MarkdownIt("commonmark").enable("table").render(piece)
        assert shown.count("<table>") == piece.count("| ship | tons |")
        assert piece.count("```") % 2 == 0
    assert "".join(Pieces().of(text, growing=False)) == text
    assert "And after it." in now[-1]


@pytest.mark.parametrize("text", ["| a | b |\n|---|---|\n" + "x" * 9000, "```\n" * 3000, "~~~\n" + "`\n" * 5000])
def test_odd_long_blocks_lose_nothing(text: str) -> None:
    pieces = Pieces()
    for end in range(0, len(text), 500):
        pieces.of(text[:end])
    joined = "".join(pieces.of(text))
    assert joined.count("x") == text.count("x")
    assert len(joined) >= len(text)
