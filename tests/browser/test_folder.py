"""Several documents at once: a dropped folder is one; they are read in the order of the shelf."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page

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


def test_documents_are_read_in_the_order_of_the_shelf(
    site: Site, open_page: Callable[..., Page], tmp_path: Path
) -> None:
    page = open_page(site.url)
    state(page, "idle")
    for name in ("first", "second", "third"):
        (tmp_path / f"{name}.txt").write_text(f"Remember: the code word is {name.upper()}.")
    add(page, *(tmp_path / f"{name}.txt" for name in ("first", "second", "third")))

    def names() -> list[str]:
        return page.locator("#oc-shelf .oc-name").all_inner_texts()

    state(page, "plan")
    assert names() == ["first.txt", "second.txt", "third.txt"]
    assert page.locator("#oc-shelf [data-do=earlier]").count() == 2  # the first is first
    page.click("[aria-label='Read third.txt earlier']")
    until(lambda: names() == ["first.txt", "third.txt", "second.txt"])
    page.click("[aria-label='Remove first.txt']")
    until(lambda: names() == ["third.txt", "second.txt"])
    page.click("[aria-label='Read second.txt earlier']")
    until(lambda: names() == ["second.txt", "third.txt"])
    state(page, "plan")
    ask(page, "What is the last code word?")
    page.wait_for_selector("#oc-chat .bot:has-text('THIRD')", timeout=90_000)
    state(page, "idle", seconds=90)
