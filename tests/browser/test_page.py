"""The page as a person uses it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, Route

from app.engine.types import Memory
from app.errors import UsageError
from app.service import PlanView
from app.ui.conversation import Conversation
from app.ui.frame import welcome
from app.ui.session import Session, Sessions
from tests.browser.conftest import Site, add, ask, state, until
from tests.browser.scripted import Script, ScriptedRunner

pytestmark = pytest.mark.browser

Open = Callable[..., Page]
Texts = Callable[..., Path]
ANSWER = "#oc-chat .bot .prose"
MESSAGE = "#oc-chat .bot"  # an answer in its pieces, with the note below it


def test_document_question_and_streamed_answer(site: Site, open_page: Open, texts: Texts, tmp_path: Path) -> None:
    page = open_page(site.url)
    sent: list[int] = []
    page.on("request", lambda request: sent.append(len(request.post_data or "")))
    state(page, "idle")
    add(page, texts("ledger.txt", "heliotrope"))
    state(page, "plan")
    card = page.inner_text("#oc-shelf .oc-card")
    assert "ledger.txt" in card
    assert "2 pages" in card
    assert "tokens" in card
    assert "Fits" in page.inner_text("#oc-strip")
    assert "to read" in page.inner_text("#oc-strip")

    sent.clear()
    ask(page, "What is <b>the</b> *code* word?")
    state(page, "reading")
    until(lambda: "tokens/s" in page.inner_text("#oc-strip"))
    page.screenshot(path=str(tmp_path / "reading.png"))
    state(page, "answering")
    seen: list[str] = []
    while page.query_selector("[data-state=answering]"):
        text = page.inner_text(ANSWER)
        if not seen or text != seen[-1]:
            seen.append(text)
        time.sleep(0.05)
    assert sum(len(after) > len(before) for before, after in pairwise(seen)) >= 3
    state(page, "idle")
    assert page.inner_text(f"{ANSWER} strong") == "heliotrope"
    assert page.query_selector(f"{ANSWER} table")
    assert page.query_selector(f"{ANSWER} pre code")
    assert page.inner_text("#oc-chat .user .prose p") == "What is <b>the</b> *code* word?"
    assert "ledger.txt" in page.inner_text("#oc-chat .user")
    assert "harbour office" not in page.content()  # the document stays on the server
    assert max(sent, default=0) < 2000

    # What the answer smuggles in does nothing; the next turn reads only what is new.
    assert page.title() == "Octavo"
    assert not page.is_visible(f"{ANSWER} img")
    before = site.script.chunks
    ask(page, "And again?")
    until(lambda: page.locator(MESSAGE).count() == 2)
    state(page, "answering")
    assert site.script.chunks - before == 1
    state(page, "idle")
    assert page.inner_text("#oc-status").startswith("1,")
    assert "ms per token" in page.inner_text("#oc-status")
    page.click("text=Details")
    assert "every head keeps everything" in page.inner_text("#oc-engine")
    page.keyboard.press("Escape")
    page.screenshot(path=str(tmp_path / "answered.png"))


def test_stop_while_reading_then_a_new_question_at_once(site: Site, open_page: Open, texts: Texts) -> None:
    page = open_page(site.url)
    state(page, "idle")
    add(page, texts("long.txt", "vermilion", 30))
    state(page, "plan")
    ask(page, "What is the code word?")
    state(page, "reading")
    until(lambda: " of " in page.inner_text("#oc-strip"))
    page.click("#oc-question .stop-button")
    until(lambda: not site.service.busy, site.script.chunk_s + 1.0)
    state(page, "plan")
    assert page.locator(MESSAGE).count() == 1 and "Stopped." in page.inner_text(MESSAGE)
    assert "long.txt" in page.inner_text("#oc-shelf")  # was not read to the end, so it waits again

    ask(page, "First question?")
    state(page, "reading")
    page.keyboard.press("Escape")
    ask(page, "Second question?")
    state(page, "reading", "stopping", "starting")
    until(lambda: page.locator(MESSAGE).count() == 3)
    state(page, "answering")
    until(lambda: "vermilion" in page.locator(MESSAGE).nth(2).inner_text())
    page.keyboard.press("Escape")
    state(page, "idle")
    until(lambda: "Stopped." in page.locator(MESSAGE).nth(2).inner_text())  # the line may be drawn before it
    assert "vermilion" in page.locator(MESSAGE).nth(2).inner_text()
    assert not page.query_selector("#oc-shelf .oc-card")


def test_a_stop_whose_reply_comes_late_leaves_nothing_behind(site: Site, open_page: Open) -> None:
    page = open_page(site.url)
    state(page, "idle")
    ask(page, "First question?")
    state(page, "answering")

    def late(route: Route) -> None:
        reply = route.fetch()
        until(lambda: not site.service.busy)
        time.sleep(1.0)  # by then the page has drawn the end
        route.fulfill(response=reply)

    page.route("**/gradio_api/run/**", late)
    with page.expect_response("**/gradio_api/run/**"):
        page.keyboard.press("Escape")
    page.wait_for_timeout(500)
    assert page.get_attribute("#oc-strip [data-state]", "data-state") == "idle"


def test_details_stay_open_while_the_engine_works(
    site: Site, open_page: Open, texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks = count(1)
    monkeypatch.setattr(ScriptedRunner, "memory", lambda runner: Memory(1, 2, 3, next(peaks) * 10**9))
    page = open_page(site.url)
    state(page, "idle")
    add(page, texts("long.txt", "vermilion", 30))
    state(page, "plan")
    ask(page, "What is the code word?")
    state(page, "reading")
    shown = "document.querySelector('#oc-engine').matches(':popover-open')"
    page.click("[popovertarget=oc-engine]")
    for _ in range(2):  # drawn anew twice
        before = page.inner_text("#oc-engine")
        until(lambda before=before: page.inner_text("#oc-engine") not in ("", before))
        until(lambda: page.evaluate(shown))
    page.keyboard.press("Escape")  # closes the panel, and stops nothing
    assert not page.evaluate(shown)
    before = page.text_content("#oc-engine")
    until(lambda: page.text_content("#oc-engine") != before)
    assert not page.evaluate(shown)
    state(page, "reading", "answering")
    page.keyboard.press("Escape")
    until(lambda: not site.service.busy, site.script.chunk_s + 1.0)


def test_two_tabs_share_nothing(site: Site, open_page: Open, texts: Texts) -> None:
    one = open_page(site.url)
    two = one.context.new_page()  # the same browser: cookies and storage are shared, the tab is not
    two.goto(site.url)
    for page, word in ((one, "crimson"), (two, "indigo")):
        state(page, "idle")
        add(page, texts(f"{word}.txt", word, 12))
        state(page, "plan")
    ask(one, "What is the code word, one?")
    ask(two, "What is the code word, two?")
    until(lambda: any(page.query_selector("[data-state=queued]") for page in (one, two)))  # whoever came second
    state(one, "idle")
    state(two, "idle")
    assert one.inner_text(f"{ANSWER} strong") == "crimson"
    assert "indigo" not in one.inner_text("#oc-chat")  # the panel lists what belongs to this browser
    assert two.inner_text(f"{ANSWER} strong") == "indigo"
    assert "crimson" not in two.inner_text("#oc-chat")


def test_too_long_offers_pages(site: Site, open_page: Open, texts: Texts) -> None:
    page = open_page(site.url)
    state(page, "idle")
    add(page, texts("encyclopaedia.txt", "ochre", 120))
    state(page, "toolong")
    assert "8,192" in page.inner_text("#oc-strip")
    ask(page, "What is in it?")
    time.sleep(0.5)
    assert page.input_value("#oc-question textarea") == "What is in it?"  # not lost
    assert not site.service.busy
    page.click("[data-do=suggest]")
    state(page, "plan")
    assert int(page.input_value("[data-page=last]")) < 40
    page.fill("[data-page=first]", "38")
    page.press("[data-page=first]", "Enter")
    until(lambda: page.input_value("[data-page=last]") == "38")
    page.fill("[data-page=last]", "40")
    page.press("[data-page=last]", "Enter")
    until(lambda: "Fits: 1," in page.inner_text("#oc-strip"))
    page.press("#oc-question textarea", "Enter")
    state(page, "answering")
    state(page, "idle")
    assert page.inner_text(f"{ANSWER} strong") == "ochre"
    assert "pages 38-40" in page.inner_text("#oc-chat .user")


def test_paste_upload_during_answer_and_bad_files(site: Site, open_page: Open, texts: Texts, tmp_path: Path) -> None:
    page = open_page(site.url)
    state(page, "idle")
    page.focus("#oc-question textarea")
    page.evaluate(
        """text => { const data = new DataTransfer(); data.setData("text/plain", text);
        document.activeElement.dispatchEvent(
            new ClipboardEvent("paste", {clipboardData: data, bubbles: true, cancelable: true})); }""",
        "A pasted line about the sea. " * 200 + "The code word is amber.",
    )
    page.wait_for_selector("#oc-shelf .oc-card:has-text('Pasted text.txt')")
    state(page, "plan")
    ask(page, "What is the code word?")
    state(page, "answering")
    add(page, texts("later.txt", "teal", 2))  # during the answer
    state(page, "plan")
    assert page.inner_text(f"{ANSWER} strong") == "amber"
    assert "later.txt" in page.inner_text("#oc-shelf")

    program = tmp_path / "program.bin"
    program.write_bytes(b"\x7fELF\0\1\2" * 100)
    add(page, program)
    assert "program" in page.inner_text("#oc-shelf .oc-bad")
    huge = tmp_path / "huge.txt"
    with huge.open("wb") as file:
        file.truncate((256 << 20) + 1)
    page.set_input_files("#oc-picker", str(huge))
    page.wait_for_selector("#oc-arriving .oc-bad:has-text('256 MiB')")
    page.click("#oc-shelf .oc-bad [data-do=remove]")
    until(lambda: not page.query_selector("#oc-shelf .oc-bad"))
    page.click("[data-do=fresh]:visible")
    page.wait_for_selector(".oc-welcome")
    until(lambda: not page.is_visible("#oc-chat"))
    assert page.locator("#oc-shelf .oc-name").all_inner_texts() == ["later.txt"]  # what waits comes along


def test_keys(site: Site, open_page: Open) -> None:
    page = open_page(site.url)
    state(page, "idle")
    page.click("[data-example] >> nth=0")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("Briefly.")
    assert page.input_value("#oc-question textarea").endswith("sentences.\nBriefly.")
    page.keyboard.press("Enter")
    state(page, "answering")
    page.fill("[data-search]", "Shake")
    page.press("[data-search]", "Escape")  # a key of the field's own
    page.fill("[data-search]", "")
    page.hover("#oc-chats .oc-item")
    page.click("#oc-chats .oc-more summary")
    page.keyboard.press("Escape")
    assert not page.query_selector("#oc-chats .oc-more[open]")
    assert page.locator("#oc-chats .oc-more summary").evaluate("menu => menu === document.activeElement")
    state(page, "answering")
    page.focus("#oc-question textarea")
    page.keyboard.press("Escape")
    state(page, "idle")
    assert page.locator(MESSAGE).count() == 1 and "Stopped." in page.inner_text(MESSAGE)
    assert page.evaluate("document.activeElement.tagName") == "TEXTAREA"
    named = page.evaluate(
        "[...document.querySelectorAll('button, input, textarea')].filter(e => e.checkVisibility() && !(e.ariaLabel ||"
        " e.textContent.trim() || e.labels?.[0]?.textContent.trim())).map(e => e.outerHTML.slice(0, 120))"
    )
    assert named == []


def test_a_question_during_an_answer_is_held_and_told(site: Site, open_page: Open) -> None:
    page = open_page(site.url)
    state(page, "idle")
    ask(page, "First?")
    state(page, "answering")
    page.press("#oc-question textarea", "Enter")  # nothing is asked
    assert page.query_selector("#oc-held") is None
    ask(page, "Second?")
    page.wait_for_selector("#oc-held:has-text('still answering'):has-text('press Stop')", timeout=2000)
    assert page.query_selector("[data-state=answering]")
    state(page, "idle")
    until(lambda: page.query_selector("#oc-held") is None)
    assert page.input_value("#oc-question textarea") == "Second?"
    page.press("#oc-question textarea", "Enter")
    until(lambda: page.locator("#oc-chat .user").count() == 2)
    assert page.locator("#oc-chat .user").nth(1).inner_text().strip() == "Second?"
    page.keyboard.press("Escape")
    state(page, "idle")


def test_pressing_twice_asks_once(site: Site, open_page: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    planned, plan = threading.Event(), Conversation.plan

    def slow(conversation: Conversation, question: str = "") -> PlanView:
        assert planned.wait(20)
        return plan(conversation, question)

    monkeypatch.setattr(Conversation, "plan", slow)
    page = open_page(site.url)
    state(page, "idle")
    with page.expect_response("**/queue/join*"):
        ask(page, "Once?")
    with page.expect_response("**/queue/join*"):
        page.press("#oc-question textarea", "Enter")
    planned.set()
    state(page, "answering")
    state(page, "idle")
    assert page.locator("#oc-chat .user").count() == 1


def test_loading_is_shown_and_a_question_waits_for_it(start_site: Callable[[Script], Site], open_page: Open) -> None:
    site = start_site(Script(load_s=6.0))
    page = open_page(site.url)
    state(page, "loading")
    until(lambda: "Reading the weights" in page.inner_text("#oc-strip"))
    ask(page, "Are you there?")
    until(lambda: "Your question comes next" in page.inner_text("#oc-strip"))
    state(page, "answering")
    state(page, "idle")


def test_a_page_is_used_before_it_is_known(
    site: Site, open_page: Open, texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = Sessions.open

    async def late(sessions: Sessions, *given: Any, **more: Any) -> Session:
        await asyncio.sleep(4)
        return await at_once(sessions, *given, **more)

    monkeypatch.setattr(Sessions, "open", late)
    asking, adding = open_page(site.url), open_page(site.url)
    site.script.go.clear()  # the answer waits until it has been looked at
    try:
        ask(asking, "Are you there?")
        add(adding, texts("early.txt", "early", 1))
        state(adding, "plan")
        until(lambda: "early.txt" in adding.inner_text("#oc-shelf"))
        asking.wait_for_selector("#oc-chat .user:has-text('Are you there?')")
        state(asking, "answering", "reading")
    finally:
        site.script.go.set()
    state(asking, "idle")


def test_a_page_says_nothing_before_it_is_known(
    site: Site, open_page: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    at_once, known = Sessions.open, asyncio.Event()

    async def late(sessions: Sessions, *given: Any, **more: Any) -> Session:
        await known.wait()
        return await at_once(sessions, *given, **more)

    monkeypatch.setattr(Sessions, "open", late)
    page = open_page(site.url)
    state(page, "unknown")
    page.screenshot(path=str(tmp_path / "unknown.png"))
    assert not page.query_selector(".oc-welcome, .oc-bar") and "oading" not in page.inner_text("body")
    assert "Chats" in page.inner_text("#oc-side")
    known.set()
    state(page, "idle")
    page.wait_for_selector(".oc-welcome", state="visible")


# Facts in the line at the foot that are seen in part.
CUT = """() => {
  const line = document.querySelector(".oc-foot > div").getBoundingClientRect();
  return [...document.querySelectorAll(".oc-foot span")].filter((span) => {
    const { top, bottom, right } = span.getBoundingClientRect();
    return top < line.bottom - 1 && (bottom > line.bottom + 1 || right > line.right + 1);
  }).map((span) => span.textContent);
}"""


@pytest.mark.parametrize("capacity", [8192, None])
def test_the_foot_is_no_wider_than_the_box_and_cuts_nothing(
    start_site: Callable[[Script], Site], open_page: Open, tmp_path: Path, capacity: int | None
) -> None:
    site = start_site(Script(capacity=capacity, note="A small model of 135 million parameters answers here. " * 3))
    page = open_page(site.url)
    ask(page, "Are you there?")
    state(page, "answering")
    state(page, "idle")
    until(lambda: "ms per token" in page.inner_text(".oc-foot"))
    for width in (1920, 1440, 1280, 800, 390):
        page.set_viewport_size({"width": width, "height": 800})
        page.screenshot(path=str(tmp_path / f"foot-{width}.png"))
        foot, box = (page.locator(name).bounding_box() for name in (".oc-foot", "#oc-composer"))
        assert foot and box and foot["x"] >= box["x"] and foot["x"] + foot["width"] <= box["x"] + box["width"], width
        last = page.locator(".oc-foot > :last-child").bounding_box()
        assert last and last["x"] + last["width"] <= box["x"] + box["width"], width
        assert page.evaluate(CUT) == [], width
        assert "tokens" in page.locator(".oc-foot span").first.inner_text()


def test_the_arrow_down_goes_when_nothing_is_below(start_site: Callable[[Script], Site], open_page: Open) -> None:
    page = open_page(start_site(Script(token_s=0.0, answer="\n\n".join(f"Line {n}." for n in range(60)))).url)
    state(page, "idle")
    ask(page, "What are the lines?")
    page.wait_for_selector("text=Line 59.")
    state(page, "idle")
    arrow = "#oc-chat .scroll-down-button-container"
    page.evaluate("document.querySelector('#oc-chat .bubble-wrap').scrollTop = 0")
    page.wait_for_selector(arrow, state="visible")
    page.set_viewport_size({"width": 1440, "height": 6000})
    page.wait_for_selector(arrow, state="hidden")


def test_the_first_page_tells_of_a_small_model(start_site: Callable[[Script], Site], open_page: Open) -> None:
    page = open_page(start_site(Script(note="A small <b>model</b> answers here.")).url)
    state(page, "idle")
    assert page.inner_text(".oc-welcome .oc-model") == "A small <b>model</b> answers here."
    examples = " ".join(page.locator("[data-example]").all_text_contents())
    assert examples and " document" not in examples and " it " not in examples  # there may be none, or several
    assert "Nothing leaves this machine" in page.inner_text(".oc-welcome")
    assert "leaves this machine" not in welcome(own=False)  # to another server it does


def test_an_answer_in_circles_says_what_helps(start_site: Callable[[Script], Site], open_page: Open) -> None:
    page = open_page(start_site(Script(token_s=0.0, answer="Round and round it goes. " * 300)).url)
    state(page, "idle")
    ask(page, "What goes round?")
    page.wait_for_selector("#oc-chat .oc-note:has-text('repetition penalty of 1.1')")


def test_failures_are_told(start_site: Callable[[Script], Site], open_page: Open) -> None:
    page = open_page(start_site(Script(fail_load=UsageError("--model nowhere: there is no such file."))).url)
    state(page, "error")
    assert "no such file" in page.inner_text("#oc-strip")

    site = start_site(Script())
    page = open_page(site.url)
    state(page, "idle")
    site.script.fail_decode = MemoryError()
    ask(page, "Does it work?")
    page.wait_for_selector(f"{ANSWER} .oc-failed")
    assert "Out of memory" in page.inner_text(f"{ANSWER} .oc-failed")
    site.script.fail_decode = None
    state(page, "idle")
    ask(page, "And now?")
    until(lambda: page.locator(MESSAGE).count() == 2)
    state(page, "idle")
    assert "code word" in page.locator(MESSAGE).nth(1).inner_text()
    assert "Out of memory" not in page.locator(MESSAGE).nth(1).inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_narrow_screen(site: Site, open_page: Open, texts: Texts, tmp_path: Path, scheme: str) -> None:
    page = open_page(site.url, viewport={"width": 390, "height": 844}, color_scheme=scheme)
    state(page, "idle")
    dock = page.locator("#oc-composer").bounding_box()
    add(page, texts("a name much too long for a narrow screen, and then some more of it.txt", "mauve"))
    state(page, "plan")
    ask(page, "What is the code word?")
    state(page, "answering")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.locator("#oc-composer").bounding_box() == dock  # nothing has jumped
    state(page, "idle")
    assert page.locator("#oc-composer").bounding_box() == dock
    page.screenshot(path=str(tmp_path / f"narrow-{scheme}.png"))
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (colour == "rgb(24, 23, 21)") == (scheme == "dark")
    page.click("[data-do=theme]")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != colour


def test_an_endless_chat_shows_where_its_memory_begins(
    start_site: Callable[[Script], Site], open_page: Open, texts: Texts, tmp_path: Path
) -> None:
    site = start_site(Script(chunk_s=0.0, token_s=0.002, capacity=None, sink=4, recent=250))
    page = open_page(site.url)
    state(page, "idle")
    ask(page, "What is the code word?")
    state(page, "idle")
    assert "the last 250 are remembered" in page.inner_text("#oc-status")
    assert not page.query_selector(".oc-memory")
    add(page, texts("long.txt", "heliotrope", lines=60))  # 12,000 tokens: no limit that a model's window sets
    state(page, "plan")
    assert "of which only the last 250 are remembered" in page.inner_text("#oc-strip")
    ask(page, "And now?")
    state(page, "idle")
    until(lambda: page.query_selector(".oc-memory") is not None)
    line = page.inner_text("#oc-chat .user .oc-memory")
    assert line.startswith("Memory begins in what was read here, at \u201c")
    assert line.endswith("All before it is forgotten, but for the first 4 tokens.")
    assert "forgotten" in page.inner_text("#oc-status")
    page.screenshot(path=str(tmp_path / "endless.png"))
    for turn, question in enumerate(("Once more?", "And once more?"), 3):
        ask(page, question)
        until(lambda turn=turn: page.locator("#oc-chat .bot .prose table").count() == turn)
        state(page, "idle")
    assert page.locator(".oc-memory").count() == 1  # it has moved on
    assert not page.query_selector("#oc-chat .message-row:nth-child(-n+4) .oc-memory")
    page.screenshot(path=str(tmp_path / "further.png"))
