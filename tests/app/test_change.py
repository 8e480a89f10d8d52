"""Settings of the cache that are changed while Octavo runs: for everybody, between answers, and back when they fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.config import Settings
from app.documents import read_safely
from app.engine.generation import Generation
from app.engine.types import Done, SamplingParams
from app.errors import Cancelled, NotReady, UsageError
from app.local import LocalService
from app.model import LoadProgress, OpenModel
from app.service import Chat
from tests.fakes import END, FakeRunner, FakeTokenizer

WAIT = 10.0
PROSE = "The harbour office recorded the arrival of every ship, its cargo and its master. " * 60
FACT = "The pass code of the old ferry is 48213. Remember it: 48213 is the pass code of the old ferry. "


def done(generation: Generation) -> Done:
    event = list(generation)[-1]
    assert isinstance(event, Done), event
    return event


class Shop:
    """Opens fake models: answers with the settings that they were opened with."""

    def __init__(self) -> None:
        self.opened: list[Settings] = []
        self.runners: list[FakeRunner] = []
        self.refuse: Callable[[Settings], bool] = lambda settings: False
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, settings: Settings, progress: LoadProgress) -> OpenModel:
        assert all(runner.released for runner in self.runners), "two models at once"
        progress("Reading the weights", 0.5)
        self.opened.append(settings)
        if self.refuse(settings):
            raise UsageError("No room.")
        self.runners.append(
            FakeRunner(
                lambda prompt: f"With {settings.kv}.", 2000, hook=lambda step, slot: self.gate.wait(WAIT) or None
            )
        )
        return OpenModel("fake", self.runners[-1], FakeTokenizer(), frozenset({END}), lambda context: 0)


@pytest.fixture
def shop() -> Shop:
    return Shop()


@pytest.fixture
def service(shop: Shop, tmp_path: Path) -> Iterator[LocalService]:
    service = LocalService(Settings(cache_dir=tmp_path), shop)
    service.load()
    assert service.load_error is None
    yield service
    service.close()


def test_who_runs_and_who_waits_is_answered(service: LocalService, shop: Shop) -> None:
    chats = [service.new_chat() for _ in range(3)]
    shop.gate.clear()
    before = [service.ask(chat, "What are your settings?") for chat in chats[:2]]
    stages: list[str] = []
    changing = threading.Thread(target=service.change, args=({"kv": "kv8"}, lambda stage, share: stages.append(stage)))
    changing.start()
    engine = service._loaded.engine  # type: ignore[union-attr]
    while engine.waiting < 2:
        time.sleep(0.001)
    after = service.ask(chats[2], "What are your settings?")
    assert service.ready and service.settings.kv == "kv4"
    shop.gate.set()
    assert [done(one).text for one in before] == ["With kv4."] * 2
    assert done(after).text == "With kv8."
    changing.join(WAIT)
    assert service.settings.kv == "kv8"
    assert stages == ["Waiting for the answers in front", "Reading the weights", "Warming up", "Ready"]
    assert shop.runners[0].released and shop.runners[0].open_slots == 0
    assert done(service.ask(chats[0], "And now?")).text == "With kv8."  # a chat from before goes on
    assert len(chats[0].turns) == 2
    totals = service.status()["totals"]
    assert totals["requests"] == {"stop": 4}  # the warming up is nobody's


def test_settings_that_fail_leave_those_before_in_force(service: LocalService, shop: Shop) -> None:
    shop.refuse = lambda settings: settings.kv == "bf16"
    with pytest.raises(UsageError, match="No room"):
        service.change({"kv": "bf16"})
    assert service.settings.kv == "kv4" and [one.kv for one in shop.opened] == ["kv4", "bf16", "kv4"]
    assert done(service.ask(service.new_chat(), "And now?")).text == "With kv4."


def test_a_model_that_is_lost_is_told(service: LocalService, shop: Shop) -> None:
    shop.refuse = lambda settings: True
    with pytest.raises(UsageError, match="No room"):
        service.change({"kv": "bf16"})
    assert not service.ready
    with pytest.raises(UsageError, match="No room"):
        service.ask(service.new_chat(), "And now?")


def test_closing_ends_a_change_of_settings(service: LocalService, shop: Shop) -> None:
    reached, closing = threading.Event(), service._closed

    def opening(settings: Settings) -> bool:
        reached.set()
        assert closing.wait(WAIT)
        return False

    shop.refuse = opening
    ended: list[BaseException] = []

    def change() -> None:
        try:
            service.change({"kv": "bf16"})
        except BaseException as error:
            ended.append(error)

    changing = threading.Thread(target=change)
    changing.start()
    assert reached.wait(WAIT)
    service.close()
    changing.join(WAIT)
    assert isinstance(ended[0], Cancelled)
    assert [one.kv for one in shop.opened] == ["kv4", "bf16"]  # and not once more for the settings before


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kv": "kv5"}, "choose one of"),
        ({"chunk": 0}, "from 1 to"),
        ({"retrieval_ratio": 0.2}, "retrieval_ratio cannot be changed"),  # there is no head pattern
        ({"port": 80}, "port cannot be changed here while Octavo runs; kv, kv_bits, chunk can"),
    ],
)
def test_what_cannot_be_is_refused_before_anybody_waits(
    values: dict[str, Any], message: str, service: LocalService, shop: Shop
) -> None:
    with pytest.raises(UsageError, match=message):
        service.change(values)
    service.change({"kv": "kv4"})  # as it is
    assert len(shop.opened) == 1 and not shop.runners[0].released


def test_nothing_changes_while_there_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(NotReady):
        LocalService(Settings(cache_dir=tmp_path)).change({"kv": "kv8"})


def test_the_embedded_model_goes_on_with_other_settings(tmp_path: Path) -> None:
    """As a service that was started with them; what was saved at one setting is never taken at another."""
    (tmp_path / "ledger.txt").write_text(PROSE[:2000] + FACT + PROSE[2000:], encoding="utf-8")
    document = read_safely(tmp_path / "ledger.txt")
    exact = SamplingParams(max_new_tokens=16)

    def ask(service: LocalService, chat: Chat, question: str) -> Done:
        answer = done(service.ask(chat, question, [document], exact))
        if (snapshots := service._snapshots) is not None:
            snapshots.flush(WAIT)
        return answer

    other = {"retrieval_ratio": 0.2, "kv": "kv8", "sink": 4, "recent": 100, "chunk": 256}
    started = LocalService(Settings(model="embedded", cache_dir=tmp_path / "a", **other))  # type: ignore[arg-type]
    started.load()
    wanted = ask(started, started.new_chat(), "What is the pass code of the old ferry?")
    described = started.status()["settings"]
    started.close()

    service = LocalService(Settings(model="embedded", cache_dir=tmp_path / "b"))
    service.load()
    chat = service.new_chat()
    first = ask(service, chat, "What is the pass code of the old ferry?")
    assert "48213" in first.text
    service.change(other)
    assert service.status()["settings"] == described
    assert service.heads is not None and service.heads.settings.retrieval_ratio == 0.2
    changed = ask(service, service.new_chat(), "What is the pass code of the old ferry?")
    assert changed.token_ids == wanted.token_ids and changed.usage.cached_tokens == 0
    ask(service, chat, "What is the pass code of the old ferry?")
    assert [turn.answered for turn in chat.turns] == [True, True]  # the open chat goes on
    service.change({"retrieval_ratio": 0.5, "kv": "kv4", "sink": None, "recent": None, "chunk": None})
    again = ask(service, service.new_chat(), "What is the pass code of the old ferry?")
    assert again.token_ids == first.token_ids
    assert again.usage.cached_tokens > 500  # from the disk, where the first setting left it
    service.close()
