"""Long answers and long chats: what an update costs does not grow, and what is read stays where it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Page

from app.chat import Chat, Turn
from tests.browser.conftest import Site, ask, state, until
from tests.browser.scripted import Script

pytestmark = pytest.mark.browser

PART = """## Section {n}

The harbour office recorded the arrival of **every ship**, its cargo and its master, in a `ledger` of {n} pages; what
was lost was written down as well, with the names of those who had seen it go, and the price that the insurer paid.

- first item of the list, with some words behind it
- second item, *emphasised*, and a [link](https://example.org)

| ship | tons | port |
|---|---|---|
| Heron | 120 | Riga |

```python
def arrival(ship, day={n}):
    return ship.name, day
```

"""
TOKENS = 10_000

# Counts what is drawn, how far things move by themselves, and the processor's time of the page.
WATCH = """() => {
  window.drawn = 0;
  window.moved = 0;
  const count = (node) => (node.nodeType === 1 && node.closest("#oc-chat") ? 1 + node.querySelectorAll("*").length : 0);
  new MutationObserver((all) => all.forEach((one) => one.addedNodes.forEach((node) => (drawn += count(node)))))
    .observe(document.querySelector(".gradio-container"), { childList: true, subtree: true });
  new PerformanceObserver((list) => list.getEntries().forEach((entry) => (moved += entry.value)))
    .observe({ type: "layout-shift" });
}"""
WRAP = "document.querySelector('#oc-chat .bubble-wrap')"


def _chat(page: Page, site: Site, turns: int) -> str:
    """A saved chat of this many turns."""
    chat = Chat(title=f"{turns} turns")
    for number in range(turns):
        question, answer = f"Question number {number}?", PART.replace("{n}", str(number))
        chat.add(Turn(question, (), (), (), answer, "stop"))
    site.service.library.owner(page.evaluate("localStorage.getItem('octavo-browser')")).save_chat(chat)
    return chat.id


def _processor(page: Page) -> Callable[[], float]:
    """Seconds that the page's main thread has worked, other programs not counted."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def seconds() -> float:
        metrics = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
        return float(metrics["TaskDuration"])

    return seconds


def _sections(at: int) -> str:
    """Each with a number of its own: an answer that repeats itself is ended."""
    return PART.replace("{n}", str(at))


def _rows(at: int) -> str:
    """Of one table, which has no end."""
    head = "" if at else "| number | square | what was said of it |\n|---|---|---|\n"
    return head + f"| {at} | {at * at} | the ledger of {at} has it, as **{at % 97}** in the port of `{at % 89}` |\n"


def _code(at: int) -> str:
    """Of one block, which has no end."""
    return ("" if at else "```python\n") + f"ship_{at} = {at * at}\n"


@pytest.mark.parametrize("part", [_sections, _rows, _code])
def test_a_long_answer_costs_what_it_adds(
    start_site: Callable[[Script], Site], open_page: Callable[..., Page], part: Callable[[int], str]
) -> None:
    script = Script(chunk_s=0.0, token_s=0.001, capacity=20_000, answer="")
    while len(script.tokenizer.encode_text(script.answer)) < TOKENS:
        for _ in range(20):
            script.answer += part(len(script.answer))
    site = start_site(script)
    page = open_page(site.url)
    state(page, "idle")
    page.evaluate(WATCH)
    seconds = _processor(page)
    before = seconds()
    ask(page, "Tell me everything?")
    until(lambda: page.evaluate(f"{WRAP}?.scrollHeight > 3000"), 60)
    page.mouse.move(800, 400)
    page.mouse.wheel(0, -600)  # the reader goes back
    page.wait_for_timeout(300)
    at = page.evaluate(f"{WRAP}.scrollTop")
    height = page.evaluate(f"{WRAP}.scrollHeight")
    until(lambda: page.evaluate(f"{WRAP}.scrollHeight") > height + 3000, 60)
    assert page.evaluate(f"{WRAP}.scrollTop") == at
    assert at + page.evaluate(f"{WRAP}.clientHeight") < height
    page.evaluate(f"{WRAP}.scrollTop = {WRAP}.scrollHeight")
    state(page, "idle", seconds=300)
    until(lambda: page.evaluate(f"{WRAP}.scrollHeight - {WRAP}.scrollTop - {WRAP}.clientHeight") < 4)
    spent = seconds() - before
    there = page.evaluate("document.querySelectorAll('#oc-chat .bot-row *').length")
    assert there > 1000
    if part is _sections:  # drawn anew at each update it would be dozens of times that; of a block, its last piece is
        assert page.evaluate("drawn") < 3 * there
    assert page.evaluate("moved") < 0.1  # what browsers call good
    assert spent < 30, f"{spent:.1f} s of processor time for {TOKENS:,} tokens"


def test_a_chat_of_200_turns_opens_with_its_newest(
    start_site: Callable[[Script], Site], open_page: Callable[..., Page]
) -> None:
    site = start_site(Script(chunk_s=0.0, chunk=65_536, capacity=200_000))
    page = open_page(site.url)
    state(page, "idle")
    until(lambda: bool(page.evaluate("localStorage.getItem('octavo-browser')")))
    chat = _chat(page, site, 200)
    page.reload()
    page.wait_for_selector(f"#oc-chats [data-id='{chat}'] .oc-open")
    seconds = _processor(page)
    before = seconds()
    page.click(f"#oc-chats [data-id='{chat}'] .oc-open")
    until(lambda: page.locator("#oc-chat .bot-row").count() == 30, 60)
    until(lambda: page.evaluate(f"{WRAP}.scrollHeight - {WRAP}.scrollTop - {WRAP}.clientHeight") < 4)
    spent = seconds() - before
    assert "Question number 199?" in page.inner_text("#oc-chat")
    assert page.locator("[aria-label='Edit question 200']").count() == 1
    assert spent < 3, f"{spent:.1f} s of processor time to open it"

    page.evaluate(WATCH)
    rows = page.evaluate("document.querySelectorAll('#oc-chat *').length")
    site.script.answer = "Short."
    ask(page, "One more?")
    until(lambda: page.locator("#oc-chat .bot-row").count() == 31, 60)
    state(page, "idle")
    until(lambda: page.locator("[aria-label='Edit question 201']").count() == 1)
    assert page.evaluate("drawn") < rows / 5  # the other turns stay as they are

    page.evaluate(f"{WRAP}.scrollTop = 0")
    top = "document.querySelector('#oc-chat .user-row').getBoundingClientRect().top"
    first = page.locator("#oc-chat .user-row:has-text('Question number 170?')")
    was = first.bounding_box()
    page.click("text=Show earlier questions")
    until(lambda: page.locator("#oc-chat .bot-row").count() == 61, 60)
    until(lambda: page.evaluate(top) < -1000)
    now = first.bounding_box()
    assert was is not None and now is not None
    assert abs(now["y"] - was["y"]) < 60  # where it was, or below the button that is gone
    assert page.locator("[aria-label='Edit question 141']").count() == 1
