"""Several documents at once: a dropped folder is one; they are read in the order of the shelf."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page

from app.ui.drawing import Drawing
from app.ui.parts import Changes
from app.ui.session import Session
from tests.browser.conftest import Site, add, ask, state, until

pytestmark = pytest.mark.browser


def drop(page: Page, *paths: Path) -> None:
    """What a file manager does, by way of the browser's own protocol."""
    client = page.context.new_cdp_session(page)
    data = {"items": [], "files": [str(path) for path in paths], "dragOperationsMask": 1}
    for kind in ("dragEnter", "dragOver", "drop"):
        client.send("Input.dispatchDragEvent", {"type": kind, "x": 400, "y": 300, "data": data})


def test_a_dropped_folder_is_one_document(site: Site, open_page: Callable[..., Page], tmp_path: Path) -> None:
    shop = tmp_path / "shop"
    for name, text in (
        ("README.md", "# Shop\n"),
        ("src/deep/tea.py", "# Remember: the code word is OOLONG.\nPRICE = 3\n"),
        ("node_modules/left.js", "never sent"),
        ("poetry.lock", "x"),
    ):
        (shop / name).parent.mkdir(parents=True, exist_ok=True)
        (shop / name).write_text(text)
    (shop / "logo.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"\0" * 50)
    loose = tmp_path / "loose.txt"
    loose.write_text("A file beside it.")
    page = open_page(site.url)
    state(page, "idle")
    drop(page, shop, loose)
    for name in ("shop", "loose.txt"):
        page.wait_for_selector(f"#oc-shelf .oc-card:not(.oc-busy):has-text('{name}')", timeout=60_000)
    state(page, "plan")
    card = page.inner_text("#oc-shelf .oc-card:has-text('shop')")
    assert "2 files skipped: 1 binary or not readable, 1 lock files." in card
    ask(page, "What is the code word?")
    page.wait_for_selector("#oc-chat .bot:has-text('OOLONG')", timeout=90_000)
    state(page, "idle", seconds=90)


@pytest.fixture
def shelf(site: Site, open_page: Callable[..., Page], tmp_path: Path) -> Page:
    """A page with three documents on its shelf."""
    page = open_page(site.url)
    state(page, "idle")
    for name in ("first", "second", "third"):
        (tmp_path / f"{name}.txt").write_text(f"Remember: the code word is {name.upper()}.")
    add(page, *(tmp_path / f"{name}.txt" for name in ("first", "second", "third")))
    state(page, "plan")
    return page


def names(page: Page) -> list[str]:
    return page.locator("#oc-shelf .oc-name").all_inner_texts()


def test_documents_are_read_in_the_order_of_the_shelf(shelf: Page) -> None:
    page = shelf
    assert names(page) == ["first.txt", "second.txt", "third.txt"]
    assert page.locator("#oc-shelf [data-do=earlier]").count() == 2  # the first is first
    page.click("[aria-label='Read third.txt earlier']")
    until(lambda: names(page) == ["first.txt", "third.txt", "second.txt"])
    page.click("[aria-label='Remove first.txt']")
    until(lambda: names(page) == ["third.txt", "second.txt"])
    page.click("[aria-label='Read second.txt earlier']")
    until(lambda: names(page) == ["second.txt", "third.txt"])
    state(page, "plan")
    ask(page, "What is the last code word?")
    page.wait_for_selector("#oc-chat .bot:has-text('THIRD')", timeout=90_000)
    state(page, "idle", seconds=90)


def test_cards_never_go_back_to_an_older_order(shelf: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = Drawing._lists

    def slow(drawing: Drawing, session: Session) -> Changes:
        time.sleep(0.3)  # as a disk that is busy
        return listed(drawing, session)

    monkeypatch.setattr(Drawing, "_lists", slow)
    shelf.evaluate(
        """() => {
          const now = () => [...document.querySelectorAll("#oc-shelf .oc-name")].map((name) => name.textContent).join();
          window.orders = [now()];
          new MutationObserver(() => orders.at(-1) === now() || orders.push(now())).observe(
            document.querySelector("#oc-shelf"), { childList: true, characterData: true, subtree: true });
        }"""
    )
    orders = [["first", "second", "third"], ["first", "third", "second"], ["third", "second"], ["second", "third"]]
    orders += [["third"], []]
    told = [",".join(f"{name}.txt" for name in order) for order in orders]
    presses = (
        "Read third.txt earlier",
        "Remove first.txt",
        "Read second.txt earlier",
        "Remove second.txt",
        "Remove third.txt",
    )
    for at, pressed in enumerate(presses, 1):
        shelf.click(f"[aria-label='{pressed}']")
        shelf.wait_for_function("order => orders.includes(order)", arg=told[at])
    assert shelf.evaluate("orders") == told


def test_what_is_pressed_counts_when_it_is_drawn_anew_meanwhile(shelf: Page) -> None:
    def press(label: str) -> None:
        box = shelf.locator(f"[aria-label='{label}']").bounding_box()
        assert box is not None
        shelf.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        shelf.mouse.down()

    press("Remove third.txt")
    shelf.evaluate("document.querySelector(`[aria-label='Read third.txt earlier']`).click()")
    until(lambda: names(shelf) == ["first.txt", "third.txt", "second.txt"])
    shelf.mouse.up()  # over what is the second one's button now
    press("Remove first.txt")
    shelf.evaluate(
        "const button = document.querySelector(`[aria-label='Remove first.txt']`);"
        "button.replaceWith(button.cloneNode(true))"
    )
    shelf.mouse.up()
    until(lambda: names(shelf) == ["third.txt", "second.txt"])
