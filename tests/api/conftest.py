"""The API over a fake model, served in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI

from app.access import Access, Guard
from app.api import add_api
from app.config import Settings
from app.local import LocalService
from app.model import OpenModel
from app.ui.server import bind
from tests.fakes import END, FakeRunner, FakeTokenizer

Start = Callable[..., str]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Serves the API over a fake model, without the page; gives its address."""
    running: list[tuple[uvicorn.Server, threading.Thread, LocalService]] = []

    def serve(*, access: Access | None = None, local: bool = True, port: int = 0, **runner: Any) -> str:
        model = OpenModel("fake", FakeRunner(**{"capacity": 2000} | runner), FakeTokenizer(), frozenset({END}), int)
        service = LocalService(Settings(), lambda settings, progress: model)
        service.load()
        app = FastAPI()
        add_api(app, service, tmp_path / "files")
        app.add_middleware(Guard, local=local, host="127.0.0.1", access=access)
        sock = bind("127.0.0.1", port)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
        thread.start()
        running.append((server, thread, service))
        return f"http://127.0.0.1:{sock.getsockname()[1]}"

    yield serve
    for server, thread, service in running:
        server.should_exit = True
        thread.join(10)
        runner = service._loaded.engine.runner if service._loaded else None
        service.close()
        assert isinstance(runner, FakeRunner)
        assert runner.open_slots == 0
