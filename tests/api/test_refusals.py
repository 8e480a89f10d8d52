"""What the API refuses, and how it tells: OpenAI's own client against a fake model."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from app.access import Access
from app.api.errors import ApiRoute
from app.api.store import FileStore
from app.documents import Limits
from app.local import LocalService
from tests.api.conftest import Start
from tests.fakes import FakeSlot, FakeTokenizer

MODEL = "fake"


def connect(url: str, key: str = "none is needed") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=30)


@pytest.fixture
def client(start: Start) -> openai.OpenAI:
    return connect(start())


def ask(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": [p if isinstance(p, dict) else {"type": "text", "text": p} for p in parts]}]


def test_refusals_name_the_field(client: openai.OpenAI) -> None:
    good: Any = {"model": MODEL, "messages": ask("Hello")}
    for bad, param in (
        ({"n": 2}, "n"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logprobs": True}, "logprobs"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"extra_body": {"nonsense": 1}}, "nonsense"),
        ({"temperature": 3}, "temperature"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ""}, "stop"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_completion_tokens": 2**40 + 1}, "max_completion_tokens"),
        ({"top_p": float("1e300")}, "top_p"),
        ({"seed": 2**63}, "seed"),
        ({"extra_body": {"top_k": 2**31}}, "top_k"),
        ({"extra_body": {"messages": [7]}}, "messages[0]"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "Hi", "name": "Bo"}]}, "messages[0].name"),
        ({"messages": ask({"type": "image_url", "image_url": {"url": "x"}})}, "messages"),
        ({"messages": [*ask("Hi"), {"role": "system", "content": "Be brief."}]}, "messages"),
        ({"messages": [*ask("Hi"), {"role": "assistant", "content": "Ho"}]}, "messages"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**good | bad)
        assert caught.value.param == param, (bad, caught.value)
        assert caught.value.type == "invalid_request_error"
        assert "max_new_tokens" not in str(caught.value)
    for harmless in ({"n": 1}, {"frequency_penalty": 0}, {"tools": []}, {"user": "me"}, {"logprobs": False}):
        client.chat.completions.create(**good | {"max_tokens": 1} | harmless)
    for refused in ({"echo": True}, {"best_of": 2}, {"suffix": "x"}, {"prompt": ["a", "b"]}, {"prompt": [10**6]}):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(**{"model": MODEL, "prompt": "x"} | refused)
        assert caught.value.param == next(iter(refused))


def test_files_that_are_no_documents_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError, match="picture") as caught:
        client.files.create(file=("a.png", b"\x89PNG\r\n\x1a\n" + b"\0" * 99), purpose="user_data")
    assert caught.value.status_code == 415
    with pytest.raises(openai.BadRequestError) as refused:
        client.files.create(file=("a.jsonl", b"{}"), purpose="fine-tune")
    assert refused.value.param == "purpose"
    expires: Any = {"anchor": "created_at", "seconds": 3600}
    with pytest.raises(openai.BadRequestError) as expiring:
        client.files.create(file=("a.txt", b"text"), purpose="user_data", expires_after=expires)
    assert str(expiring.value.param).startswith("expires_after")
    assert list(client.files.list()) == []


def test_documents_in_messages_are_base64(client: openai.OpenAI) -> None:
    for wrong in ("data:text/plain,hello", "not base64!", "data:text/plain;base64,%%%", "d\u00e9j\u00e0"):
        with pytest.raises(openai.BadRequestError, match="base64"):
            client.chat.completions.create(
                model=MODEL, messages=ask({"type": "file", "file": {"file_data": wrong}}, "What?")
            )
    for empty in ("", "data:;base64,"):
        with pytest.raises(openai.APIStatusError, match="is empty"):
            client.chat.completions.create(
                model=MODEL, messages=ask({"type": "file", "file": {"file_data": empty}}, "What?")
            )
    with pytest.raises(openai.BadRequestError, match="either"):
        client.chat.completions.create(model=MODEL, messages=ask({"type": "file", "file": {}}, "What?"))


def test_a_message_without_a_text_is_told_of_its_file_where_it_has_one(client: openai.OpenAI) -> None:
    stored = {"type": "file", "file": {"file_data": "data:;base64,YQ=="}}
    for messages, told in ((ask(""), r"ask something\."), (ask(stored), r"ask something about its file\.")):
        with pytest.raises(openai.BadRequestError, match=told):
            client.chat.completions.create(model=MODEL, messages=messages)


def test_other_faults_have_their_own_status(start: Start) -> None:
    url = start()
    for method, path, status in (
        ("GET", "/v1", 404),
        ("POST", "/v1", 404),
        ("GET", "/v1/nothing", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/chat/completions", 404),
        ("GET", "/v1/files/..%2f..%2fetc%2fpasswd", 404),
        ("GET", "/v1/files?limit=0", 400),
        ("GET", "/v1/files?after=file-x", 400),
    ):
        answer = httpx.request(method, url + path)
        assert answer.status_code == status, path
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert "sandbox" in answer.headers["content-security-policy"]
    assert httpx.get(f"{url}/v1").json()["error"]["code"] == "unknown_url"
    broken = httpx.post(f"{url}/v1/completions", content=b"{", headers={"content-type": "application/json"})
    assert broken.status_code == 400
    assert "JSON" in broken.json()["error"]["message"]
    for body in (b"[]", b"null", b'"x"', b""):
        answer = httpx.post(f"{url}/v1/completions", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400
    for body in (b"[" * 100_000, b'{"model": ' + b"9" * 5000 + b"}"):  # which the JSON parser gives up on
        answer = httpx.post(f"{url}/v1/completions", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    form = {"content-type": "multipart/form-data; boundary=x"}
    answer = httpx.post(f"{url}/v1/files", content=b"no form", headers=form)
    assert answer.status_code == 400
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    with pytest.raises(openai.NotFoundError, match="'fake' is loaded"):
        connect(url).chat.completions.create(model="other", messages=ask("Hi"))


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_a_body_that_cannot_be_taken_is_told_why(start: Start, path: str) -> None:
    url = f"{start()}/v1/{path}"
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi"}).encode()
    for content, kind, words in (
        (body, "text/plain", "sent with the header Content-Type: application/json"),
        (body, "application/octet-stream", "sent with the header Content-Type: application/json"),
        (b"model=fake", "application/x-www-form-urlencoded", "sent with the header Content-Type: application/json"),
        (b'{"model": "caf\xe9"}', "application/json", "The body is not UTF-8"),
        (b"[" * 100_000, "application/json", "nested too deeply"),
        (b'{"model": ' * 2000 + b"1" + b"}" * 2000, "application/json", "nested too deeply"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "application/json", "no valid JSON: a number has more than 4,300 digits."),
        (b"{", "application/json", "no valid JSON"),
        (b"[1]", "application/json", "The body must be a JSON object"),
        (b"", "application/json", "The body is missing"),
    ):
        answer = httpx.post(url, content=content, headers={"content-type": kind})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert words in error["message"], error
        assert (set(error), error["type"]) == ({"message", "type", "param", "code"}, "invalid_request_error")
    assert "Content-Type: application/json" in httpx.post(url, content=body).json()["error"]["message"]


def test_a_failure_of_the_device_is_a_server_error_and_harms_no_other(start: Start) -> None:
    broken = [False]  # not yet: the model is warmed up when it is loaded

    def hook(step: str, slot: FakeSlot) -> None:
        if broken[0] and step == "decode":
            raise MemoryError

    client = connect(start(hook=hook))
    broken[0] = True
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(model=MODEL, messages=ask("Hi"))
    assert caught.value.status_code == 507
    with pytest.raises(openai.APIError, match="Out of memory"):
        list(client.chat.completions.create(model=MODEL, messages=ask("Hi"), stream=True))
    broken[0] = False
    assert client.chat.completions.create(model=MODEL, messages=ask("Hi")).choices[0].message.content == "Yes."


def test_a_silent_stream_is_kept_alive(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.api.stream.KEEP_ALIVE_S", 0.2)
    waiting = threading.Event()
    url = start(hook=lambda step, slot: waiting.wait(0.1) if slot.length > 50 else None)
    body = {"model": MODEL, "stream": True, "messages": ask("word " * 40)}
    lines = list(httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30).iter_lines())
    assert any(line.startswith(": reading ") for line in lines)
    assert lines[-2] == "data: [DONE]"
    answer = connect(url).chat.completions.create(model=MODEL, messages=ask("word " * 40), stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in answer) == "Yes."


def test_a_stop_text_does_not_spoil_the_next_turn(client: openai.OpenAI) -> None:
    """What was written behind the text that a client got must not be taken for part of the conversation."""
    messages = ask("Hi")
    answer = client.chat.completions.create(model=MODEL, messages=messages, stop="s.").choices[0].message.content
    assert answer == "Ye"
    messages += [{"role": "assistant", "content": answer}, *ask("And?")]
    usage = client.chat.completions.create(model=MODEL, messages=messages).usage
    expected = len(FakeTokenizer().encode_text("user\nHiassistant\nYe\nuser\nAnd?assistant\n\n\n")) + 7
    assert usage is not None
    assert usage.prompt_tokens == expected


def test_keys_and_passwords(start: Start) -> None:
    url = start(access=Access(["ann:secret"], ["key-one-1", "key-two-2"]))
    stored = connect(url, "key-one-1").files.create(file=("a.txt", b"text"), purpose="user_data")
    assert list(connect(url, "key-two-2").files.list()) == []
    with pytest.raises(openai.NotFoundError):
        connect(url, "key-two-2").chat.completions.create(
            model=MODEL, messages=ask({"type": "file", "file": {"file_id": stored.id}}, "What?")
        )
    assert httpx.get(f"{url}/v1/files", auth=("ann", "secret")).json()["data"] == []
    for auth in (("ann", "wrong"), ("", ""), ("ann", ""), ("bob", "secret")):
        answer = httpx.get(f"{url}/v1/files", auth=auth)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"].startswith("Basic")
    for header in ("", "Bearer", "Bearer x", "Basic %%%", "Bearer ann:secret", "Digest x"):
        assert httpx.get(f"{url}/metrics", headers={"authorization": header}).status_code == 401
    assert httpx.get(f"{url}/health").status_code == 200


def test_a_password_may_have_any_letters(start: Start) -> None:
    url = start(access=Access(["zoë:pässwörd€"]))
    assert httpx.get(f"{url}/v1/files", auth=("zoë", "pässwörd€")).status_code == 200  # sent in UTF-8, as browsers do
    assert httpx.get(f"{url}/v1/files", auth=("zoë", "password")).status_code == 401


def test_pages_of_other_sites_may_not_ask(start: Start) -> None:
    url = start()
    body = {"model": MODEL, "prompt": "x"}
    for origin in ("https://evil.example", "null", "http://127.0.0.1:1", "http://["):
        assert httpx.post(f"{url}/v1/completions", json=body, headers={"origin": origin}).status_code == 403
        files = {"file": ("a.txt", b"text")}
        sent = httpx.post(f"{url}/v1/files", files=files, data={"purpose": "user_data"}, headers={"origin": origin})
        assert sent.status_code == 403
    assert httpx.post(f"{url}/v1/completions", json=body, headers={"origin": url}).status_code == 200
    assert httpx.get(f"{url}/v1/models", headers={"host": "evil.example"}).status_code == 421


def test_numbers_are_numbers_and_what_is_too_long_is_named(start: Start) -> None:
    url = start()
    body = {"model": MODEL, "prompt": "x"}
    names = "max_tokens temperature top_p seed top_k min_p repetition_penalty".split()
    for name, value in [(name, value) for name in names for value in (True, "1")] + [("stream", 1), ("stream", "yes")]:
        answer = httpx.post(f"{url}/v1/completions", json=body | {name: value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    for path, param, asked in (
        ("completions", "prompt", {"prompt": "word " * 100_000}),
        ("chat/completions", "messages", {"messages": ask("word " * 100_000)}),
    ):
        error = httpx.post(f"{url}/v1/{path}", json={"model": MODEL} | asked).json()["error"]
        assert (error["param"], error["code"]) == (param, "context_length_exceeded")


def test_an_odd_entry_in_the_store_is_left_alone(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    source = tmp_path / "a.txt"
    source.write_text("Some text.")
    kept = store.add(source, "a.txt", "user_data", "me")
    good = json.loads((tmp_path / f"{kept.id}.json").read_text())
    for at, odd in enumerate(({"bytes": "many"}, {"created_at": True}, {"id": 3}, {"owner": None}, {"label": []})):
        file_id = f"file-{at:024x}"
        (tmp_path / f"{file_id}.json").write_text(json.dumps(good | {"id": file_id} | odd))
    for at, odd in enumerate(("[]", "null", '"text"', "{", "[" * 100_000)):
        (tmp_path / f"file-{at + 50:024x}.json").write_text(odd)
    (tmp_path / f"file-{99:024x}.json").mkdir()
    (tmp_path / f"file-{98:024x}.bin").mkdir()
    store.tidy(time.time() + 10)
    assert [file.id for file in store.files("me")] == [kept.id]
    assert store.labels() == {kept.label}
    store.add(source, "b.txt", "user_data", "me")


def test_bodies_have_a_limit(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.access.MAX_BODY", 2000)
    url = start()
    for content in (b"x" * 2001, iter([b"x" * 1500] * 2)):  # one that tells its length and one that does not
        answer = httpx.post(f"{url}/v1/completions", content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 413


def test_content_is_never_shown_as_a_page(start: Start) -> None:
    url = start()
    page = b"<html><script>alert(1)</script><p>text</p></html>"
    stored = connect(url).files.create(file=("a.html", page), purpose="user_data")
    answer = httpx.get(f"{url}/v1/files/{stored.id}/content")
    assert answer.content == page
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["content-disposition"].startswith("attachment")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_before_its_answer_begins_ends_it(
    start: Start, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    complete = LocalService.complete

    asked, go_on = threading.Event(), threading.Event()

    def slowly(*args: Any) -> Any:  # as the tokens of a long prompt are made
        asked.set()
        go_on.wait()
        return complete(*args)

    monkeypatch.setattr(LocalService, "complete", slowly)
    steps: list[str] = []
    url = start(answer=lambda prompt: " ".join(map(str, range(400))), hook=_pace(steps))
    steps.clear()  # of the warm-up
    data = json.dumps({"model": MODEL, "prompt": "Hi", "max_tokens": 1500, "stream": stream}).encode()
    address = urlsplit(url)
    client = socket.create_connection((address.hostname, address.port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    client.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    asked.wait()
    client.close()
    go_on.set()
    while 'octavo_requests_total{end="' not in httpx.get(f"{url}/metrics").text:
        time.sleep(0.05)
    assert 'octavo_requests_total{end="cancelled"} 1.0' in httpx.get(f"{url}/metrics").text
    assert len(steps) < 1000  # of the 1,490 steps that the whole answer takes


def test_an_upload_that_breaks_off_leaves_nothing_in_the_log(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ended = threading.Event()
    handler = ApiRoute.get_route_handler

    def watched(route: ApiRoute) -> Any:
        handle = handler(route)

        async def told(request: Any) -> Any:
            try:
                return await handle(request)
            finally:
                ended.set()

        return told

    monkeypatch.setattr(ApiRoute, "get_route_handler", watched)
    address = urlsplit(start())
    with socket.create_connection((address.hostname, address.port)) as client:
        head = f"POST /v1/files HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Length: 9999\r\n"
        client.sendall(f"{head}Content-Type: multipart/form-data; boundary=x\r\n\r\n--x\r\n".encode())
    assert ended.wait(30)
    assert caplog.text == ""


def _pace(steps: list[str]) -> Callable[[str, FakeSlot], None]:
    def hook(step: str, slot: FakeSlot) -> None:
        steps.append(step)
        time.sleep(0.01)

    return hook


def test_a_chat_of_200_turns(start: Start) -> None:
    """A call brings all of it, and what the one before has read is not read again."""
    client = connect(start(capacity=100_000))
    messages: list[Any] = []
    for number in range(198):
        messages += [*ask(f"Question {number}?"), {"role": "assistant", "content": "Yes."}]
    for number in (198, 199):
        messages += ask(f"Question {number}?")
        answer = client.chat.completions.create(model=MODEL, messages=messages)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
    assert len(messages) == 400
    assert answer.usage.prompt_tokens > 5000
    assert answer.usage.prompt_tokens - (answer.usage.prompt_tokens_details.cached_tokens or 0) < 80


def test_nested_unknown_fields_are_named(start: Start) -> None:
    url = start()
    message = {"role": "user", "content": "Hi"}
    part = {"type": "text", "text": "Hi", "colour": 1}
    for body, param in (
        ({"messages": [message], "stream": True, "stream_options": {"chunks": 1}}, "stream_options.chunks"),
        ({"messages": [{"role": "user", "content": [part]}]}, "messages[0].content[0].colour"),
        ({"messages": [message | {"weight": 1}]}, "messages[0].weight"),
        ({"messages": [message], "best_of": 3}, "best_of"),
        ({}, "messages"),
    ):
        answer = httpx.post(f"{url}/v1/chat/completions", json={"model": MODEL} | body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param


def test_uploads_have_a_limit_of_their_own(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.access._UPLOAD_ROOM", 1000 - Limits().max_bytes)
    url = start()
    form = {"content-type": "multipart/form-data; boundary=x"}
    opening = b'--x\r\ncontent-disposition: form-data; name="file"; filename="a.txt"\r\n\r\n'
    for content in (b"x" * 1001, iter([opening, b"x" * 600, b"x" * 600])):
        answer = httpx.post(f"{url}/v1/files", content=content, headers=form)
        assert answer.status_code == 413
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert httpx.get(f"{url}/v1/files").json()["data"] == []


def test_another_owners_file_is_as_if_it_were_not_there(start: Start) -> None:
    url = start(access=Access(["ann:secret"], ["key-one-1", "key-two-2"]))
    keys: list[Any] = [{"authorization": f"Bearer key-{key}"} for key in ("one-1", "two-2")]
    stored = httpx.post(
        f"{url}/v1/files", files={"file": ("a.txt", b"text")}, data={"purpose": "user_data"}, headers=keys[0]
    ).json()
    gone = f"file-{'0' * 24}"
    for path in ("", "/content"):
        answers = [httpx.get(f"{url}/v1/files/{name}{path}", headers=keys[1]) for name in (stored["id"], gone)]
        told = [answer.text.replace(stored["id"], gone) for answer in answers]
        assert answers[0].status_code == answers[1].status_code == 404 and told[0] == told[1]
    assert httpx.delete(f"{url}/v1/files/{stored['id']}", headers=keys[1]).status_code == 404
    assert httpx.get(f"{url}/v1/files?after={stored['id']}", headers=keys[1]).status_code == 400
    assert httpx.get(f"{url}/v1/files/{stored['id']}/content", headers=keys[0]).content == b"text"
    assert "label" not in stored and "owner" not in stored


def test_a_full_disk_is_told_and_keeps_nothing(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    url = start()
    monkeypatch.setattr("models.files.os.fsync", full)
    form: Any = {"files": {"file": ("a.txt", b"text")}, "data": {"purpose": "user_data"}}
    answer = httpx.post(f"{url}/v1/files", **form)
    assert answer.status_code == 507
    assert answer.json()["error"]["message"].startswith("The disk is full: make room")
    assert httpx.get(f"{url}/v1/files").json()["data"] == []
    monkeypatch.undo()
    assert httpx.post(f"{url}/v1/files", **form).status_code == 200


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), OSError(30, "Read-only"), ValueError("x")])
def test_an_error_that_nobody_expected_keeps_the_connection(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def broken(*_: Any) -> Any:
        raise error

    url = urlsplit(start())
    stored = connect(url.geturl()).files.create(file=("a.txt", b"text"), purpose="user_data").id
    for name in ("add", "files", "get", "delete"):
        monkeypatch.setattr(FileStore, name, broken)
    monkeypatch.setattr(LocalService, "status", broken)
    form = b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n--x\r\n'
    form += b'content-disposition: form-data; name="file"; filename="a.txt"\r\n\r\ntext\r\n--x--\r\n'
    chat = json.dumps({"model": MODEL, "messages": ask("Hi")})
    connection = http.client.HTTPConnection(url.netloc, timeout=30)
    connection.connect()
    connection.auto_open = 0  # one that is cut is not opened anew
    for method, path, body, kind in (
        ("POST", "/v1/files", form, "multipart/form-data; boundary=x"),
        ("GET", "/v1/files", None, ""),
        ("GET", f"/v1/files/{stored}", None, ""),
        ("GET", f"/v1/files/{stored}/content", None, ""),
        ("DELETE", f"/v1/files/{stored}", None, ""),
        ("GET", "/v1/models", None, ""),
        ("POST", "/v1/chat/completions", chat, "application/json"),
        ("GET", "/metrics", None, ""),
    ):
        connection.request(method, path, body, {"content-type": kind})
        answer = connection.getresponse()
        assert answer.status == (507 if isinstance(error, OSError) else 500), path
        assert set(json.load(answer)["error"]) == {"message", "type", "param", "code"}
    connection.close()
    assert "Exception in ASGI application" not in caplog.text
    assert ("Traceback" in caplog.text) == isinstance(error, ValueError)  # what a full disk needs is no traceback


def test_content_that_is_gone_from_the_disk_is_told_and_keeps_the_connection(start: Start, tmp_path: Path) -> None:
    url = urlsplit(start())
    stored = connect(url.geturl()).files.create(file=("a.txt", b"text"), purpose="user_data").id
    (content,) = tmp_path.rglob(f"{stored}.bin")
    content.unlink()
    connection = http.client.HTTPConnection(url.netloc, timeout=30)
    connection.connect()
    connection.auto_open = 0  # one that is cut is not opened anew
    for _ in range(2):
        connection.request("GET", f"/v1/files/{stored}/content")
        answer = connection.getresponse()
        error = json.load(answer)["error"]
        assert (answer.status, error["code"]) == (404, "file_not_found")
        assert "gone from the disk" in error["message"]
    connection.close()


def test_what_was_read_of_a_deleted_file_is_freed_unless_somebody_else_has_it(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed: list[str] = []
    monkeypatch.setattr(LocalService, "forget", lambda service, label: freed.append(label))
    client = connect(start())
    first, twin, other = (
        client.files.create(file=(name, text), purpose="user_data").id
        for name, text in (("a.txt", b"some text"), ("a.txt", b"some text"), ("b.txt", b"other text"))
    )
    client.files.delete(first)
    assert freed == []
    client.files.delete(twin)
    client.files.delete(other)
    assert len(set(freed)) == 2
