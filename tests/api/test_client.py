"""OpenAI's own client against a real server process with the embedded model."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from tests.api.conftest import Start
from tests.api.server import serving

TEXT = "The harbour office wrote down every ship. " * 24 + "\nRemember: the code word is HERON.\n"
MODEL = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("cache"), "--model", "embedded") as url:
        deadline = time.monotonic() + 120
        while httpx.get(f"{url}/health").status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        yield url


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none is needed", max_retries=0, timeout=120)


def metric(url: str, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", httpx.get(f"{url}/metrics").text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def ask(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": [p if isinstance(p, dict) else {"type": "text", "text": p} for p in parts]}]


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL) == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_stored_document_is_asked_about_by_id(client: openai.OpenAI) -> None:
    file = client.files.create(file=("ships.txt", TEXT.encode()), purpose="user_data")
    assert (file.filename, file.bytes, file.status) == ("ships.txt", len(TEXT), "processed")
    assert client.files.retrieve(file.id) == file
    assert [one.id for one in client.files.list(purpose="user_data")] == [file.id]
    assert client.files.content(file.id).read() == TEXT.encode()

    messages = ask({"type": "file", "file": {"file_id": file.id}}, "What is the code word?")
    first = client.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=20)
    answer = first.choices[0]
    assert answer.finish_reason == "stop"
    assert answer.message.content is not None
    assert "HERON" in answer.message.content
    usage = first.usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 0
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens

    # The next turn reads what is new: the whole prompt and all but the last token of the answer are in the cache.
    messages += [answer.message.model_dump(), {"role": "user", "content": "Spell it."}]
    second = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=5).usage
    assert second is not None
    assert second.prompt_tokens_details is not None
    cached = second.prompt_tokens_details.cached_tokens
    assert cached is not None
    assert usage.total_tokens - 1 <= cached < second.prompt_tokens

    # The same again takes no more than a block of tokens.
    again = client.chat.completions.create(model=MODEL, messages=messages[:1], max_tokens=20)
    assert again.choices[0].message.content == answer.message.content
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens >= usage.prompt_tokens - 128

    # Another question about the same document reads the question alone, and its ending.
    other = ask({"type": "file", "file": {"file_id": file.id}}, "Who wrote the ships down?")
    fresh = client.chat.completions.create(model=MODEL, messages=other, max_tokens=5).usage
    assert fresh is not None
    assert fresh.prompt_tokens_details is not None
    assert (fresh.prompt_tokens_details.cached_tokens or 0) > fresh.prompt_tokens - 128

    assert client.files.delete(file.id).deleted
    for gone in (lambda: client.files.retrieve(file.id), lambda: client.files.delete(file.id)):
        with pytest.raises(openai.NotFoundError):
            gone()
    with pytest.raises(openai.NotFoundError, match=file.id):
        client.chat.completions.create(model=MODEL, messages=messages[:1])


def test_a_stream_is_the_answer_in_pieces(client: openai.OpenAI) -> None:
    messages: list[Any] = [
        {"role": "system", "content": "Answer in one sentence."},
        {"role": "user", "content": "Why is the sky blue? 🙂"},
    ]
    options: Any = {"model": MODEL, "messages": messages, "max_tokens": 12}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_text_completions(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="One, two, three,", max_tokens=6)
    assert whole.choices[0].finish_reason == "length"
    assert "four" in whole.choices[0].text
    stream = client.completions.create(model=MODEL, prompt=["One, two, three,"], max_tokens=6, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
    ids = client.completions.create(model=MODEL, prompt=[0, 1, 2], max_tokens=1)
    assert ids.usage is not None
    assert ids.usage.prompt_tokens == 3
    stopped = client.completions.create(model=MODEL, prompt="One, two, three,", max_tokens=20, stop=[" five"])
    assert stopped.choices[0].finish_reason == "stop"
    assert "five" not in stopped.choices[0].text


def test_sampling_is_repeatable_with_a_seed(client: openai.OpenAI) -> None:
    def say(seed: int) -> str:
        options: Any = {"temperature": 1.5, "top_p": 0.95, "seed": seed, "extra_body": {"top_k": 200, "min_p": 0.01}}
        answer = client.completions.create(model=MODEL, prompt="My dog likes", max_tokens=6, **options)
        return answer.choices[0].text

    assert say(1) == say(1)
    assert len({say(seed) for seed in range(2, 5)}) > 1


def test_what_does_not_fit_is_told_with_both_counts(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"needs 9,\d+ tokens; the context holds 8,192") as caught:
        client.chat.completions.create(model=MODEL, messages=ask("word " * 9000))
    assert caught.value.code == "context_length_exceeded"
    answer = client.chat.completions.create(model=MODEL, messages=ask("Say yes."), max_tokens=10**6, stop="e")
    assert answer.choices[0].finish_reason == "stop"  # the room left is what counts, not what was asked for


def test_a_document_may_come_with_the_question(client: openai.OpenAI) -> None:
    import base64

    data = "data:text/plain;base64," + base64.b64encode(TEXT.encode()).decode()
    part = {"type": "file", "file": {"file_data": data, "filename": "ships.txt"}}
    answer = client.chat.completions.create(model=MODEL, messages=ask(part, "What is the code word?"), max_tokens=12)
    assert "HERON" in str(answer.choices[0].message.content)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_ends_its_answer(url: str, stream: bool) -> None:
    """Judged by what the device still writes, not by the clock: 8,000 tokens if nobody notices."""
    cancelled = metric(url, 'octavo_requests_total{end="cancelled"}')
    written = metric(url, "octavo_completion_tokens_total")
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 8000, "temperature": 1, "stream": stream}
    data = json.dumps(body).encode()
    address = urlsplit(url)
    client = socket.create_connection((address.hostname, address.port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    client.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    if stream:
        got = b""
        while got.count(b"data: ") < 7:
            more = client.recv(4096)
            assert more, got
            got += more
    else:
        while not metric(url, "octavo_busy"):
            time.sleep(0.01)
    client.close()
    while metric(url, "octavo_busy"):
        time.sleep(0.05)
    assert metric(url, 'octavo_requests_total{end="cancelled"}') == cancelled + 1
    assert metric(url, "octavo_completion_tokens_total") - written < 400


def test_a_client_that_takes_nothing_holds_the_engine_no_longer_than_it_may(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.api.stream.STALLED_S", 0.5)
    url = start(answer=lambda prompt: "x" * 100_000, capacity=None)
    address = urlsplit(url)
    with socket.socket() as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        stalled.connect((address.hostname, address.port))
        data = json.dumps({"model": "fake", "prompt": "Write", "max_tokens": 10**9, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
        stalled.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        while not metric(url, "octavo_busy"):
            time.sleep(0.01)
        body = {"model": "fake", "prompt": "A short one", "max_tokens": 3}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["usage"]["completion_tokens"] == 3
    assert metric(url, 'octavo_requests_total{end="cancelled"}') == 1


def test_metrics_and_health(url: str, client: openai.OpenAI) -> None:
    before = metric(url, "octavo_completion_tokens_total")
    usage = client.completions.create(model=MODEL, prompt="Hello", max_tokens=3).usage
    assert usage is not None
    assert metric(url, "octavo_completion_tokens_total") == before + usage.completion_tokens
    assert metric(url, "octavo_ready") == 1
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    assert metric(url, 'octavo_memory_bytes{kind="weights"}') > 100e6


def test_files_survive_a_restart_and_keys_guard_them(tmp_path: Path) -> None:
    keys = ["alice-alice", "bobby-bobby"]
    flags = ["--model", "embedded", "--api-key", keys[0], "--api-key", keys[1]]

    def client(url: str, key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)

    with serving(tmp_path, *flags) as url:  # files need no model: it may still be loading
        stored = client(url, keys[0]).files.create(file=("a.txt", b"some text"), purpose="user_data")
    with serving(tmp_path, *flags) as url:
        assert [file.id for file in client(url, keys[0]).files.list()] == [stored.id]
        other = client(url, keys[1])
        assert list(other.files.list()) == []
        for call in (other.files.retrieve, other.files.content, other.files.delete):
            with pytest.raises(openai.NotFoundError):
                call(stored.id)
        for wrong in ("alice-alicf", "x"):
            with pytest.raises(openai.AuthenticationError):
                client(url, wrong).files.list()
        assert httpx.get(f"{url}/metrics").status_code == 401
        assert httpx.get(f"{url}/v1/models").json()["error"]["code"] == "invalid_api_key"
        assert httpx.get(f"{url}/health").status_code in (200, 503)
        assert httpx.get(url).status_code == 200  # the page is this machine's own
