"""Another server in place of the own engine: what it refuses, cannot do, or leaves open. It is this API over a fake."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.access import Access
from app.config import Settings
from app.conversation import Message
from app.documents import read_document
from app.engine.types import Done, Failed, SamplingParams
from app.errors import ContextTooLong, NotReady, UsageError
from app.remote import RemoteService
from app.remote.engine import RemoteError
from app.service import ChatService
from tests.api.conftest import Start
from tests.fakes import FakeSlot

Connect = Callable[..., ChatService]


@pytest.fixture
def connect() -> Iterator[Connect]:
    services: list[ChatService] = []

    def build(url: str, **settings: Any) -> ChatService:
        services.append(RemoteService(Settings(engine="openai", base_url=f"{url}/v1", **settings)))
        services[-1].load()
        return services[-1]

    yield build
    for service in services:
        service.close()


def test_turns_documents_and_usage(start: Start, connect: Connect, tmp_path: Path) -> None:
    seen: list[str] = []

    def answer(prompt: Any) -> str:
        seen.append(bytes(token for token in prompt if token < 256).decode())
        return f"Answer {len(seen)}."

    service = connect(start(answer=answer, capacity=5000))
    (tmp_path / "a.txt").write_text("The word is heron.\n" * 30)
    document = read_document(tmp_path / "a.txt")
    chat = service.new_chat("Be brief.")
    seen.clear()
    plan = service.plan(chat, [document], "What is it?")
    assert plan.fits
    assert plan.prompt_tokens == pytest.approx(len(document.text) / 4, rel=0.3)  # before anything was counted
    done = service.ask(chat, "What is it?", [document]).result()
    assert (done.text, done.finish_reason) == ("Answer 1.", "stop")
    assert done.usage.prompt_tokens > len(document.text)  # the fake counts bytes
    assert service.plan(chat, [document], "And?").new_tokens < 10  # the document is read already
    again = service.plan(service.new_chat(), [document], "What is it?")
    assert again.prompt_tokens == pytest.approx(done.usage.prompt_tokens, rel=0.2)  # and from then on as it counts
    service.ask(chat, "And?", [document]).result()
    assert seen[1].startswith("system\nBe brief.")
    assert seen[1].count("The word is heron.") == 30
    assert seen[1].index("What is it?") < seen[1].index("Answer 1.") < seen[1].index("And?")
    status = service.status(chat)
    assert status["context_used"] > done.usage.prompt_tokens
    assert status["context_capacity"] == 5000
    assert status["totals"]["requests"] == {"stop": 2}
    assert "own engine" in status["note"]


def test_the_api_goes_through(start: Start, connect: Connect) -> None:
    service = connect(start(answer=lambda prompt: "Yes, yes."))
    messages = [Message("system", "S"), Message("user", "Q"), Message("assistant", "A"), Message("user", "R")]
    assert service.converse(messages).result().text == "Yes, yes."
    assert service.complete("Once").result().text == "Yes, yes."
    assert service.complete([1, 2]).result().usage.prompt_tokens == 2
    limited = service.converse(messages, SamplingParams(max_new_tokens=3, seed=1, top_k=5, stop=("z",))).result()
    assert (limited.text, limited.finish_reason) == ("Yes", "length")


def test_what_does_not_fit_is_refused(start: Start, connect: Connect, tmp_path: Path) -> None:
    service = connect(start())
    plan = service.plan(service.new_chat(), [], "word " * 3000)
    assert not plan.fits
    assert "2,000" in plan.message
    with pytest.raises(ContextTooLong, match="estimate"):
        service.ask(service.new_chat(), "word " * 3000)
    texts = [("a.txt", "word " * 200), ("b.txt", "word " * 2000)]
    for name, text in texts:
        (tmp_path / name).write_text(text)
    documents = [service.add_document(tmp_path / name) for name, _ in texts]
    with pytest.raises(ContextTooLong, match=r"b\.txt is the largest document: 2,\d{3} tokens"):
        service.ask(service.new_chat(), "Which?", documents)
    with pytest.raises(RemoteError, match=r"refused \(400\).*tokens"):  # the estimate was too low: the server tells
        service.ask(service.new_chat(), "word " * 1000).result()
    with pytest.raises(UsageError, match="empty"):
        service.ask(service.new_chat(), " ")


def test_cancelling_closes_the_connection(start: Start, connect: Connect) -> None:
    steps: list[int] = []

    def hook(step: str, slot: FakeSlot) -> None:
        if step == "decode":
            steps.append(1)
            time.sleep(0.02)

    service = connect(start(answer=lambda prompt: "word " * 300, hook=hook))
    steps.clear()
    chat = service.new_chat()
    generation = service.ask(chat, "Go on.")
    while not steps:
        time.sleep(0.01)
    time.sleep(0.3)
    before = time.monotonic()
    generation.cancel()
    done = [event for event in generation if isinstance(event, Done | Failed)]
    assert time.monotonic() - before < 1
    assert isinstance(done[0], Done)
    assert done[0].finish_reason == "cancelled"
    assert done[0].text
    assert chat.turns[0].answer == done[0].text
    time.sleep(0.8)
    count = len(steps)
    time.sleep(0.3)
    assert len(steps) == count < 1000, "The other server still writes."
    assert not service.busy
    assert service.ask(chat, "And?").next_event() is not None  # dropped at once, which cancels it too


def test_servers_that_cannot_be_used_are_told(start: Start, connect: Connect) -> None:
    nowhere = connect("http://127.0.0.1:9")
    assert isinstance(nowhere.load_error, RemoteError)
    with pytest.raises(RemoteError, match="127.0.0.1:9/v1 does not answer"):
        nowhere.ask(nowhere.new_chat(), "Hello?")
    url = start(access=Access(keys=["right-key"]))
    with pytest.raises(RemoteError, match="OPENAI_API_KEY"):
        connect(url, base_key="wrong-key").status()
    assert connect(url, base_key="right-key").status()["model"] == "fake"
    with pytest.raises(UsageError, match="--model: fake"):
        connect(url, base_key="right-key", model="other").status()
    service = RemoteService(Settings(engine="openai", base_url="http://127.0.0.1:9/v1"))
    with pytest.raises(NotReady, match="loading"):
        service.plan(service.new_chat())
    service.close()


def test_failures_of_the_server_are_told(start: Start, connect: Connect) -> None:
    broken = threading.Event()

    def hook(step: str, slot: FakeSlot) -> None:
        if broken.is_set() and step == "decode":
            raise MemoryError

    service = connect(start(hook=hook))
    broken.set()
    chat = service.new_chat()
    with pytest.raises(RemoteError, match="Out of memory"):
        service.ask(chat, "Hello?").result()
    assert chat.turns == []
    broken.clear()
    assert service.ask(chat, "Hello?").result().text == "Yes."


def test_settings_that_go_with_it() -> None:
    for wrong in (
        {"engine": "openai"},
        {"base_url": "http://127.0.0.1:1/v1"},
        {"engine": "openai", "base_url": "127.0.0.1:1"},
        {"engine": "other", "base_url": "http://127.0.0.1:1/v1"},
        {"engine": "openai", "base_url": "http://127.0.0.1:1/v1", "kv": "kv4"},
        {"engine": "openai", "base_url": "http://127.0.0.1:1/v1", "sink": 4},
        {"engine": "openai", "base_url": "http://127.0.0.1:1/v1", "library_quota": 5.0},
    ):
        with pytest.raises(UsageError, match="--"):
            Settings.from_mapping(wrong)


def test_a_stop_ends_an_answer_however_early_it_comes(start: Start, connect: Connect) -> None:
    service = connect(start())
    for _ in range(50):
        answer = service.ask(service.new_chat(), "Hello?")
        answer.cancel()
        assert answer.finished.wait(10)
        assert answer.result().finish_reason in ("cancelled", "stop")
    assert not service.busy
    last = service.ask(service.new_chat(), "Hello?")
    service.close()
    assert last.finished.is_set()
    service.close()
    with pytest.raises(RemoteError, match="being stopped"):
        service._engine.submit({"messages": []}, 1, lambda done: None)


@pytest.mark.parametrize("part", [b"data: {no json\n\n", b'data: {"id": "x", "choices": null}\n\n'])
def test_parts_that_are_none_are_the_servers_fault(
    start: Start, connect: Connect, monkeypatch: pytest.MonkeyPatch, part: bytes
) -> None:
    service = connect(start())
    create = service._engine._client.chat.completions.create

    async def broken(**body: Any) -> Any:
        stream = await create(**body)

        async def lines() -> Any:
            yield part

        monkeypatch.setattr(stream.response, "aiter_bytes", lines)
        return stream

    monkeypatch.setattr(service._engine._client.chat.completions, "create", broken)
    with pytest.raises(RemoteError, match="sent what is no answer"):
        service.ask(service.new_chat(), "Hello?").result()
