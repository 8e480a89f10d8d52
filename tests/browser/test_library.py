"""Chats and documents that stay: reload, branches, the panel, two browsers, a restart."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page

from app.documents import Document
from app.library import Owner
from app.library.chats import ChatStore
from tests.browser.conftest import Site, add, ask, state, until
from tests.browser.scripted import Script

pytestmark = pytest.mark.browser

Open = Callable[..., Page]
Texts = Callable[..., Path]
Start = Callable[..., Site]
ANSWER = "#oc-chat .bot .prose"
MESSAGE = "#oc-chat .bot"  # an answer in its pieces, with the note below it
CHATS = "#oc-chats .oc-item"


def _answers(page: Page, number: int) -> None:
    until(lambda: page.locator("#oc-chat .bot-row").count() == number)


def _asked(page: Page, question: str, number: int) -> None:
    """Ask and wait for the `number`th answer's end."""
    ask(page, question)
    _answers(page, number)
    state(page, "answering", "reading", "opening")
    state(page, "idle")


def _fresh(page: Page) -> None:
    """Press "New chat" and wait until it is there."""
    shown = page.evaluate("sessionStorage.getItem('octavo')")
    page.click("[data-do=fresh]:visible")
    until(lambda: page.evaluate("sessionStorage.getItem('octavo')") != shown)


def _read(site: Site, open_page: Open, document: Path, question: str = "What is the code word?") -> Page:
    """A page in a browser of its own that has asked about a document."""
    page = open_page(site.url)
    state(page, "idle")
    add(page, document)
    state(page, "plan")
    _asked(page, question, 1)
    return page


def test_a_reload_finds_the_answer_that_runs(site: Site, open_page: Open, texts: Texts) -> None:
    page = open_page(site.url)
    state(page, "idle")
    add(page, texts("reload.txt", "sepia", 20))
    state(page, "plan")
    ask(page, "What is the code word?")
    state(page, "reading")
    page.reload()
    state(page, "reading")
    assert "What is the code word?" in page.inner_text("#oc-chat")
    state(page, "answering")
    page.reload()
    state(page, "answering")
    state(page, "idle")
    assert page.inner_text(f"{ANSWER} strong") == "sepia"
    page.reload()
    page.wait_for_selector(f"{ANSWER} strong")
    assert page.inner_text(f"{ANSWER} strong") == "sepia"


