"""The panel about heads: other settings are previewed and used, a document is tested and the test stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page

from app.errors import UsageError
from tests.browser.conftest import Site, add, ask, state, until
from tests.browser.scripted import Script

pytestmark = pytest.mark.browser

Open = Callable[..., Page]
COSTS, NOTE = "#oc-costs", "#oc-use-note"


@pytest.fixture
def patterned(start_site: Callable[[Script], Site]) -> Site:
    return start_site(Script(chunk_s=0.15, token_s=0.02, patterned=True))


def opened(open_page: Open, site: Site) -> Page:
    page = open_page(site.url)
    state(page, "idle")
    page.click("#oc-heads > button")
    page.wait_for_selector("#oc-heads-picture .oc-heads-map", timeout=60_000)
    return page


def _bottom(page: Page, selector: str) -> float:
    box = page.locator(selector).bounding_box()
    assert box is not None
    return box["y"] + box["height"]


def asked_about(page: Page, path: Path) -> Page:
    """A page whose chat has asked about a document, which is in the library now."""
    state(page, "idle")
    add(page, path)
    state(page, "plan")
    ask(page, "What is the code word?")
    page.wait_for_selector(f"#oc-library .oc-item:has-text('{path.name}')")
    return page


def test_settings_are_previewed_then_used_behind_what_runs(
    patterned: Site, open_page: Open, texts: Callable[..., Path], tmp_path: Path
) -> None:
    page, other = opened(open_page, patterned), open_page(patterned.url)
    page.screenshot(path=str(tmp_path / "opened.png"))
    assert "In force" in page.inner_text(COSTS) and "As chosen" not in page.inner_text(COSTS)
    assert page.is_disabled("#oc-use")
    page.fill("#oc-heads-ratio input[type=number]", "0.2")
    page.press("#oc-heads-ratio input[type=number]", "Enter")
    until(lambda: "\t45\t18" in page.inner_text(COSTS))
    page.click("#oc-heads-kv label:has-text('8 bits')")
    until(lambda: "for everybody" in page.inner_text(NOTE) and page.is_enabled("#oc-use"))
    page.screenshot(path=str(tmp_path / "previewed.png"))
    add(other, texts("other.txt", "heron"))
    state(other, "plan")
    ask(other, "What is the code word?")
    state(other, "reading")
    page.click("#oc-use")
    until(lambda: "Waiting for the answers in front" in page.inner_text(NOTE))
    until(lambda: "in force now" in page.inner_text(NOTE), 60)
    until(lambda: "The code word is heron" in other.inner_text("#oc-chat .bot .prose"))  # nobody's answer was harmed
    settings = patterned.service.settings
    assert (settings.retrieval_ratio, settings.kv, settings.sink, settings.chunk) == (0.2, "kv8", None, None)
    assert page.is_disabled("#oc-use") and "\t18" in page.inner_text(COSTS)
    state(other, "idle")
    ask(other, "Once more?")
    until(lambda: other.locator("#oc-chat .bot .prose").count() == 2)


def test_a_model_that_is_opened_anew_is_seen_on_the_page_and_waited_for_by_a_self_test(
    patterned: Site, open_page: Open, texts: Callable[..., Path], tmp_path: Path
) -> None:
    patterned.script.chunk_s = 0.0
    page = opened(open_page, patterned)
    add(page, texts("tested.txt", "heron"))
    state(page, "plan")
    page.fill("#oc-heads-recent input", "300")
    until(lambda: page.is_enabled("#oc-use"))
    patterned.script.load_s = 5.0
    page.click("#oc-use")
    until(lambda: "Reading the weights" in page.inner_text(NOTE))
    page.click("#oc-self-test")
    until(lambda: "Begins once the model has been opened anew." in page.inner_text("#oc-depths"))
    page.keyboard.press("Escape")
    until(lambda: "Opening the model anew" in page.inner_text("#oc-strip"))
    assert "Reading the weights" in page.inner_text("#oc-strip")
    assert 0 < float(page.get_attribute("#oc-strip [role=progressbar]", "aria-valuenow") or 0) <= 100
    page.screenshot(path=str(tmp_path / "anew.png"))
    state(page, "plan")  # what stood there before
    page.click("#oc-heads > button")
    until(lambda: "planted facts found in tested.txt" in page.inner_text("#oc-depths"), 60)
    page.click("#oc-self-test-stop")


def test_the_title_stays_above_what_is_scrolled(patterned: Site, open_page: Open, tmp_path: Path) -> None:
    page = opened(open_page, patterned)
    page.set_viewport_size({"width": 1280, "height": 700})
    # Along the bar and down its middle, wherever the panel is scrolled to, there is nothing but the bar.
    over = """() => {
      const panel = document.querySelector("#oc-heads"), bar = panel.querySelector(".label-wrap");
      const found = new Set();
      for (panel.scrollTop = 0; ; panel.scrollTop += 9) {
        const { left, right, top, bottom } = bar.getBoundingClientRect();
        for (let x = left + 20; x < right - 16; x += 8)
          for (const y of [top + 4, (top + bottom) / 2, bottom - 2])
            if (!bar.contains(document.elementFromPoint(x, y))) found.add(document.elementFromPoint(x, y).textContent);
        if (panel.scrollTop + panel.clientHeight >= panel.scrollHeight - 1) return [...found];
      }
    }"""
    assert page.evaluate(over) == []
    page.screenshot(path=str(tmp_path / "scrolled.png"))
    for button in ("#oc-use", "#oc-self-test"):
        box = page.locator(button).bounding_box()
        assert box and box["height"] >= 32 and box["width"] < 300
    looks = "button => getComputedStyle(button).backgroundColor + getComputedStyle(button).opacity"
    before = page.locator("#oc-use").evaluate(looks)
    page.fill("#oc-heads-recent input", "300")
    until(lambda: page.is_enabled("#oc-use"))
    until(lambda: page.locator("#oc-use").evaluate(looks) != before)  # one that does nothing looks like it


def test_settings_that_cannot_be_are_told(patterned: Site, open_page: Open) -> None:
    page = opened(open_page, patterned)
    page.fill("#oc-heads-recent input", "")
    until(lambda: "Give a number" in page.inner_text(COSTS))
    assert page.is_disabled("#oc-use")
    share = "#oc-heads-ratio input[type=number]"
    page.fill("#oc-heads-recent input", "300")
    until(lambda: "As chosen" in page.inner_text(COSTS) and page.is_enabled("#oc-use"))
    for number in ("-1", "5"):
        page.fill(share, number)
        assert page.locator(share).evaluate("field => field.validationMessage")
    assert page.is_enabled("#oc-use") and page.locator(".toast-body").count() == 0  # what was chosen before
    page.fill(share, "0.2")
    until(lambda: "\t45\t18" in page.inner_text(COSTS))
    assert page.locator(".toast-body").count() == 0
    patterned.script.fail_load = UsageError("There is no room for this.")
    page.click("#oc-use")
    until(lambda: "There is no room for this." in page.inner_text(NOTE))
    assert not patterned.service.ready  # the settings before could not be had back either


def test_a_document_is_chosen_tested_and_the_test_stopped(
    patterned: Site, open_page: Open, texts: Callable[..., Path], tmp_path: Path
) -> None:
    patterned.script.chunk_s = 0.5  # so that a busy machine's page shows it reading
    page = opened(open_page, patterned)
    until(lambda: "Add a document first." in page.inner_text("#oc-self-test-none"))  # before anything is pressed
    page.click("#oc-self-test")
    until(lambda: "Add a document first." in page.inner_text("#oc-depths"))
    add(page, texts("first.txt", "heron"), texts("second.txt", "plover", 3))
    state(page, "plan")
    page.click("#oc-self-test-document input")
    page.click("[role=option]:has-text('second.txt')")
    page.click("#oc-self-test")
    until(lambda: "of 8: reading" in page.inner_text("#oc-depths"))
    page.wait_for_selector("#oc-depths .oc-lost", timeout=60_000)  # the script knows of no facts
    assert "second.txt" in page.inner_text("#oc-depths") and not page.is_visible("#oc-self-test")
    page.screenshot(path=str(tmp_path / "testing.png"))
    page.click("#oc-self-test-stop")
    until(lambda: "Stopped after" in page.inner_text("#oc-depths"))
    until(lambda: page.is_visible("#oc-self-test"))
    assert not patterned.service.busy
    page.click("#oc-self-test")
    until(lambda: page.locator("#oc-depths td:nth-child(2)").count() == 8, 120)
    assert page.inner_text("#oc-depths").startswith("0 of 8 planted facts found in second.txt")
    assert "may be overlooked" in page.inner_text("#oc-depths")
    until(lambda: _bottom(page, "#oc-depths") <= 900)  # in sight
    page.screenshot(path=str(tmp_path / "tested.png"))


def test_the_library_is_offered_and_the_panel_lies_over_the_page(
    patterned: Site, open_page: Open, texts: Callable[..., Path]
) -> None:
    patterned.script.chunk_s = 0.0
    page = asked_about(open_page(patterned.url), texts("kept.txt", "heron", 1))
    state(page, "idle")
    page.click("[data-do=fresh]:visible")
    page.wait_for_selector(".oc-welcome", state="visible")
    before = page.locator("#oc-welcome").bounding_box()
    page.click("#oc-heads > button")
    until(lambda: page.input_value("#oc-self-test-document input") == "kept.txt (library)")
    page.wait_for_selector("#oc-heads-picture .oc-heads-map", timeout=60_000)
    after = page.locator("#oc-welcome").bounding_box()
    assert before and after and after["height"] >= before["height"]  # nothing is squeezed
    numbers = page.locator("#oc-heads-numbers input")
    until(lambda: numbers.count() == 3 and all(number.is_visible() for number in numbers.all()))  # after the picture
    tops = [number.bounding_box()["y"] for number in numbers.all()]
    assert max(tops) - min(tops) < 1
    page.click("#oc-self-test")
    page.wait_for_selector("#oc-depths .oc-lost", timeout=60_000)
    page.click("#oc-self-test-stop")
    until(lambda: page.is_visible("#oc-self-test"))
    page.keyboard.press("Escape")
    until(lambda: not page.is_visible("#oc-self-test"))


def test_nothing_of_the_page_lies_over_the_panel_on_a_phone(patterned: Site, open_page: Open) -> None:
    page = open_page(patterned.url, viewport={"width": 390, "height": 600})
    state(page, "idle")
    ask(page, "What is the code word?")
    page.wait_for_selector("#oc-chat .bot .prose table")
    state(page, "idle")
    down = "#oc-chat .scroll-down-button-container"
    page.evaluate("document.querySelector('#oc-chat .bubble-wrap').scrollTop = 0")
    until(lambda: page.is_visible(down))
    page.click("#oc-heads > button")
    until(lambda: page.is_visible("#oc-self-test"))
    assert not page.is_visible(down)


def test_the_open_chats_document_is_tested_unless_another_was_chosen(
    patterned: Site, open_page: Open, texts: Callable[..., Path]
) -> None:
    patterned.script.chunk_s = 0.0
    page = asked_about(open_page(patterned.url), texts("earlier.txt", "heron"))
    state(page, "idle")
    page.click("[data-do=fresh]:visible")
    page.click("#oc-heads > button")
    chosen = "#oc-self-test-document input"
    until(lambda: page.input_value(chosen) == "earlier.txt (library)")
    page.keyboard.press("Escape")
    add(page, texts("newer.txt", "plover"))
    until(lambda: page.input_value(chosen).startswith("newer.txt"))
    page.click("#oc-heads > button")
    page.click(chosen)
    page.click("[role=option]:has-text('earlier.txt')")
    page.keyboard.press("Escape")
    add(page, texts("newest.txt", "egret"))
    state(page, "plan")
    page.click("#oc-heads > button")
    page.wait_for_timeout(500)
    assert page.input_value(chosen) == "earlier.txt (library)"


def test_a_closed_page_tests_no_further(patterned: Site, open_page: Open, texts: Callable[..., Path]) -> None:
    page = opened(open_page, patterned)
    add(page, texts("long.txt", "heron", 12))
    state(page, "plan")
    page.click("#oc-self-test")
    until(lambda: "Fact 1 of 8: reading" in page.inner_text("#oc-depths"))
    page.close()
    until(lambda: not patterned.service.busy, 10)
    reads = patterned.script.chunks
    page = opened(open_page, patterned)
    assert patterned.script.chunks == reads
