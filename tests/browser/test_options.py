"""The settings of a chat, as a person changes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page

from tests.browser.conftest import Site, ask, state

pytestmark = pytest.mark.browser


@pytest.mark.parametrize(("scheme", "width"), [("light", 1440), ("dark", 390)])
def test_settings_are_kept_with_the_chat(
    site: Site, open_page: Callable[..., Page], tmp_path: Path, scheme: str, width: int
) -> None:
    page = open_page(site.url, viewport={"width": width, "height": 844}, color_scheme=scheme)
    state(page, "idle")
    page.click("[data-do=options]")
    page.wait_for_selector("#oc-options:popover-open")
    assert page.inner_text("#oc-options [aria-pressed=true] b") == "Exact"
    page.click("#oc-options .oc-preset:has-text('Balanced')")
    page.fill("#oc-options textarea", "Answer in one word.")
    page.click("#oc-options summary")
    page.fill("#oc-options [name=max_new_tokens]", "3")
    page.locator("#oc-options").evaluate("dialog => { dialog.scrollTop = 180; }")
    page.screenshot(path=tmp_path / "settings.png")
    covers = """bar => {
      const dialog = bar.closest("#oc-options");
      const [box, around] = [bar, dialog].map((part) => part.getBoundingClientRect());
      const fade = getComputedStyle(bar, "::before");
      return [Math.round(box.left - around.left - dialog.clientLeft), Math.round(box.width - dialog.clientWidth),
              fade.backgroundImage.startsWith("linear-gradient"), parseFloat(fade.height) >= 20];
    }"""
    assert page.locator(".oc-form-end").evaluate(covers) == [0, 0, True, True]  # nothing is seen cut above or beside it
    page.click("#oc-options [type=submit]")
    page.wait_for_selector("#oc-options", state="detached")
    ask(page, "What is the code word?")
    page.wait_for_selector("#oc-chat .bot-row .oc-note:has-text('limit')")
    page.reload()
    state(page, "idle")
    page.click("[data-do=options]")
    page.wait_for_selector("#oc-options:popover-open")
    assert page.inner_text("#oc-options [aria-pressed=true] b") == "Balanced"
    assert page.is_disabled("#oc-options textarea")
    assert page.input_value("#oc-options textarea") == "Answer in one word."
    page.click("#oc-options summary")
    assert page.input_value("#oc-options [name=max_new_tokens]") == "3"
    page.keyboard.press("Escape")
    page.wait_for_selector("#oc-options:popover-open", state="detached")
    page.click("[data-do=options]")  # the same form again
    page.wait_for_selector("#oc-options:popover-open")


def test_a_wrong_number_is_told(site: Site, open_page: Callable[..., Page]) -> None:
    page = open_page(site.url)
    state(page, "idle")
    page.click("[data-do=options]")
    page.click("#oc-options summary")
    page.fill("#oc-options [name=top_p]", "5")
    page.click("#oc-options [type=submit]")
    assert page.is_visible("#oc-options")  # the browser tells it beside the field
    page.fill("#oc-options [name=top_p]", "1")
    page.eval_on_selector("#oc-options form", "form => { form.noValidate = true; }")
    page.fill("#oc-options [name=temperature]", "-2")
    page.click("#oc-options [type=submit]")
    page.wait_for_selector("#oc-strip .oc-error:has-text('Temperature is -2')")
    page.click("[data-do=options]")
    page.wait_for_selector("#oc-options:popover-open")
    assert page.input_value("#oc-options [name=temperature]") == "0"  # what is in force
