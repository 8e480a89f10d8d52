"""The other server breaks: told on the page, on the command line and by the API, and over when the server is back."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

import app.remote.engine
from app.__main__ import main
from app.api import add_api
from app.config import Settings
from app.engine.types import Failed, Token
from app.library import Library
from app.remote import RemoteService
from app.remote.engine import RemoteError
from app.ui.conversation import Conversation
from app.ui.messages import messages
from app.ui.server import bind
from tests.api.broken_server import PIECES, Broken, broken_server
from tests.api.conftest import Start

HOWS = {
    "dies": "broke off its answer in the middle",
    "ends": "broke off its answer in the middle",
    "refuses": "wants another key. Set OPENAI_API_KEY",
    "fails": r"refused \(500\).*out of memory",
}


@pytest.fixture
def other() -> Iterator[tuple[str, Broken]]:
    with broken_server() as found:
        yield found


@pytest.fixture
def service(other: tuple[str, Broken]) -> Iterator[RemoteService]:
    service = RemoteService(Settings(engine="openai", base_url=other[0]))
    service.load()
    assert service.ready
    yield service
    service.close()


@pytest.mark.parametrize("how", HOWS)
def test_the_service_tells_and_goes_on(other: tuple[str, Broken], service: RemoteService, how: str) -> None:
    chat = service.new_chat()
    other[1].how = how
    events = list(service.ask(chat, "What?"))
    assert isinstance(events[-1], Failed)
    assert isinstance(events[-1].error, RemoteError)
    with pytest.raises(RemoteError, match=HOWS[how]):
        service.ask(chat, "What?").result()
    assert [event.text for event in events if isinstance(event, Token)] == list(PIECES) * (how in ("dies", "ends"))
    assert chat.turns == []  # half an answer is none: the model never sees it
    assert service.status()["totals"]["requests"] == {"failed": 2}
    other[1].how = "whole"
    assert service.ask(chat, "What?").result().text == "".join(PIECES)


@pytest.mark.parametrize("how", HOWS)
def test_the_page_tells(other: tuple[str, Broken], service: RemoteService, tmp_path: Path, how: str) -> None:
    conversation = Conversation(service, Library(tmp_path).owner("secret"))
    other[1].how = how
    answer = conversation.ask("What?")
    answer.finished.wait()
    turn = conversation.chat.tree[answer.turn_id]
    assert turn.finish_reason == "failed"
    assert re.search(HOWS[how], turn.error)
    assert turn.answer == "".join(PIECES) * (how in ("dies", "ends"))  # what came stays to be read
    shown = str(messages(conversation, 0)[-1])
    assert ("The first words and more" in shown) == (how in ("dies", "ends")) and "oc-failed" in shown
    other[1].how = "whole"
    again = conversation.ask_again(turn.id)
    again.finished.wait()
    assert conversation.chat.turns[-1].answer == "".join(PIECES)


@pytest.mark.parametrize("how", HOWS)
def test_the_command_line_tells(other: tuple[str, Broken], capsys: pytest.CaptureFixture[str], how: str) -> None:
    other[1].how = how
    assert main(["ask", "--engine", "openai", "--base-url", other[0], "What?"]) == 1
    told = capsys.readouterr().err.strip().splitlines()
    assert len(told) == 1
    assert told[0].startswith(f"octavo: {other[0]} ")


def test_the_api_tells(other: tuple[str, Broken], service: RemoteService, tmp_path: Path) -> None:
    app = FastAPI()
    add_api(app, service, tmp_path / "files")
    sock = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{sock.getsockname()[1]}/v1/chat/completions"
    body = {"model": "m", "messages": [{"role": "user", "content": "What?"}]}
    for how, status in (("dies", 502), ("ends", 502), ("refuses", 502), ("fails", 502), ("whole", 200)):
        other[1].how = how
        answer = httpx.post(url, json=body)
        assert answer.status_code == status, answer.text
        assert status == 200 or other[0] in answer.json()["error"]["message"]
        if how in ("dies", "ends"):
            lines = [line for line in httpx.post(url, json=body | {"stream": True}).iter_lines() if line]
            assert "broke off" in json.loads(lines[-1].removeprefix("data: "))["error"]["message"]
    server.should_exit = True
    thread.join(10)


def test_a_list_of_models_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app.remote.engine, "_CONNECT_S", 0.2)
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def trickle() -> None:
            connection, _ = listening.accept()
            with connection, suppress(OSError):
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 999\r\n\r\n")
                while not over.wait(0.05):
                    connection.sendall(b" ")

        threading.Thread(target=trickle, daemon=True).start()
        engine = app.remote.engine.RemoteEngine(f"http://127.0.0.1:{listening.getsockname()[1]}/v1", "")
        with pytest.raises(RemoteError, match="does not finish its list of models"):
            engine.models()
        over.set()
        engine.close()


def test_a_server_that_comes_later_is_found(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    assert main(["ask", "--engine", "openai", "--base-url", f"{url}/v1", "What?"]) == 1
    told = f"octavo: {url}/v1 does not answer. Start that server, or give another --base-url.\n"
    assert capsys.readouterr().err == told
    service = RemoteService(Settings(engine="openai", base_url=f"{url}/v1"))
    found = threading.Event()
    find = service._find_model

    def watched() -> None:
        find()
        if service.ready:
            found.set()

    service._find_model = watched  # type: ignore[method-assign]
    service.load()
    with pytest.raises(RemoteError, match="does not answer"):
        service.ask(service.new_chat(), "What?")
    start(port=port)
    found.wait()
    assert service.load_error is None
    assert service.ask(service.new_chat(), "What?").result().text == "Yes."
    service.close()
