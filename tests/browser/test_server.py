"""The web server around the page, without a browser."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.testclient import TestClient

from app.access import Access, Attempts, Guard, is_local
from app.config import Settings
from app.errors import UsageError
from app.local import LocalService
from app.ui.server import bind, create_app, serve
from app.ui.uploads import Uploads
from tests.fakes import result_of


def test_a_taken_port_is_a_usage_error() -> None:
    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(UsageError, match=f"Port {port} on 127.0.0.1 is in use"):
            bind("127.0.0.1", port)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1"])
def test_an_address_of_another_machine_is_a_usage_error(host: str) -> None:
    with pytest.raises(UsageError, match=host):
        bind(host, 0)


def test_is_local() -> None:
    assert all(map(is_local, ("127.0.0.1", "localhost", "::1")))
    assert not any(map(is_local, ("0.0.0.0", "10.1.2.3", "octavo.example")))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_other_machines_are_let_in_only_with_a_password_or_key(host: str) -> None:
    with pytest.raises(UsageError, match="--auth USER:PASSWORD"):
        serve(Settings(host=host, auth=(), api_key=()))


def test_passwords_and_keys_are_checked_before_anything_starts() -> None:
    for auth in ("", "ann", "ann:", ":secret"):
        with pytest.raises(UsageError, match="USER:PASSWORD"):
            Settings(auth=(auth,))
    for key in ("", "short", "with a space"):
        with pytest.raises(UsageError, match="--api-key"):
            Settings(api_key=(key,))
    assert "s3cret" not in repr(Settings(auth=("ann:s3cret",), api_key=("s3cret-s3cret",)))


def test_from_elsewhere_a_key_opens_the_api_and_a_password_everything() -> None:
    app = FastAPI()
    app.add_api_route("/", lambda: "page")
    app.add_api_route("/v1/models", lambda: "api")
    app.add_middleware(Guard, local=False, host="0.0.0.0", access=Access(keys=["key-key-key"]))
    client, key = _client(app), {"authorization": "Bearer key-key-key"}
    assert client.get("/v1/models", headers=key).status_code == 200
    assert client.get("/v1/models").status_code == 401
    assert client.get("/", headers=key).status_code == client.get("/").status_code == 403
    app = FastAPI()
    app.add_api_route("/", lambda: "page")
    app.add_api_route("/v1/models", lambda: "api")
    app.add_middleware(Guard, local=False, host="0.0.0.0", access=Access(["ann:pass:word"]))
    client = _client(app)
    assert client.get("/").status_code == client.get("/v1/models").status_code == 401
    for path in ("/", "/v1/models"):
        assert client.get(path, auth=("ann", "pass:word")).status_code == 200


def _guessing(address: str, app: Any) -> TestClient:
    return _client(app, client=(address, 1))


def test_many_addresses_cannot_guess_one_name_nor_lock_its_person_out() -> None:
    now = [1000.0]
    app = FastAPI()
    app.add_api_route("/", lambda: "page")
    guarded = Guard(app, local=True, host="127.0.0.1", access=Access(["ann:right", "bob:right"]))
    guarded.attempts = Attempts(lambda: now[0])
    assert _guessing("10.0.0.1", guarded).get("/", auth=("ann", "right")).status_code == 200
    answers = [_guessing(f"10.1.0.{at}", guarded).get("/", auth=("ann", f"wrong {at}")).status_code for at in range(25)]
    assert answers == [401] * 20 + [429] * 5
    assert _guessing("10.0.0.1", guarded).get("/", auth=("ann", "right")).status_code == 200  # known here
    assert _guessing("10.1.0.1", guarded).get("/", auth=("bob", "right")).status_code == 200
    elsewhere = _guessing("10.2.0.1", guarded)
    held = elsewhere.get("/", auth=("ann", "right"))
    assert (held.status_code, held.headers["retry-after"]) == (429, "5")
    now[0] += 5
    assert elsewhere.get("/", auth=("ann", "right")).status_code == 200
    now[0] += 4000
    assert _guessing("10.3.0.1", guarded).get("/", auth=("ann", "wrong")).status_code == 401  # forgotten by now
    assert _guessing("10.3.0.2", guarded).get("/", auth=("ann", "wrong")).status_code == 401


@pytest.mark.parametrize("behind_proxy", [False, True])
def test_a_header_says_who_asks_only_behind_a_proxy(tmp_path: Path, behind_proxy: bool) -> None:
    """The server as it is started: uvicorn would believe the header of whoever asks from this machine."""
    port, flags = _free_port(), ["--behind-proxy"] if behind_proxy else []
    with _server(tmp_path, port, "--auth", "ann:right-one", *flags) as (url, _):
        codes = [
            httpx.get(url, auth=("ann", f"wrong {at}"), headers={"x-forwarded-for": f"10.0.0.{at}"}).status_code
            for at in range(8)
        ]
    assert codes == ([401] * 8 if behind_proxy else [401] * 5 + [429] * 3)


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_and_leaves_nothing(tmp_path: Path, sent: signal.Signals) -> None:
    with _server(tmp_path, _free_port()) as (url, running):
        assert httpx.get(url).status_code == 200
        assert list(tmp_path.glob("octavo-*"))
        running.send_signal(sent)
        assert running.wait(30) in (0, 128 + sent)
    assert not list(tmp_path.glob("octavo-*"))


@pytest.mark.parametrize("seconds", [0.0, 1.0, 2.0])
def test_a_signal_while_the_model_loads_is_a_normal_end(tmp_path: Path, seconds: float) -> None:
    with _server(tmp_path, _free_port(), "--model", "embedded", engine="own") as (url, running):
        assert httpx.get(f"{url}/health").json()["status"] == "loading"
        time.sleep(seconds)
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) in (0, 128 + signal.SIGTERM)  # an abort would be -6


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def _server(
    tmp_path: Path, port: int, *flags: str, engine: str = "openai"
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """`./launch.sh serve`, over a server that is not there unless told otherwise; temporary files under `tmp_path`."""
    command = [sys.executable, "-m", "app", "--port", str(port), "--engine", engine, *flags]
    if engine == "openai":
        command += ["--base-url", "http://127.0.0.1:9/v1"]
    env = {**os.environ, "TMPDIR": str(tmp_path), "OCTAVO_CACHE": str(tmp_path / "cache")}
    running = subprocess.Popen(command, env=env)
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 60
        while True:
            try:
                httpx.get(f"{url}/health", timeout=30)
                break
            except httpx.TransportError:
                assert running.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
        yield url, running
    finally:
        running.kill()
        running.wait()


def test_guessing_takes_longer_and_longer_and_holds_up_nobody_else() -> None:
    now = [0.0]
    app = FastAPI()
    app.add_api_route("/", lambda: "page")
    app.add_api_route("/v1/models", lambda: "api")
    guarded = Guard(app, local=True, host="127.0.0.1", access=Access(["ann:right", "bob:right"], ["key-key-key"]))
    guarded.attempts = Attempts(lambda: now[0])
    one, other = _guessing("10.0.0.1", guarded), _guessing("10.0.0.2", guarded)
    for _ in range(20):
        assert one.get("/").status_code == 401  # asks for a password: no attempt
    for _ in range(3):
        for number in range(4):
            assert one.get("/", auth=("ann", f"wrong {number}")).status_code == 401
        assert one.get("/", auth=("ann", "right")).status_code == 200  # forgets what was wrong before
    waits = []
    for number in range(12):
        assert one.get("/", auth=("ann", f"wrong {number}")).status_code == 401
        if number >= 4:
            held = one.get("/v1/models", auth=("ann", "right"))
            assert held.status_code == 429
            assert held.json()["error"]["code"] == "too_many_attempts"
            waits.append(int(held.headers["retry-after"]))
            assert f"Wait {waits[-1]} s" in held.json()["error"]["message"]
            assert other.get("/", auth=("ann", "right")).status_code == 200  # from elsewhere
            assert one.get("/", auth=("bob", "right")).status_code == 200  # somebody else behind the same address
            assert one.get("/v1/models", headers={"authorization": "Bearer key-key-key"}).status_code == 200
            assert one.get("/").status_code == 401
            now[0] += waits[-1]
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]
    assert one.get("/", auth=("ann", "right")).status_code == 200
    for number in range(9):  # names that nobody has count as one
        assert one.get("/", auth=(f"name {number}", "x")).status_code == (401 if number < 5 else 429)
    for number in range(9):  # so do the addresses that one customer has
        client = _guessing(f"2001:db8::{number:x}", guarded)
        headers = {"authorization": f"Bearer wrong-{number}"}
        assert client.get("/v1/models", headers=headers).status_code == (401 if number < 5 else 429)


def test_a_key_on_a_path_of_the_page_is_told_where_the_api_is_and_is_no_guess() -> None:
    app = FastAPI()
    app.add_api_route("/v1/models", lambda: "api")
    client = _client(Guard(app, local=True, host="127.0.0.1", access=Access(["ann:right"], ["key-key-key"])))
    key = {"authorization": "Bearer key-key-key"}
    for _ in range(9):
        answer = client.post("/chat/completions", headers=key)
        assert (answer.status_code, "under /v1" in answer.text) == (403, True)
    assert client.get("/v1/models", headers=key).status_code == 200
    codes = [
        client.post("/chat/completions", headers={"authorization": f"Bearer wrong-{at}"}).status_code for at in range(7)
    ]
    assert codes == [401] * 5 + [429] * 2
    assert client.post("/chat/completions", headers=key).status_code == 403


def test_one_wrong_key_again_and_again_stops_no_other_at_its_address() -> None:
    now = [0.0]
    app = FastAPI()
    app.add_api_route("/v1/models", lambda: "api")
    guarded = Guard(app, local=True, host="127.0.0.1", access=Access(["ann:right"], ["key-key-key"]))
    guarded.attempts = Attempts(lambda: now[0])
    client = _client(guarded)

    def ask(key: str) -> int:
        return client.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code

    assert [ask("an-old-key") for _ in range(20)] == [401] * 20
    assert ask("key-key-key") == 200
    assert [client.get("/v1/models", auth=("ann", "old")).status_code for _ in range(20)] == [401] * 20
    assert client.get("/v1/models", auth=("ann", "right")).status_code == 200
    assert [ask(f"guess-{at % 3}") for at in range(9)] == [401] * 9
    assert [ask(f"guess-{at}") for at in range(3, 7)] == [401] + [429] * 3  # five that differ, as ever
    assert ask("guess-0") == 429
    now[0] += 1
    assert [ask("guess-0"), ask("guess-7"), ask("guess-8")] == [401, 401, 429]


def test_a_right_key_passes_whatever_was_tried_before_from_its_address() -> None:
    app = FastAPI()
    app.add_api_route("/v1/models", lambda: "api")
    client = _client(Guard(app, local=True, host="127.0.0.1", access=Access(["ann:right"], ["key-key-key"])))

    def ask(key: str) -> int:
        return client.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code

    assert [ask(f"wrong-{at}") for at in range(8)] == [401] * 5 + [429] * 3
    assert [ask("key-key-key"), ask("wrong-9"), ask("key-key-key")] == [200, 429, 200]


def test_slow_files_hold_up_nobody() -> None:
    def fail(settings: Settings, progress: Any) -> Any:
        raise UsageError("no model here")

    app = create_app(LocalService(Settings(), fail), Settings())
    slow = threading.Barrier(50)

    async def fifty_at_once() -> None:
        async with app.router.lifespan_context(app):
            await asyncio.gather(*(asyncio.to_thread(slow.wait, 10) for _ in range(50)))

    result_of(fifty_at_once())
    assert not slow.broken


def _client(app: FastAPI, **options: Any) -> TestClient:
    return TestClient(app, base_url="http://127.0.0.1:7860", **options)


def test_guard() -> None:
    app = FastAPI()
    app.add_api_route("/", lambda: "hello")
    app.add_middleware(Guard, local=True, host="127.0.0.2")
    client = _client(app)
    answer = client.get("/")
    assert answer.status_code == 200
    assert "connect-src 'self'" in answer.headers["content-security-policy"]
    for host in ("localhost:7860", "127.0.0.2:7860", "[::1]:7860", "[::1]"):
        assert client.get("/", headers={"host": host}).status_code == 200
    for host in ("evil.example", "evil.example:7860", "127.0.0.1.evil.example", ""):
        assert client.get("/", headers={"host": host}).status_code == 421


@pytest.fixture
def uploads() -> Iterator[Uploads]:
    waiting = Uploads(max_bytes=1000)
    yield waiting
    waiting.close()


def _upload_client(uploads: Uploads) -> TestClient:
    app = FastAPI()
    app.add_route("/uploads", uploads.receive, methods=["PUT"])
    return _client(app)


def _files(uploads: Uploads) -> list[Path]:
    return list(uploads._folder.iterdir())


def test_an_upload_is_handed_over_once(uploads: Uploads) -> None:
    client = _upload_client(uploads)
    answer = client.put("/uploads", content=b"x" * 1000, headers={"x-file-name": "caf%C3%A9%2F..%2Fa.txt"})
    upload = uploads.take(answer.json()["id"])
    assert upload.name == "café/../a.txt"
    assert upload.path.parent == uploads._folder
    assert upload.path.read_bytes() == b"x" * 1000
    with pytest.raises(UsageError):
        uploads.take(answer.json()["id"])
    for nonsense in ("", "../../etc/passwd", None, 7, ["x"]):
        with pytest.raises(UsageError):
            uploads.take(nonsense)
    uploads.close()
    assert not upload.path.exists()


def test_too_large_or_nameless_uploads_leave_nothing(uploads: Uploads) -> None:
    client = _upload_client(uploads)
    assert client.put("/uploads", content=b"x").status_code == 400
    headers = {"x-file-name": "big.txt"}
    told = client.put("/uploads", content=b"x" * 1001, headers=headers)  # says its length
    untold = client.put("/uploads", content=(b"x" * 600 for _ in range(2)), headers=headers)
    for answer in (told, untold):
        assert answer.status_code == 413
        assert "big.txt" in answer.json()["error"]
    assert _files(uploads) == []


def test_uploads_that_nobody_took_are_dropped(uploads: Uploads, monkeypatch: pytest.MonkeyPatch) -> None:
    client = _upload_client(uploads)
    first = client.put("/uploads", content=b"a", headers={"x-file-name": "a"}).json()["id"]
    monkeypatch.setattr("app.ui.uploads.ABANDONED_S", -1.0)
    second = client.put("/uploads", content=b"b", headers={"x-file-name": "b"}).json()["id"]
    assert [path.name for path in _files(uploads)] == [second]
    with pytest.raises(UsageError):
        uploads.take(first)


def test_a_folder_is_received_with_its_paths(uploads: Uploads) -> None:
    client = _upload_client(uploads)
    files = [("file", (path, content)) for path, content in (("a.py", b"a"), ("deep/er/b.py", b"b"), ("ü.txt", b"c"))]
    answer = client.put("/uploads", files=files, headers={"x-file-name": "shop"})
    upload = uploads.take(answer.json()["id"])
    found = {path.relative_to(upload.path).as_posix(): path.read_bytes() for path in upload.path.rglob("*.*")}
    assert found == {"a.py": b"a", "deep/er/b.py": b"b", "ü.txt": b"c"}
    upload.delete()
    assert _files(uploads) == []


@pytest.mark.parametrize("path", ["../up.txt", "a/../../up.txt", "/etc/up.txt", "..\\up.txt", "C:/up.txt"])
def test_paths_of_a_folder_cannot_lead_out(uploads: Uploads, path: str) -> None:
    files = [("file", ("good.txt", b"x")), ("file", (path, b"evil"))]
    answer = _upload_client(uploads).put("/uploads", files=files, headers={"x-file-name": "shop"})
    assert answer.status_code == 400
    assert "leads outside" in answer.json()["error"]
    assert _files(uploads) == []


def test_a_path_that_no_disk_takes_is_told(uploads: Uploads) -> None:
    body = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a\0b.txt"\r\n\r\nhi\r\n--x--\r\n'
    headers = {"x-file-name": "shop", "content-type": "multipart/form-data; boundary=x"}
    answer = _upload_client(uploads).put("/uploads", content=body, headers=headers)
    assert answer.status_code == 400
    assert "shop" in answer.json()["error"] or "leads outside" in answer.json()["error"]
    assert _files(uploads) == []


def test_200_mb_are_streamed_to_disk(uploads: Uploads) -> None:
    uploads.max_bytes = 256 << 20
    part = bytes(range(256)) * 4096  # 1 MiB
    before = psutil.Process().memory_info().rss
    peak = 0

    def parts() -> Iterator[bytes]:
        nonlocal peak
        for _ in range(200):
            yield part
            peak = max(peak, psutil.Process().memory_info().rss)

    async def receive() -> dict[str, Any]:
        content = next(sent, b"")
        return {"type": "http.request", "body": content, "more_body": bool(content)}

    sent = parts()
    headers = [(b"x-file-name", b"big.txt")]
    request = Request({"type": "http", "method": "PUT", "path": "/uploads", "headers": headers}, receive)
    answer = result_of(uploads.receive(request))
    upload = uploads.take(json.loads(bytes(answer.body))["id"])
    assert upload.path.stat().st_size == 200 << 20
    with upload.path.open("rb") as file:
        file.seek(-len(part), 2)
        assert file.read() == part
    assert peak - before < 32 << 20


def test_the_page_librarys_own_upload_is_closed_and_no_path_is_told(tmp_path: Path) -> None:
    settings = Settings(cache_dir=tmp_path, library_quota=0)
    client = _client(create_app(LocalService(settings), settings))
    sent = client.post("/gradio_api/upload", files={"files": ("a.txt", b"text")})
    assert sent.status_code == 404
    clash = [("files", ("a", b"text")), ("files", ("a/b", b"text"))]  # a file and a folder of one name
    told = client.put("/uploads", files=clash, headers={"x-file-name": "folder"})
    assert told.status_code == 507
    assert "/" not in told.json()["error"]
