"""Where the model looked for an answer, as a person sees it: cards, quotes, and the document's page behind a card."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page

from tests.browser.conftest import Site, add, ask, state

pytestmark = pytest.mark.browser

QUOTING = 'It says "Remember: the code word is {word}." and also "the ships were painted green".'


@pytest.mark.parametrize(("scheme", "width"), [("light", 1440), ("dark", 390)])
def test_cards_lead_to_the_place_in_the_document(
    site: Site, open_page: Callable[..., Page], texts: Callable[..., Path], tmp_path: Path, scheme: str, width: int
) -> None:
    page = open_page(site.url, viewport={"width": width, "height": 844}, color_scheme=scheme)
    state(page, "idle")
    site.script.answer = QUOTING
    add(page, texts("<b>notes.txt", "ochre", 12))
    ask(page, "What is the code word?")
    page.wait_for_selector(".oc-evidence summary")
    assert page.inner_text(".oc-evidence summary") == "Looked at 1 passage \u00b7 1 of 2 quotes found in the documents"
    page.click(".oc-evidence summary")
    assert "code word is ochre" in page.inner_text(".oc-passage .oc-excerpt")
    assert page.inner_text(".oc-passage b").startswith("<b>notes.txt, page 4, line")
    assert "<b>notes.txt" in page.inner_text(".oc-quotes .oc-found")
    assert page.inner_text(".oc-quotes .oc-missing q") == "the ships were painted green"
    assert "attention" in (page.get_attribute(".oc-passage", "title") or "")
    assert "share of the attention" in page.inner_text(".oc-about")
    assert page.inner_text(".oc-excerpt mark") == "Remember: the code word is ochre."
    page.screenshot(path=tmp_path / "cards.png")
    page.click(".oc-passage")
    page.wait_for_selector("#oc-source mark:has-text('code word is ochre')")
    assert page.evaluate("document.querySelector('#oc-source').matches(':popover-open')")
    page.wait_for_selector(".oc-passage[aria-current=true]", state="attached")
    box = page.locator("#oc-source mark").bounding_box()
    assert box is not None and 0 <= box["y"] <= 844
    page.screenshot(path=tmp_path / "source.png")
    page.click("#oc-source [aria-label='Page before']")
    page.wait_for_selector("#oc-source:has-text('Page 3 of 4')")
    page.keyboard.press("Escape")
    page.wait_for_function("!document.querySelector('#oc-source')?.matches(':popover-open')")
    page.wait_for_selector(".oc-passage[aria-current]", state="detached")
    page.reload()
    page.wait_for_selector(".oc-evidence summary")
    page.click(".oc-evidence summary")
    ask(page, "Who says so?")
    page.wait_for_function("document.querySelectorAll('.oc-evidence').length === 2")
    assert page.evaluate("[...document.querySelectorAll('.oc-evidence')].map(box => box.open)") == [True, False]


SEVERAL = """The note says "Remember: the **code word** is {word}." twice:

> Remember: the code word
> is {word}.

<span class="oc-quote oc-found" role="button" tabindex="0" data-do="source" data-value="q0">bait</span> It is not said
that "nobody remembers the word", nor is Remember: the code word is {word}, without marks, a quote."""


def test_quotes_are_marked_where_they_stand(
    site: Site, open_page: Callable[..., Page], texts: Callable[..., Path], tmp_path: Path
) -> None:
    page = open_page(site.url)
    state(page, "idle")
    site.script.answer = SEVERAL
    add(page, texts("<i>marks.txt", "teal", 12))
    ask(page, "What is the code word?")
    page.wait_for_selector("#oc-chat .oc-quote")
    found, missing = page.locator("#oc-chat .oc-quote.oc-found"), page.locator("#oc-chat .oc-quote.oc-missing")
    where = "Found in <i>marks.txt, page 4, line 14"
    assert "".join(found.all_text_contents()[:3]) == f"Remember: the code word is teal ({where})"
    assert found.count() == 3 + 2  # around the emphasis, and the two lines of the block
    assert found.first.get_attribute("title") == where
    assert missing.all_text_contents() == ["nobody remembers the word (Not found in the documents)"]
    assert page.locator("#oc-chat .bot [role=button]").count() == 2  # one each, none from the answer itself
    page.screenshot(path=tmp_path / "quotes.png")
    found.nth(1).click()
    page.wait_for_selector("#oc-source:popover-open mark:has-text('Remember: the code word is teal')")
    page.keyboard.press("Escape")
    page.wait_for_selector("#oc-source:popover-open", state="detached")
    page.locator("#oc-chat .bot [role=button]").last.focus()  # a quote is one stop for the keyboard
    page.keyboard.press("Enter")
    page.wait_for_selector("#oc-source:popover-open mark")
    page.keyboard.press("Escape")
    page.wait_for_selector("#oc-source:popover-open", state="detached")
    page.click("#oc-chat .bot >> text=bait")
    page.wait_for_timeout(300)
    assert not page.query_selector("#oc-source:popover-open")
