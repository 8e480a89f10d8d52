"""The secret by which a browser owns its chats: one for all of its tabs, from the first visit on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, BrowserContext, Page

from tests.browser.conftest import Site, ask, state, until
from tests.browser.scripted import Script

pytestmark = pytest.mark.browser

CHATS = "#oc-chats .oc-item"


@pytest.fixture(scope="module")
def site(start_site: Callable[[Script], Site]) -> Site:
    return start_site(Script(chunk_s=0.0, token_s=0.001, answer="Yes."))


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    """A browser that was never here."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    yield context
    context.close()


def _secret(page: Page) -> str:
    return str(page.evaluate("octavo.secret"))


def _asks(page: Page, question: str) -> None:
    state(page, "idle")
    ask(page, question)
    page.wait_for_selector(f"{CHATS}:has-text('{question}')")


def test_two_tabs_that_are_opened_together_own_the_same_chats(site: Site, context: BrowserContext) -> None:
    one, two = context.new_page(), context.new_page()
    for page in (one, two):
        page.goto(site.url, wait_until="commit")
    for page in (one, two):
        state(page, "idle")
    _asks(one, "Is this mine?")
    two.wait_for_selector(f"{CHATS}:has-text('Is this mine?')")
    two.reload()
    two.wait_for_selector(f"{CHATS}:has-text('Is this mine?')")


def test_of_two_secrets_that_are_made_at_once_one_is_left(site: Site, context: BrowserContext) -> None:
    one, two = context.new_page(), context.new_page()
    one.goto(site.url)
    state(one, "idle")
    two.add_init_script(  # it looked before the other had stored its own
        "const get = Storage.prototype.getItem; let first = true; Storage.prototype.getItem = function (name) {"
        " if (name !== 'octavo-browser' || !first) return get.call(this, name); first = false; return null; };"
    )
    two.goto(site.url)
    state(two, "idle")
    one.wait_for_function("secret => window.octavo?.secret === secret", arg=_secret(two))
    _asks(one, "Is this ours?")
    two.wait_for_selector(f"{CHATS}:has-text('Is this ours?')")


def test_a_secret_that_is_too_short_is_replaced(site: Site, context: BrowserContext) -> None:
    page = context.new_page()
    page.goto(site.url)
    page.evaluate("localStorage.setItem('octavo-browser', 'guessed')")
    page.reload()
    state(page, "idle")
    assert len(_secret(page)) >= 24
    assert page.evaluate("localStorage.getItem('octavo-browser')") == _secret(page)


def test_a_browser_that_keeps_nothing_has_its_chats_as_long_as_the_page_is_there(
    site: Site, context: BrowserContext
) -> None:
    context.add_init_script(  # as Chromium does it where cookies are blocked
        "for (const name of ['localStorage', 'sessionStorage']) Object.defineProperty(window, name,"
        " { get() { throw new DOMException('Access is denied.', 'SecurityError'); } });"
    )
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(site.url)
    _asks(page, "Does it work?")
    page.wait_for_selector("#oc-chat .bot:has-text('Yes.')")
    page.click("[data-do=theme]")
    page.click(f"{CHATS} .oc-more summary")
    with page.expect_download() as waiting:
        page.click(f"{CHATS} [data-kind=md]")
    assert "Does it work?" in waiting.value.path().read_text(encoding="utf-8")
    page.click("[data-do=fresh]:visible")
    page.wait_for_selector(".oc-welcome", state="visible")
    page.click(f"{CHATS} .oc-open")
    until(lambda: "Does it work?" in page.inner_text("#oc-chat"))
    assert errors == []


def test_where_the_browser_has_no_room_left_the_page_works(site: Site, context: BrowserContext) -> None:
    page = context.new_page()
    page.add_init_script("Storage.prototype.setItem = () => { throw new DOMException('', 'QuotaExceededError'); };")
    page.goto(site.url)
    _asks(page, "Is there room?")
    page.click("#oc-header [data-do=theme]")
    assert len(_secret(page)) >= 24
