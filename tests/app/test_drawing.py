"""What a tab shows next: nothing that takes long holds it up, and nothing older comes after."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from app.config import Settings
from app.errors import UsageError
from app.local import LocalService
from app.model import OpenModel
from app.ui import shelf
from app.ui.attachment import Attachment
from app.ui.conversation import Conversation
from app.ui.drawing import Drawing, Seen
from app.ui.parts import Parts
from app.ui.session import Loading, Session, Sessions
from tests.fakes import END, FakeRunner, FakeTokenizer, result_of

PARTS = Parts(*(field.name for field in fields(Parts)))  # type: ignore[arg-type]


class Tab:
    """A tab and what it shows by now."""

    def __init__(self, service: LocalService, page: str = "page") -> None:
        sessions = Sessions(service)
        self.drawing = Drawing(Loading(), PARTS, sessions)
        owner = service.library.owner("a secret")
        self.session = Session(owner, page, Conversation(service, owner))
        self.seen = Seen()
        self.shows: dict[str, Any] = {}

    async def look(self) -> None:
        """Once more of what the page's loop does."""
        changes = await asyncio.wait_for(self.drawing.news(self.session, self.seen), 5)
        self.shows.update(changes)

    async def until(self, part: str, text: str) -> None:
        async with asyncio.timeout(20):
            while text not in str(self.shows.get(part)):
                await self.look()
                await asyncio.sleep(0.01)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[LocalService]:
    model = OpenModel("fake", FakeRunner(capacity=2000), FakeTokenizer(), frozenset({END}), lambda context: context)
    service = LocalService(Settings(cache_dir=tmp_path), lambda settings, progress: model)
    yield service
    service.close()


def document(service: LocalService, tmp_path: Path, name: str, length: int = 10) -> Attachment:
    (tmp_path / name).write_text("x" * length)
    read = service.add_document(tmp_path / name)
    return Attachment(name, document=read, last=len(read.pages))


def test_slow_lists_hold_up_nothing(service: LocalService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service.load()
    disk, listed = threading.Event(), Drawing._lists

    def slow(drawing: Drawing, session: Session) -> Any:
        assert disk.wait(10)
        return listed(drawing, session)

    monkeypatch.setattr(Drawing, "_lists", slow)
    tab = Tab(service)
    conversation = tab.session.conversation
    one, two = (document(service, tmp_path, name) for name in ("one.txt", "two.txt"))

    async def looking() -> None:
        conversation.shelve(one)
        conversation.shelve(two)
        await tab.until("strip", 'data-state="plan"')
        conversation.read_earlier(two.id)
        await tab.look()
        assert tab.shows["shelf"].index("two.txt") < tab.shows["shelf"].index("one.txt")
        conversation.take_off(two.id)
        await tab.look()
        assert "one.txt" in tab.shows["shelf"] and "two.txt" not in tab.shows["shelf"]
        assert "chats" not in tab.shows
        disk.set()
        await tab.until("chats", "Your chats are kept here")
        await tab.look()
        assert "two.txt" not in tab.shows["shelf"]

    result_of(looking())


def test_counting_tokens_holds_up_nothing(
    service: LocalService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted, counts = threading.Event(), LocalService.count_tokens
    under_way: list[str] = []

    def slow(service: LocalService, source: Any, *more: Any) -> int:
        under_way.append(source.document.name)
        assert counted.wait(10)
        return counts(service, source, *more)

    monkeypatch.setattr(LocalService, "count_tokens", slow)
    one, two = Tab(service, "one"), Tab(service, "two")
    conversation = one.session.conversation
    two.session.show(conversation)

    async def looking() -> None:
        conversation.shelve(document(service, tmp_path, "long.txt"))
        await one.until("shelf", "long.txt")
        assert "counting tokens" in one.shows["shelf"] and 'data-state="loading"' in one.shows["strip"]
        assert not under_way  # nothing counts before the model is there
        await asyncio.to_thread(service.load)
        for tab in (one, two):
            await tab.until("strip", "Counting tokens")
            assert "counting tokens" in tab.shows["shelf"]
        conversation.shelve(document(service, tmp_path, "next.txt"))
        for tab in (one, two):
            await tab.until("shelf", "next.txt")
        assert under_way == ["long.txt"]  # once, for all tabs and changes
        counted.set()
        for tab in (one, two):
            await tab.until("strip", 'data-state="plan"')
            assert "Fits" in tab.shows["strip"] and tab.shows["shelf"].count("<span>10 tokens</span>") == 2
        assert sorted(under_way) == ["long.txt", "next.txt"]

    result_of(looking())


def test_a_refusal_stays_until_what_it_is_about_changes(service: LocalService, tmp_path: Path) -> None:
    service.load()
    tab = Tab(service)
    session, conversation = tab.session, tab.session.conversation

    async def looking() -> None:
        conversation.shelve(document(service, tmp_path, "one.txt"))
        await tab.until("strip", 'data-state="plan"')
        tab.drawing.refuse(session, conversation, UsageError("That cannot be."))
        await tab.until("strip", "That cannot be.")
        tab.drawing.sessions.changed(session.owner)
        session.words = "other lists"
        await tab.until("chats", "No chat has these words")
        assert "That cannot be." in tab.shows["strip"]
        conversation.shelve(document(service, tmp_path, "two.txt"))
        await tab.until("shelf", "two.txt")
        await tab.until("strip", "Fits")

        tab.drawing.refuse(session, conversation, UsageError("Nor that."))
        await tab.until("strip", "Nor that.")
        session.show(Conversation(service, session.owner))
        await tab.look()
        assert 'data-state="idle"' in tab.shows["strip"]
        tab.drawing.refuse(session, conversation, UsageError("Of the other chat."))
        await tab.look()
        assert 'data-state="idle"' in tab.shows["strip"]

    result_of(looking())


def test_tokens_of_a_document_that_is_gone_are_not_counted_on(service: LocalService, tmp_path: Path) -> None:
    service.load()
    conversation = Tab(service).session.conversation
    attachment = document(service, tmp_path, "long.txt")
    conversation.shelf = [attachment]
    asked: list[bool] = []

    def count(source: Any, progress: Any, cancelled: Any) -> int:
        progress(0.42)
        assert "counting tokens, 42%" in shelf.cards(conversation.shelf)
        asked.append(cancelled())
        conversation.take_off(attachment.id)
        asked.append(cancelled())
        return 1

    service.count_tokens = count  # type: ignore[method-assign, assignment]
    conversation._count_tokens()
    assert asked == [False, True]