def test_a_closed_page_loses_nothing_and_gives_way_when_somebody_waits(
    start_site: Start, open_page: Open, texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.ui.session.UNWATCHED_S", 1.0)
    site = start_site(Script(chunk_s=0.3, token_s=0.05))
    page = open_page(site.url)
    state(page, "idle")
    ask(page, "First?")
    state(page, "answering")
    again = page.context.new_page()
    page.close()
    again.goto(site.url)  # another tab of the same browser
    again.wait_for_selector(f"{CHATS} .oc-live")
    again.click(f"{CHATS} .oc-open")
    state(again, "answering")
    state(again, "idle")
    assert "That is all" in again.inner_text(ANSWER)

    add(again, texts("endless.txt", "ochre", 40))
    ask(again, "Second?")
    state(again, "reading")
    again.close()
    other = open_page(site.url)
    state(other, "idle")
    site.script.go.clear()  # no end of a chunk at which the other answer could give way
    ask(other, "Is it my turn?")
    state(other, "queued")
    assert "next in line" in other.inner_text("#oc-strip")
    site.script.go.set()
    state(other, "answering", seconds=20)
    state(other, "idle")


def test_edit_again_back_and_fork(site: Site, open_page: Open, texts: Texts) -> None:
    page = _read(site, open_page, texts("branches.txt", "umber"), "First question?")
    _asked(page, "Second question?", 2)

    page.fill("#oc-question textarea", "Not sent yet")
    for number, question in ((2, "Second question?"), (1, "First question?")):  # of one edit to another
        page.click(f"[aria-label='Edit question {number}']")
        until(lambda question=question: page.input_value("#oc-question textarea") == question)
    state(page, "edit")
    page.keyboard.press("Escape")
    state(page, "idle")
    assert page.input_value("#oc-question textarea") == "Not sent yet"
    page.click("[aria-label='Edit question 2']")
    state(page, "edit")
    before = site.script.chunks
    _asked(page, "Second, edited?", 2)
    until(lambda: page.input_value("#oc-question textarea") == "Not sent yet")
    page.fill("#oc-question textarea", "")
    assert site.script.chunks - before == 1  # the document is not among what was read
    assert "Second question?" not in page.inner_text("#oc-chat")
    assert "2 / 2" in page.inner_text("#oc-chat")
    page.click("[aria-label='Earlier version of question 2']")
    until(lambda: "Second question?" in page.inner_text("#oc-chat"))
    assert "1 / 2" in page.inner_text("#oc-chat")
    again = page.get_attribute("[aria-label='Answer question 2 again']", "title") or ""
    assert "sampled, since at Exact the likeliest answer is the first one" in again
    page.click("[aria-label='Answer question 2 again']")
    until(lambda: "3 / 3" in page.inner_text("#oc-chat"))
    state(page, "idle")
    until(lambda: page.locator(".oc-varied").count() == 1)
    page.click("[aria-label='Earlier version of question 2']")
    until(lambda: "2 / 3" in page.inner_text("#oc-chat") and page.locator(".oc-varied").count() == 0)

    page.click("[aria-label='Edit question 1']")
    state(page, "edit")
    _asked(page, "First, edited?", 1)
    assert "branches.txt" in page.inner_text("#oc-chat .user")  # its document comes along
    assert page.inner_text(f"{ANSWER} strong") == "umber"
    page.click("[aria-label='Earlier version of question 1']")
    _answers(page, 2)

    page.fill("#oc-question textarea", "For later")
    page.click("[aria-label='Edit question 2']")
    until(lambda: page.input_value("#oc-question textarea") == "Second question?")
    state(page, "edit")
    page.click("[aria-label='Go on from answer 1 in a new chat']")
    _answers(page, 1)
    until(lambda: page.input_value("#oc-question textarea") == "For later")
    until(lambda: page.locator(CHATS).count() == 2)
    _asked(page, "Elsewhere?", 2)
    page.locator(f"{CHATS} .oc-open").nth(1).click()
    until(lambda: "Elsewhere?" not in page.inner_text("#oc-chat"))
    _answers(page, 2)


def test_a_stopped_answer_is_continued(site: Site, open_page: Open) -> None:
    page = open_page(site.url)
    state(page, "idle")
    ask(page, "Go on?")
    state(page, "answering")
    until(lambda: "code word" in page.inner_text(ANSWER))
    page.keyboard.press("Escape")
    state(page, "idle")
    assert page.locator(MESSAGE).count() == 1 and "Stopped." in page.inner_text(MESSAGE)
    begun = page.inner_text(MESSAGE).split("Stopped.")[0].strip()
    page.click("[aria-label='Continue answer 1']")
    state(page, "answering")
    state(page, "idle")
    text = page.inner_text(MESSAGE)
    assert text.startswith(begun[:15])
    assert "Stopped." not in text
    assert page.locator("#oc-chat .bot-row").count() == 1


def test_chats_are_searched_renamed_exported_and_deleted(
    site: Site, open_page: Open, texts: Texts, tmp_path: Path
) -> None:
    page = _read(site, open_page, texts("export.txt", "cobalt"))
    page.click("[data-do=fresh]:visible")
    page.wait_for_selector(".oc-welcome")
    _asked(page, "An unrelated matter?", 1)
    until(lambda: page.locator(CHATS).count() == 2)
    page.fill("[data-search]", "cobalt")
    until(lambda: page.locator(CHATS).count() == 1)
    assert "code word" in page.inner_text(CHATS)
    page.fill("[data-search]", "nowhere to be found")
    until(lambda: "No chat" in page.inner_text("#oc-chats"))
    page.fill("[data-search]", "cobalt")
    until(lambda: page.locator(CHATS).count() == 1)

    assert "export.txt" in page.inner_text(f"{CHATS} small")  # tells it from others with the same question
    for kind in ("md", "json"):
        page.click(f"{CHATS} .oc-more summary")
        page.screenshot(path=str(tmp_path / f"panel-{kind}.png"))
        with page.expect_download() as waiting:
            page.click(f"{CHATS} [data-kind={kind}]")
        saved = tmp_path / waiting.value.suggested_filename
        waiting.value.save_as(saved)
        assert saved.suffix == f".{kind}"
        assert "cobalt" in saved.read_text(encoding="utf-8")
        assert not page.query_selector(".oc-more[open]")
    assert json.loads(saved.read_text(encoding="utf-8"))["turns"][0]["question"] == "What is the code word?"
    page.click(f"{CHATS} .oc-more summary")
    page.click("#oc-question textarea")
    assert not page.query_selector(".oc-more[open]")
    page.hover(CHATS)
    page.click(f"{CHATS} .oc-more summary")
    page.click(f"{CHATS} [data-do=rename]")
    page.fill(f"{CHATS} input", "Never mind")
    page.press(f"{CHATS} input", "Escape")
    assert "What is the code word?" in page.inner_text(CHATS)
    page.hover(CHATS)
    page.click(f"{CHATS} .oc-more summary")
    page.click(f"{CHATS} [data-do=rename]")
    page.fill(f"{CHATS} input", "Paint <b>shop</b>")
    page.press(f"{CHATS} input", "Enter")
    page.wait_for_selector(f"{CHATS}:has-text('Paint <b>shop</b>')")
    page.hover(CHATS)
    page.click(f"{CHATS} .oc-more summary")
    page.once("dialog", lambda dialog: dialog.accept())
    page.click(f"{CHATS} [data-do=delete]")
    until(lambda: "No chat" in page.inner_text("#oc-chats"))
    page.fill("[data-search]", "")
    until(lambda: page.locator(CHATS).count() == 1)


def test_a_new_title_is_shown_at_once_and_goes_when_the_disk_does_not_take_it(
    site: Site, open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = open_page(site.url)
    state(page, "idle")
    _asked(page, "The old title?", 1)
    full = threading.Event()

    def rename(*_: object) -> None:
        assert full.wait(60)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ChatStore, "rename", rename)
    page.hover(CHATS)
    page.click(f"{CHATS} .oc-more summary")
    page.click(f"{CHATS} [data-do=rename]")
    page.fill(f"{CHATS} input", "The new title")
    page.press(f"{CHATS} input", "Enter")
    assert "The new title" in page.inner_text(CHATS)
    full.set()
    until(lambda: "The old title?" in page.inner_text(CHATS))
    assert "The disk is full" in page.inner_text("#oc-strip")


def test_documents_that_wait_go_with_a_new_chat(
    site: Site, open_page: Open, texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, read = threading.Event(), site.service.add_document

    def slow(path: Path, name: str = "") -> Document:
        assert name != "slow.txt" or disk.wait(60)
        return read(path, name)

    monkeypatch.setattr(site.service, "add_document", slow)
    page = open_page(site.url)
    state(page, "idle")
    cards, reading = page.locator("#oc-shelf .oc-card"), page.locator("#oc-shelf .oc-busy")
    _asked(page, "Before that?", 1)
    add(page, texts("ready.txt", "citrine"))
    page.set_input_files("#oc-picker", str(texts("slow.txt", "jasper")))
    until(lambda: reading.count() == 1)
    _fresh(page)
    assert cards.count() == 2 and reading.count() == 1
    disk.set()
    until(lambda: reading.count() == 0 and cards.count() == 2)
    state(page, "plan")
    _asked(page, "What is the code word?", 1)
    assert "ready.txt" in page.inner_text("#oc-chat .user") and "slow.txt" in page.inner_text("#oc-chat .user")

    add(page, texts("shared.txt", "topaz"))
    other = page.context.new_page()
    other.goto(site.url)
    other.click(f"{CHATS} .oc-open")
    other.wait_for_selector("#oc-shelf .oc-card")
    _fresh(page)
    until(lambda: cards.count() == 0)
    assert other.locator("#oc-shelf .oc-card").count() == 1  # where another tab shows it


def test_documents_that_wait_are_there_when_their_chat_is_opened_again(
    site: Site, open_page: Open, texts: Texts
) -> None:
    page = open_page(site.url)
    state(page, "idle")
    cards, chats = page.locator("#oc-shelf .oc-card"), page.locator(f"{CHATS} .oc-open")
    _asked(page, "First chat?", 1)
    until(lambda: chats.count() == 1)
    first = f"#oc-chats [data-id='{page.get_attribute(CHATS, 'data-id')}'] .oc-open"
    add(page, texts("first.txt", "agate"))
    page.click("[aria-label='Go on from answer 1 in a new chat']")
    until(lambda: chats.count() == 2 and cards.count() == 0)
    page.click(first)
    until(lambda: cards.count() == 1)
    assert "first.txt" in page.inner_text("#oc-shelf")

    other = page.context.new_page()
    other.goto(site.url)
    state(other, "idle")
    add(other, texts("unasked.txt", "onyx"))
    other.click(first)
    other.wait_for_selector("#oc-shelf .oc-card:has-text('first.txt')")
    assert other.locator("#oc-shelf .oc-card").count() == 1
    _fresh(other)  # is the new chat that there was, with what waits in it
    other.wait_for_selector("#oc-shelf .oc-card:has-text('unasked.txt')")
    assert other.locator("#oc-shelf .oc-card").count() == 1 == cards.count()


def test_a_document_is_used_again_pinned_and_removed(site: Site, open_page: Open, texts: Texts) -> None:
    page = _read(site, open_page, texts("again.txt", "crimson"))
    page.click("[data-do=fresh]:visible")
    page.wait_for_selector(".oc-welcome")
    entry = "#oc-library .oc-item"
    assert "again.txt" in page.inner_text(entry)
    assert "read anew in" in page.inner_text(entry)  # nothing of it is on disk, and nothing is lost
    page.eval_on_selector(
        f"{entry} small", "line => line.textContent = '1,317 tokens, read anew in 12 min, 13 MB on disk'"
    )
    assert page.eval_on_selector(f"{entry} small", "line => line.scrollWidth <= line.clientWidth")  # none is cut off
    page.click(f"{entry} .oc-open")
    page.wait_for_selector("#oc-shelf .oc-card:has-text('again.txt')")
    state(page, "plan")
    _asked(page, "What is the code word now?", 1)
    assert page.inner_text(f"{ANSWER} strong") == "crimson"
    page.click(f"{entry} [data-do=pin]")
    page.wait_for_selector(f"{entry} [aria-pressed=true]")
    told: list[str] = []
    page.once("dialog", lambda dialog: (told.append(dialog.message), dialog.dismiss()))
    page.click(f"{entry} [data-do=forget]")
    until(lambda: bool(told))
    assert "keep it" in told[0]
    assert page.locator(entry).count() == 1
    page.once("dialog", lambda dialog: dialog.accept())
    page.click(f"{entry} [data-do=forget]")
    until(lambda: page.locator(entry).count() == 0)


def test_a_full_disk_is_told_once(site: Site, open_page: Open, texts: Texts, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Owner, "save_chat", full)
    page = open_page(site.url)
    state(page, "idle")
    ask(page, "Hello?")
    state(page, "error")
    told = page.locator("p:visible", has_text="This chat is not saved")
    until(lambda: page.locator("#oc-library [role=status]").count() == 1)
    assert told.count() == 1 and page.is_visible("#oc-strip .oc-unsaved")
    add(page, texts("full.txt", "mauve"))
    state(page, "plan")  # in its place
    assert told.count() == 1 and page.is_visible("#oc-library [role=status]")


def test_another_browser_sees_nothing_of_it(site: Site, open_page: Open, texts: Texts) -> None:
    one = _read(site, open_page, texts("private.txt", "vermilion"))
    chat = one.get_attribute(CHATS, "data-id")
    two = open_page(site.url)
    state(two, "idle")
    assert two.locator(CHATS).count() == 0
    assert "private.txt" not in two.content()
    assert "vermilion" not in two.content()
    for secret in ("", two.evaluate("localStorage.getItem('octavo-browser')")):
        answer = two.request.get(f"{site.url}/exports/{chat}.md", headers={"X-Octavo-Browser": secret})
        assert answer.status == 404
    two.evaluate(  # what the page's own script would send for somebody else's chat
        "id => { const item = document.createElement('div'); item.dataset.id = id; item.innerHTML ="
        " '<button data-do=open>x</button>'; document.body.append(item); item.firstChild.click(); }",
        chat,
    )
    two.wait_for_timeout(500)
    assert "vermilion" not in two.content()


def test_after_a_restart_chats_are_there_and_an_interrupted_answer_says_so(
    start_site: Start, open_page: Open, texts: Texts
) -> None:
    site = start_site(Script(chunk_s=0.3, token_s=0.02))
    page = _read(site, open_page, texts("restart.txt", "saffron"))
    site.script.token_s = 0.5
    ask(page, "And once more?")
    _answers(page, 2)
    state(page, "answering", "reading")
    secret = page.evaluate("localStorage.getItem('octavo-browser')")
    owner = site.service.library.owner(secret)
    saved = owner.open_chat(owner.chats.find()[0].id)  # as the disk has it at this moment
    assert saved is not None
    assert [turn.finish_reason for turn in saved.path(saved.head)] == ["stop", "interrupted"]
    page.keyboard.press("Escape")
    state(page, "idle")
    owner.save_chat(saved)
    add(page, texts("waits.txt", "umber"))
    state(page, "plan")
    tab = page.evaluate("sessionStorage.getItem('octavo')")

    second = start_site(Script(chunk_s=0.05, token_s=0.002))
    fresh, other = open_page(second.url), open_page(second.url)
    for page in (fresh, other):
        state(page, "idle")
        page.evaluate("kept => sessionStorage.setItem('octavo', kept)", tab)
    fresh.evaluate("key => localStorage.setItem('octavo-browser', key)", secret)
    fresh.reload()
    _answers(fresh, 2)
    until(lambda: "Interrupted" in fresh.inner_text("#oc-chat"))
    until(lambda: "Add them again" in fresh.inner_text("#oc-strip"))  # what waited on the shelf
    other.reload()
    other.wait_for_selector(".oc-welcome", state="visible")
    state(other, "error")  # its tab says that documents waited there
    assert "code word" not in other.inner_text("#oc-chats") and not other.is_visible("#oc-chat")
    fresh.click("[aria-label='Answer question 2 again']")
    until(lambda: "2 / 2" in fresh.inner_text("#oc-chat"))
    state(fresh, "idle")
    assert fresh.locator(f"{ANSWER} strong").last.inner_text() == "saffron"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_panel_on_a_narrow_screen(site: Site, open_page: Open, tmp_path: Path, scheme: str) -> None:
    page = open_page(site.url, viewport={"width": 390, "height": 844}, color_scheme=scheme)
    state(page, "idle")
    _asked(page, "Is there a panel?", 1)
    assert not page.is_visible("#oc-side")
    page.click("#oc-header [data-do=side]")
    page.wait_for_selector("#oc-side .oc-search", state="visible")
    page.click("#oc-side [data-do=fresh]")
    page.wait_for_selector(".oc-welcome", state="visible")
    menus = "[...document.querySelectorAll('#oc-chats summary')].map(e => e.checkVisibility({opacityProperty: true}))"
    assert page.evaluate(menus) == [True]  # of a chat that is not the open one
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.screenshot(path=str(tmp_path / f"panel-{scheme}.png"))
    page.keyboard.press("Escape")
    until(lambda: not page.is_visible("#oc-side"))
