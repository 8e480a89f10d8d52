"""Questions as typed and answers without HTML, as Markdown."""

from __future__ import annotations

import html
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from app.ui.markdown import harmless, plain


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
        ("a <b>bold</b> word", "a &lt;b>bold&lt;/b> word"),
        ("1 < 2 and a<3", "1 < 2 and a<3"),
        ("use `<div>` here", "use `<div>` here"),
        ("``a ` <b>`` <i>", "``a ` <b>`` &lt;i>"),
        ("a ` stray <b>\nnext ` line", "a ` stray &lt;b>\nnext ` line"),
        ("```html\n<p>\n```\n<p>", "```html\n<p>\n```\n&lt;p>"),
        ("```\n<p> still open", "```\n<p> still open"),
        ("~~~\n<p>\n~~~\n<!-- x -->", "~~~\n<p>\n~~~\n&lt;!-- x -->"),
        ("````\n```\n<p>\n````\n<p>", "````\n```\n<p>\n````\n&lt;p>"),
        ("> quote <q>", "> quote &lt;q>"),
    ],
)
def test_html_of_an_answer_is_text(text: str, shown: str) -> None:
    assert harmless(text) == shown


@pytest.mark.parametrize("unit", ["`", "``` ", "<", "<a ", "```\n", "~~~\n`", "` `` "])
def test_hostile_answers_take_no_time(unit: str) -> None:
    before = time.monotonic()
    harmless(unit * (40_000 // len(unit)))
    assert time.monotonic() - before < 2
