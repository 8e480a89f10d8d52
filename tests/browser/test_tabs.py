"""Several tabs, several people, several chats: what each of them sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Page

from tests.browser.conftest import Site, ask, state, until
from tests.browser.scripted import Script

pytestmark = pytest.mark.browser

Open = Callable[..., Page]
CHATS = "#oc-chats .oc-item"
ANSWER = "It is the first sentence of this answer. It is the second one. And this is its end."


@pytest.fixture(scope="module")
def site(start_site: Callable[[Script], Site]) -> Site:
    return start_site(Script(chunk_s=0.0, token_s=0.005, answer=ANSWER))


@pytest.fixture
def held(site: Site) -> Iterator[Site]:
    """A model that writes a token and then waits for `site.script.go`."""
    site.script.go.clear()
    yield site
    site.script.go.set()


def _shows(page: Page, text: str) -> None:
    until(lambda: text in page.inner_text("body"), 60)


def test_a_second_tab_follows_what_the_first_one_does(site: Site, open_page: Open) -> None:
    one = open_page(site.url)
    state(one, "idle")
    ask(one, "What is asked first?")
    _shows(one, "this is its end")
    two = one.context.new_page()
    two.goto(site.url)
    two.click(f"{CHATS} .oc-open")
    _shows(two, "this is its end")
    site.script.go.clear()
    ask(one, "And what comes then?")
    until(lambda: "And what comes then?" in two.inner_text("#oc-chat"), 60)
    state(two, "reading", "answering")
    assert two.is_visible("#oc-question .stop-button")
    assert two.locator(f"{CHATS} .oc-live").count() == 1
    site.script.go.set()
    until(lambda: two.inner_text("#oc-chat").count("this is its end") == 2, 60)
    state(two, "idle")
    until(lambda: two.locator("#oc-chat .oc-tools").count() == 2)

    two.click("[aria-label='Edit question 2']")
    state(two, "edit")
    assert not one.query_selector("[data-state=edit]")  # who edits is a tab's own matter
    ask(two, "What else?")
    until(lambda: "What else?" in one.inner_text("#oc-chat") and "2 / 2" in one.inner_text("#oc-chat"), 60)
    state(one, "idle")
    one.hover(CHATS)
    one.click(f"{CHATS} .oc-more summary")
    one.click(f"{CHATS} [data-do=rename]")
    one.fill(f"{CHATS} input", "Renamed in the first tab")
    one.press(f"{CHATS} input", "Enter")
    two.wait_for_selector(f"{CHATS}:has-text('Renamed in the first tab')")
    one.click("[aria-label='Go on from answer 1 in a new chat']")
    two.wait_for_selector(f"{CHATS}:has-text('Branch of Renamed in the first tab')")


def test_each_person_sees_a_place_in_the_line(held: Site, open_page: Open) -> None:
    people = [open_page(held.url) for _ in range(3)]
    for number, page in enumerate(people):
        state(page, "idle")
        ask(page, f"Person {number} asks?")
        state(page, "reading" if number == 0 else "queued")
    assert "next in line" in people[1].inner_text("#oc-strip")
    assert "number 2 in line" in people[2].inner_text("#oc-strip")
    people[1].keyboard.press("Escape")  # whoever leaves the line makes place
    until(lambda: "next in line" in people[2].inner_text("#oc-strip"))
    held.script.go.set()
    for page in (people[0], people[2]):
        _shows(page, "this is its end")
    assert "Person 0" not in people[2].content()


def test_settings_belong_to_a_chat(site: Site, open_page: Open) -> None:
    page = open_page(site.url)
    state(page, "idle")
    page.click("[data-do=options]")
    page.click("#oc-options .oc-preset:has-text('Free')")
    page.fill("#oc-options textarea", "Answer like a pirate.")
    page.click("#oc-options [type=submit]")
    page.wait_for_selector("#oc-status:has-text('Settings: Free')")
    ask(page, "What is asked with it?")
    _shows(page, "this is its end")
    page.click("[data-do=fresh]:visible")
    page.wait_for_selector(".oc-welcome", state="visible")
    page.wait_for_selector("#oc-status:has-text('Settings: Exact')")
    ask(page, "What is asked without?")
    _shows(page, "this is its end")
    page.locator(f"{CHATS} .oc-open", has_text="with it").click()
    page.wait_for_selector("#oc-status:has-text('Settings: Free')")
    page.reload()
    page.wait_for_selector("#oc-status:has-text('Settings: Free')")
    page.click("[data-do=options]")
    page.wait_for_selector("#oc-options:popover-open")
    assert page.input_value("#oc-options textarea") == "Answer like a pirate."
    owner = site.service.library.owner(page.evaluate("localStorage.getItem('octavo-browser')"))
    saved = [owner.open_chat(entry.id) for entry in owner.chats.find()]
    assert [(chat.system, chat.sampling.temperature) for chat in saved if chat] == [
        (None, 0.0),
        ("Answer like a pirate.", 1.0),
    ]


# As a person types who is quicker than the server: at the moment at which the page empties the box.
_TYPED_WHEN_EMPTY = """selector => {
  const box = document.querySelector(selector);
  const own = Object.getOwnPropertyDescriptor(HTMLTextAreaElement.prototype, "value");
  Object.defineProperty(box, "value", {
    configurable: true,
    get: own.get,
    set(text) {
      own.set.call(box, text);
      if (text) return;
      delete box.value;
      box.value = "Typed meanwhile";
      box.dispatchEvent(new Event("input", { bubbles: true }));
    },
  });
}"""


def _edit(page: Page, box: str) -> None:
    page.click("[aria-label='Edit question 1']")
    until(lambda: page.input_value(box) == "What is edited?")
    state(page, "edit")


def _send_edit_and_type(page: Page, box: str) -> None:
    """The box holds what was typed before the page had shown that the edit is over."""
    _edit(page, box)
    page.evaluate(_TYPED_WHEN_EMPTY, box)
    page.focus(box)
    page.keyboard.press("Enter")
    until(lambda: page.input_value(box) == "Typed meanwhile")
    state(page, "idle")
    assert page.input_value(box) == "Typed meanwhile"


def test_a_draft_outlives_an_edit_whatever_ends_it(site: Site, open_page: Open) -> None:
    box = "#oc-question textarea"
    page = open_page(site.url)
    state(page, "idle")
    ask(page, "What is edited?")
    _shows(page, "this is its end")
    state(page, "idle")
    page.fill(box, "Not sent yet")
    page.click("[aria-label='Edit question 1']")
    until(lambda: page.input_value(box) == "What is edited?")
    page.fill(box, "What is half edited")
    page.reload()
    state(page, "edit")
    until(lambda: page.input_value(box) == "What is half edited")
    page.focus(box)
    page.keyboard.press("Escape")
    until(lambda: page.input_value(box) == "Not sent yet")
    state(page, "idle")

    _edit(page, box)
    page.dblclick("[data-do=unedit]")
    state(page, "idle")
    assert page.input_value(box) == "Not sent yet"

    _send_edit_and_type(page, box)
    _edit(page, box)
    page.focus(box)
    page.keyboard.press("Escape")
    until(lambda: page.input_value(box) == "Not sent yet\n\nTyped meanwhile")
    page.fill(box, "Not sent yet")

    _send_edit_and_type(page, box)
    page.click("[data-do=fresh]:visible")
    until(lambda: page.input_value(box) == "Not sent yet\n\nTyped meanwhile")
    page.click(f"{CHATS} .oc-open")
    page.wait_for_selector("[aria-label='Edit question 1']")
    page.fill(box, "Not sent yet")

    _edit(page, box)
    other = page.context.new_page()
    other.goto(site.url)
    other.on("dialog", lambda dialog: dialog.accept())
    other.hover(CHATS)
    other.click(f"{CHATS} .oc-more summary")
    other.click(f"{CHATS} [data-do=delete]")
    page.wait_for_selector(".oc-welcome")
    until(lambda: page.input_value(box) == "Not sent yet")
