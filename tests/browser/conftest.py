"""A real Chromium on the real page: over a scripted model for speed, over the embedded one for truth."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from playwright.sync_api import Browser, Page, Request, sync_playwright

from app.config import Settings
from app.local import LocalService
from tests.browser.scripted import Script

FILLER = "The harbour office recorded the arrival of every ship, its cargo and its master. " * 12 + "\n"


@dataclass
class Site:
    """A running page and what is behind it."""

    url: str
    script: Script
    service: LocalService


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Headless Chromium; without it tests are skipped, or fail where OCTAVO_REQUIRE_BROWSER=1."""
    if chromium_path() is None:
        why = "No Chromium is installed (apt-get install chromium)."
        pytest.fail(why) if os.environ.get("OCTAVO_REQUIRE_BROWSER") == "1" else pytest.skip(why)
    with chromium() as running:
        yield running


def chromium_path() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Headless Chromium."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium_path(), args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield browser
        browser.close()


@contextmanager
def starting() -> Iterator[Callable[[Script], Site]]:
    """Starts pages over scripted models; all are stopped at the end."""
    from app.ui.server import bind, create_app

    running: list[tuple[uvicorn.Server, threading.Thread, LocalService]] = []

    def start(script: Script) -> Site:
        settings = Settings(port=0)
        sock = bind(settings.host, settings.port)
        service = LocalService(settings, script.open)
        app = create_app(service, settings)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
        thread.start()
        running.append((server, thread, service))
        return Site(f"http://127.0.0.1:{sock.getsockname()[1]}", script, service)

    yield start
    for server, thread, service in running:
        server.should_exit = True
        thread.join(10)
        service.close()


@pytest.fixture(scope="module")
def start_site() -> Iterator[Callable[[Script], Site]]:
    with starting() as start:
        yield start


@pytest.fixture(scope="module")
def site(start_site: Callable[[Script], Site]) -> Site:
    """A page whose model reads 256 tokens in 0.3 s and writes 40 tokens a second."""
    return start_site(Script(chunk_s=0.3, token_s=0.025))


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens pages, each in a profile of its own; checks that none of them got anything from elsewhere."""
    contexts = []
    elsewhere: list[str] = []

    def note(request: Request) -> None:
        if not request.url.startswith(("http://127.0.0.1:", "data:", "blob:")):
            elsewhere.append(request.url)

    def open_one(url: str, **options: Any) -> Page:
        context = browser.new_context(**({"viewport": {"width": 1440, "height": 900}} | options))
        contexts.append(context)
        context.on("requestfinished", note)
        page = context.new_page()
        page.goto(url)
        page.wait_for_selector("#oc-question textarea")
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert elsewhere == []


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a text of `lines` long lines (195 tokens each) that ends with a code word."""
    folder = tmp_path_factory.mktemp("texts")

    def write(name: str, word: str, lines: int = 6) -> Path:
        path = folder / name
        path.write_text(FILLER * lines + f"\nRemember: the code word is {word}.\n", encoding="utf-8")
        return path

    return write


def add(page: Page, *paths: Path) -> None:
    """Upload files and wait until the plan or the refusal is there."""
    page.set_input_files("#oc-picker", [str(path) for path in paths])
    for path in paths:
        page.wait_for_selector(f"#oc-shelf .oc-card:not(.oc-busy):has-text('{path.name}')")


def ask(page: Page, question: str) -> None:
    page.fill("#oc-question textarea", question)
    page.press("#oc-question textarea", "Enter")


def state(page: Page, *names: str, seconds: float = 60.0) -> None:
    """Wait until the strip is in one of these states. Asks again and again: a tab behind another draws no frames."""
    selector = ", ".join(f"[data-state={name}]" for name in names)
    until(lambda: page.query_selector(selector) is not None, seconds)


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for a condition; fails after `seconds`."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, f"waited {seconds:g} s in vain"
        time.sleep(0.02)
