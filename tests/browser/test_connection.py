"""A connection that is cut, or that dies without a word: the page finds its answer again by itself."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page

from tests.browser.conftest import Site, ask, state, until
from tests.browser.scripted import Script

pytestmark = pytest.mark.browser

ANSWER = "It is the first sentence of this answer. It is the second one. And this is its end."


class Wire:
    """Carries bytes between a browser and a server until it is told otherwise."""

    def __init__(self, url: str) -> None:
        self._target = int(url.rpartition(":")[2])
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._frozen: set[socket.socket] = set()
        self._gone = False  # nobody is let in
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """End every connection, and refuse new ones."""
        self._gone = True
        self._drop()

    def mend(self) -> None:
        self._gone = False

    def freeze(self) -> None:
        """Carry nothing more over the connections that are there; new ones work."""
        with self._lock:
            self._frozen = set(self._open)

    def close(self) -> None:
        self._listening.close()
        self._drop()

    def _drop(self) -> None:
        with self._lock:
            ended, self._open = self._open, []
        for one in ended:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                here, _ = self._listening.accept()
                if self._gone:
                    here.close()
                    continue
                there = socket.create_connection(("127.0.0.1", self._target))
                with self._lock:
                    self._open += [here, there]
                for ends in ((here, there), (there, here)):
                    threading.Thread(target=self._carry, args=ends, daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if source not in self._frozen:
                    target.sendall(data)
        if source not in self._frozen:
            for one in (source, target):
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def site(start_site: Callable[[Script], Site], monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setattr("app.ui.drawing.PULSE_S", 1.0)
    monkeypatch.setattr("app.ui.drawing.QUIET_S", 8.0)
    return start_site(Script(chunk_s=0.0, token_s=0.005, answer=ANSWER))


@pytest.fixture
def wire(site: Site) -> Iterator[Wire]:
    wire = Wire(site.url)
    yield wire
    wire.close()


@pytest.mark.parametrize("how", ["cut", "freeze"])
def test_the_answer_is_found_when_the_connection_is_back(
    site: Site, wire: Wire, open_page: Callable[..., Page], how: str
) -> None:
    page = open_page(wire.url)
    state(page, "idle")
    site.script.go.clear()
    ask(page, "What is asked before the line breaks?")
    state(page, "reading", "answering")
    # The first question brings the script that draws the chat, which must have come before the line breaks.
    until(lambda: "What is asked before the line breaks?" in page.inner_text("#oc-chat"))
    page.fill("#oc-question textarea", "And what is being typed")
    if how == "cut":
        wire.cut()
    else:
        wire.freeze()
    site.script.go.set()
    until(lambda: not site.service.busy)  # the server goes on, whoever hears it
    page.wait_for_timeout(1500)
    assert "this is its end" not in page.inner_text("#oc-chat")
    wire.mend()
    until(lambda: "this is its end" in page.inner_text("body"), 60)
    state(page, "idle")
    until(lambda: page.input_value("#oc-question textarea") == "And what is being typed")
    ask(page, "Does it go on?")
    until(lambda: page.inner_text("#oc-chat").count("this is its end") == 2, 60)
    assert page.input_value("#oc-question textarea") == ""


def test_word_of_a_lost_connection_covers_no_question_box(
    site: Site, wire: Wire, open_page: Callable[..., Page], tmp_path: Path
) -> None:
    page = open_page(wire.url)
    state(page, "idle")
    site.script.go.clear()
    ask(page, "What is asked?")
    page.wait_for_selector("#oc-question .stop-button")
    wire.cut()
    page.wait_for_selector(".toast-body", timeout=60_000)
    for width, height in ((1440, 900), (390, 844)):
        page.set_viewport_size({"width": width, "height": height})
        toast, header, dock = (
            page.locator(part).first.bounding_box() for part in (".toast-body", "#oc-header", "#oc-dock")
        )
        assert toast and header and dock
        page.screenshot(path=str(tmp_path / f"lost-{width}.png"))
        assert toast["y"] >= header["y"] + header["height"] and toast["y"] + toast["height"] <= dock["y"]
    site.script.go.set()


def test_a_reload_is_quiet(site: Site, open_page: Callable[..., Page]) -> None:
    page = open_page(site.url)
    state(page, "idle")
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    for _ in range(3):
        page.reload()
        state(page, "idle")
    page.wait_for_timeout(500)
    assert said == []


def test_a_stream_of_a_session_that_is_gone_ends_and_is_not_broken(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    # A page that is being left may ask for its stream once more, behind the server's having dropped it.
    got = httpx.get(f"{site.url}/gradio_api/queue/data", params={"session_hash": "gone"})
    assert "session_not_found" in got.text  # reads to the end: a broken stream raises here
    assert [record for record in caplog.records if record.exc_info] == []
