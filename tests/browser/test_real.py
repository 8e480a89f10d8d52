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
    ask(page, "Which number is the pass key?")  # asked what it is, so small a model may explain what pass keys are
    state(page, "reading")
    state(page, "answering", seconds=120)
    until(lambda: "73914" in page.inner_text(ANSWER), 60)
    page.screenshot(path=str(tmp_path / "answered.png"))
    page.keyboard.press("Escape")  # stops it, unless it has ended already
    state(page, "idle")
    assert page.inner_text("#oc-status").startswith("1,")


def test_other_settings_are_previewed_and_used(url: str, open_page: Callable[..., Page], tmp_path: Path) -> None:
    page = open_page(url)
    state(page, "idle", seconds=120)
    page.click("#oc-heads > button")
    page.wait_for_selector("#oc-heads-picture .oc-heads-map", timeout=60_000)
    until(lambda: "In force" in page.inner_text("#oc-costs") and "\t45" in page.inner_text("#oc-costs"), 60)
    assert page.is_disabled("#oc-use")
    page.fill("#oc-heads-ratio input[type=number]", "0.2")
    page.press("#oc-heads-ratio input[type=number]", "Enter")
    page.click("#oc-heads-kv label:has-text('8 bits')")
    until(lambda: "\t45\t18" in page.inner_text("#oc-costs"), 60)
    assert "for everybody" in page.inner_text("#oc-use-note")
    page.screenshot(path=str(tmp_path / "previewed.png"))
    page.click("#oc-use")
    until(lambda: "in force now" in page.inner_text("#oc-use-note"), 120)
    assert "\t18" in page.inner_text("#oc-costs") and page.is_disabled("#oc-use")
    text = FILLER * 2 + "The pass key is 73914. Remember it. 73914 is the pass key.\n" + FILLER
    (tmp_path / "ledger.txt").write_text(text, encoding="utf-8")
    add(page, tmp_path / "ledger.txt")
    state(page, "plan")
    ask(page, "What is the pass key?")
    until(lambda: "73914" in page.inner_text(ANSWER), 120)
    page.screenshot(path=str(tmp_path / "used.png"))


def test_self_test_of_a_chosen_document(url: str, open_page: Callable[..., Page], tmp_path: Path) -> None:
    page = open_page(url)
    state(page, "idle", seconds=120)
    page.click("#oc-heads > button")
    page.wait_for_selector("#oc-heads-picture .oc-heads-map", timeout=60_000)
    page.click("#oc-self-test")
    until(lambda: "Add a document first." in page.inner_text("#oc-depths"))
    for name, times in (("ledger.txt", 6), ("letter.txt", 2)):
        (tmp_path / name).write_text(FILLER * times, encoding="utf-8")
        add(page, tmp_path / name)
        state(page, "plan")
    page.click("#oc-self-test-document input")
    page.click("#oc-self-test-document [role=option]:has-text('letter.txt')")
    page.click("#oc-self-test")
    page.wait_for_selector("#oc-depths .oc-found, #oc-depths .oc-lost", timeout=120_000)
    page.click("#oc-self-test-stop")
    until(lambda: "Stopped after" in page.inner_text("#oc-depths"), 60)
    assert "letter.txt" in page.inner_text("#oc-depths")
    page.click("#oc-self-test-document input")
    page.click("#oc-self-test-document [role=option]:has-text('ledger.txt')")
    page.click("#oc-self-test")
    until(lambda: page.locator("#oc-depths td:nth-child(2)").count() == 8, 240)
    found = page.locator("#oc-depths .oc-found").count()
    assert found >= 6
    assert page.inner_text("#oc-depths").startswith(f"{found} of 8 planted facts found in ledger.txt")
    page.screenshot(path=str(tmp_path / "self-test.png"))
