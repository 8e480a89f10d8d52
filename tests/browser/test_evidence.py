"""What an answer rests on, as a person sees it: cards, quotes, and the document's page behind a card."""

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
    assert page.inner_text(".oc-evidence summary") == "Rests on 1 passage \u00b7 1 of 2 quotes found in the documents"
    page.click(".oc-evidence summary")
    assert "code word is ochre" in page.inner_text(".oc-passage .oc-excerpt")
    assert page.inner_text(".oc-passage b").startswith("<b>notes.txt, page 4, line")
    assert "<b>notes.txt" in page.inner_text(".oc-quotes .oc-found")
    assert page.inner_text(".oc-quotes .oc-missing q") == "the ships were painted green"
    page.screenshot(path=tmp_path / "cards.png")
    page.click(".oc-passage")
    page.wait_for_selector("#oc-source mark:has-text('code word is ochre')")
    assert page.evaluate("document.querySelector('#oc-source').matches(':popover-open')")
    box = page.locator("#oc-source mark").bounding_box()
    assert box is not None and 0 <= box["y"] <= 844
    page.screenshot(path=tmp_path / "source.png")
    page.click("#oc-source [aria-label='Page before']")
    page.wait_for_selector("#oc-source:has-text('Page 3 of 4')")
    page.keyboard.press("Escape")
    page.wait_for_function("!document.querySelector('#oc-source')?.matches(':popover-open')")
    page.reload()
    page.wait_for_selector(".oc-evidence summary")
    page.click(".oc-evidence summary")
    ask(page, "Who says so?")
    page.wait_for_function("document.querySelectorAll('.oc-evidence').length === 2")
    assert page.evaluate("[...document.querySelectorAll('.oc-evidence')].map(box => box.open)") == [True, False]
