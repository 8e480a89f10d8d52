"""The whole app in a process of its own, with the embedded model: a fact goes in as a file and comes back in words."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page

from tests.browser.conftest import FILLER, add, ask, state, until

pytestmark = pytest.mark.browser

ANSWER = "#oc-chat .bot .prose"


@pytest.fixture
def url() -> Iterator[str]:
    command = [sys.executable, "-m", "app", "serve", "--port", "0", "--model", "embedded"]
    process = subprocess.Popen(
        command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if found := re.search(r"http://127\.0\.0\.1:\d+", line):
            yield found[0]
            break
    else:
        pytest.fail("".join(lines))
    process.terminate()
    process.wait(20)


def test_ask_the_embedded_model(url: str, open_page: Callable[..., Page], tmp_path: Path) -> None:
    page = open_page(url)
    state(page, "idle", seconds=120)
    text = FILLER * 5 + "The pass key is 73914. Remember it. 73914 is the pass key.\n" + FILLER * 3
    (tmp_path / "ledger.txt").write_text(text, encoding="utf-8")
    add(page, tmp_path / "ledger.txt")
    state(page, "plan")
    assert "about" in page.inner_text("#oc-strip")
    ask(page, "What is the pass key?")
    state(page, "reading")
    state(page, "answering", seconds=120)
    until(lambda: "73914" in page.inner_text(ANSWER), 60)
    page.screenshot(path=str(tmp_path / "answered.png"))
    if page.query_selector("[data-state=answering]"):
        page.click("#oc-question .stop-button")
    state(page, "idle")
    assert "Context 1," in page.inner_text("#oc-status")


def test_heads_preview_and_self_test(url: str, open_page: Callable[..., Page], tmp_path: Path) -> None:
    page = open_page(url)
    state(page, "idle", seconds=120)
    page.click("#oc-heads > button")
    page.wait_for_selector("#oc-heads-picture img[src^='data:image/png']", timeout=60_000)
    until(lambda: "45 heads keep everything" in page.inner_text("#oc-heads-preview"), 60)
    assert page.locator("#oc-costs td:first-child:has-text('--kv')").count() == 3
    page.fill("#oc-heads input[type=number]", "0.2")
    page.press("#oc-heads input[type=number]", "Enter")
    until(lambda: "--retrieval-ratio 0.2" in page.inner_text("#oc-heads-preview"), 60)
    page.screenshot(path=str(tmp_path / "heads.png"))
    page.click("#oc-self-test")
    until(lambda: "Add a document first." in page.inner_text("#oc-depths"))
    (tmp_path / "ledger.txt").write_text(FILLER * 6, encoding="utf-8")
    add(page, tmp_path / "ledger.txt")
    state(page, "plan")
    page.click("#oc-self-test")
    until(lambda: page.locator("#oc-depths td:nth-child(2)").count() == 8, 240)
    found = page.locator("#oc-depths .oc-found").count()
    assert found >= 4  # a small model; what it finds among eight alike facts is not this test's matter
    assert page.inner_text("#oc-depths").startswith(f"{found} of 8 planted facts found")
    page.screenshot(path=str(tmp_path / "self-test.png"))
