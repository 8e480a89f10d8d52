"""A question is looked at while the tab goes on: to another chat, to an edit, or the chat is deleted."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.config import Settings
from app.conversation import Message
from app.engine.types import SamplingParams
from app.library.chats import ChatStore
from app.local import LocalService
from app.model import OpenModel
from app.ui import session as session_
from app.ui.attachment import Attachment
from app.ui.handlers import Handlers
from app.ui.messages import turns
from app.ui.session import Loading, Session, Sessions
from app.ui.uploads import Uploads
from tests.app.test_drawing import PARTS, document
from tests.fakes import END, FakeRunner, FakeTokenizer, result_of

REQUEST: Any = SimpleNamespace(session_hash="page")


class Desk:
    """The page's handlers over a model of 2,000 tokens; plans wait for `looked`."""

    def __init__(self, service: LocalService, monkeypatch: pytest.MonkeyPatch) -> None:
        self.service = service
        self.runner: Any = service._need().model.runner
        self.handlers = Handlers(Sessions(service), Loading(), Uploads(1 << 20), PARTS)
        self.looking, self.looked = threading.Event(), threading.Event()
        plan = service.plan

        def slow(*args: Any) -> Any:
            self.looking.set()
            assert self.looked.wait(10)
            return plan(*args)

        monkeypatch.setattr(service, "plan", slow)

    async def tab(self, page: str = "page") -> Session:
        return await self.handlers.sessions.open("", self.service.library.owner("a secret"), page)

    async def ask(self, session: Session, question: str) -> list[Any]:
        """What the page is sent."""
        return [changes async for changes in self.handlers.asked(session, question, REQUEST)]

    async def asked(self, session: Session, question: str) -> None:
        """Ask and wait for the answer's end."""
        self.looked.set()
        await self.ask(session, question)
        running = session.conversation.running
        if running is not None:
            await asyncio.to_thread(running.finished.wait, 10)
        self.looked.clear()
        self.looking.clear()

    async def delete(self, session: Session, chat_id: str) -> None:
        event: Any = SimpleNamespace(_data={"do": "delete", "id": chat_id})
        await self.handlers.acted(session, event, REQUEST)

    async def meanwhile(self, session: Session, question: str, what: Any) -> list[Any]:
        """Ask, do something while the question is looked at, and wait for what the page is sent."""
        asking = asyncio.create_task(self.ask(session, question))
        await asyncio.to_thread(self.looking.wait, 10)
        done = what()
        if asyncio.iscoroutine(done):
            await done
        self.looked.set()
        return await asking


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    model = OpenModel("fake", FakeRunner(capacity=2000), FakeTokenizer(), frozenset({END}), lambda context: context)
    service = LocalService(Settings(cache_dir=tmp_path), lambda settings, progress: model)
    service.load()
    yield Desk(service, monkeypatch)
    service.close()


def waiting(session: Session) -> list[str]:
    return [item.name for item in session.conversation.shelf]


def put(desk: Desk, session: Session, tmp_path: Path, name: str, length: int = 10) -> Attachment:
    attachment = document(desk.service, tmp_path, name, length)
    session.conversation.shelve(attachment)
    return attachment


async def after_one_chat(desk: Desk) -> tuple[Session, str]:
    """A tab with a new chat, and the id of the chat before it, which was asked."""
    session = await desk.tab()
    await desk.asked(session, "First?")
    first = session.conversation.chat.id
    desk.handlers.sessions.clear(session)
    return session, first


def test_a_refused_question_leaves_its_documents_where_the_tab_has_gone(desk: Desk, tmp_path: Path) -> None:
    async def use() -> None:
        session = await desk.tab()
        put(desk, session, tmp_path, "long.txt", 5000)
        await desk.meanwhile(session, "What?", lambda: desk.handlers.sessions.clear(session))
        assert waiting(session) == ["long.txt"] and not session.conversation.asked
        assert session.refusal[1] and session.refusal[1] == desk.handlers.draw.plan_strip(session)

    result_of(use())


def test_a_refused_question_leaves_an_asked_chat_alone(desk: Desk, tmp_path: Path) -> None:
    async def use() -> None:
        session, first = await after_one_chat(desk)
        sessions = desk.handlers.sessions
        put(desk, session, tmp_path, "long.txt", 5000)
        await desk.meanwhile(session, "What?", lambda: sessions.show(session, first))
        assert waiting(session) == []
        sessions.clear(session)
        assert waiting(session) == ["long.txt"]

    result_of(use())


def test_another_chat_is_left_alone_when_the_question_is_asked(desk: Desk, tmp_path: Path) -> None:
    async def use() -> None:
        session = await desk.tab()
        put(desk, session, tmp_path, "short.txt")
        left = session.conversation
        sent = await desk.meanwhile(session, "What?", lambda: desk.handlers.sessions.clear(session))
        assert not any(PARTS.question in changes for changes in sent)  # what is typed there meanwhile
        assert left.asked and left is not session.conversation and waiting(session) == []

    result_of(use())


def test_an_edit_in_another_chat_is_not_the_questions(desk: Desk, tmp_path: Path) -> None:
    async def use() -> None:
        session, first = await after_one_chat(desk)
        put(desk, session, tmp_path, "short.txt")
        second = session.conversation

        async def edit() -> None:
            await desk.handlers.sessions.show(session, first)
            session.editing = next(iter(session.conversation.chat.tree))

        await desk.meanwhile(session, "Second?", edit)
        assert [turn.question for turn in second.chat.tree.values()] == ["Second?"]
        assert session.conversation.chat.id == first and session.editing is not None

    result_of(use())


def test_a_chat_that_was_deleted_meanwhile_is_not_asked(desk: Desk, tmp_path: Path) -> None:
    async def use() -> None:
        session = await desk.tab()
        await desk.asked(session, "First?")
        put(desk, session, tmp_path, "short.txt")
        asked, chat = sum(desk.service.status()["totals"]["requests"].values()), session.conversation.chat.id
        await desk.meanwhile(session, "Second?", lambda: desk.handlers.sessions.forget(session.owner, chat))
        assert sum(desk.service.status()["totals"]["requests"].values()) == asked
        assert waiting(session) == ["short.txt"]  # it was no part of that chat

    result_of(use())


def test_each_chat_keeps_what_waits_there_and_a_new_one_is_found_again(desk: Desk, tmp_path: Path) -> None:
    async def use() -> None:
        session, first = await after_one_chat(desk)
        sessions = desk.handlers.sessions
        put(desk, session, tmp_path, "new.txt")
        await sessions.show(session, first)
        assert waiting(session) == []
        put(desk, session, tmp_path, "first.txt", 20)
        sessions.clear(session)
        assert waiting(session) == ["new.txt", "first.txt"]  # the new chat, with what waited where it was pressed
        await sessions.show(session, first)
        assert waiting(session) == []
        sessions.clear(session)
        sessions.clear(session)
        assert waiting(session) == ["new.txt", "first.txt"]

    result_of(use())


def test_an_edit_that_cannot_be_leaves_the_shelf(desk: Desk, tmp_path: Path) -> None:
    async def use() -> None:
        session = await desk.tab()
        put(desk, session, tmp_path, "short.txt")
        with pytest.raises(KeyError):
            session.conversation.ask("What?", "no such turn")
        assert waiting(session) == ["short.txt"]

    result_of(use())


def test_a_chat_with_what_waits_is_held_once_however_often_it_is_left(desk: Desk, tmp_path: Path) -> None:
    async def use() -> None:
        session, first = await after_one_chat(desk)
        sessions = desk.handlers.sessions
        second = session.conversation
        put(desk, session, tmp_path, "new.txt")
        for _ in range(3):
            await sessions.show(session, first)
            sessions.clear(session)
        await sessions.show(session, first)
        assert [held.conversation for held in sessions._sessions.values() if held.page is None] == [second]

    result_of(use())


def test_what_is_told_as_lost_is_true_and_lapses(desk: Desk, tmp_path: Path) -> None:
    async def use() -> None:
        owner, sessions = desk.service.library.owner("a secret"), desk.handlers.sessions
        one = await sessions.open("gone no-such-chat 2", owner, "one")
        assert "Add them again" in desk.handlers.draw.plan_strip(one)
        put(desk, one, tmp_path, "again.txt")
        assert one.lost == "" and one.kept.endswith(" 1")
        two = await sessions.open("gone no-such-chat 0", owner, "two")
        assert two.lost == ""
        # The tab is forgotten, its conversation is not: nothing is lost.
        assert (await sessions.open(f"gone {one.conversation.chat.id} 1", owner, "three")).lost == ""

    result_of(use())


def test_what_moves_a_chat_waits_for_a_question_that_is_looked_at(desk: Desk, tmp_path: Path) -> None:
    async def use() -> None:
        session = await desk.tab()
        await desk.asked(session, "First?")
        chat = session.conversation.chat
        first = next(iter(chat.tree))
        await desk.asked(session, "Second?")
        second = chat.head
        put(desk, session, tmp_path, "short.txt")

        async def press() -> None:
            """All that stands at the first answer, while the third question is looked at."""
            for what in ("again", "resume", "branch"):
                event: Any = SimpleNamespace(_data={"do": what, "id": first})
                pressed.append(asyncio.create_task(desk.handlers.acted(session, event, REQUEST)))
            await asyncio.sleep(0)

        pressed: list[Any] = []
        await desk.meanwhile(session, "Third?", press)
        await asyncio.gather(*pressed)
        (third,) = (turn for turn in chat.tree.values() if turn.question == "Third?")
        assert third.parent == second
        assert [turn.question for turn in chat.tree.values()] == ["First?", "Second?", "Third?"]

    result_of(use())


def test_an_answer_that_nobody_watches_gives_way_to_whoever_waits(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also to what no page shows: an API request, a self-test, a change of settings."""
    monkeypatch.setattr(session_, "UNWATCHED_S", 0.0)
    monkeypatch.setattr(session_, "ATTEND_S", 0.01)
    going = threading.Event()
    desk.runner.answer = lambda prompt: "on and on " * 500
    desk.runner.hook = lambda step, slot: going.wait(0.01) if step == "decode" else None

    async def use() -> None:
        attending = asyncio.create_task(desk.handlers.sessions.attend())
        session = await desk.tab()
        desk.looked.set()
        await desk.ask(session, "What?")
        answer = session.conversation.running
        assert answer is not None
        while answer.phase != "answering":
            await asyncio.sleep(0.01)
        waits = desk.service.converse([Message("user", "And mine?")], SamplingParams(max_new_tokens=1))
        await asyncio.sleep(0.1)
        assert not answer.stopping  # a page shows it
        desk.handlers.sessions.leave("page")
        await asyncio.to_thread(answer.finished.wait, 20)
        turn = session.conversation.chat.tree[answer.turn_id]
        assert (turn.finish_reason, turn.answered) == ("cancelled", True)
        going.set()
        await asyncio.to_thread(list, waits)
        attending.cancel()

    result_of(use())


def test_an_unwatched_question_in_line_takes_nothing_from_a_watched_answer(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_, "UNWATCHED_S", 0.0)
    going = threading.Event()
    desk.runner.hook = lambda step, slot: going.wait(10) if step == "decode" else None
    desk.looked.set()

    async def use() -> None:
        sessions = desk.handlers.sessions
        one, two = await desk.tab("one"), await desk.tab("two")
        for session in (one, two):
            await desk.ask(session, "What?")
        first, second = (session.conversation.running for session in (one, two))
        assert first is not None and second is not None
        while second.phase != "queued":
            await asyncio.sleep(0.01)
        sessions.leave("two")
        sessions._give_way()
        assert not first.stopping and not second.stopping
        sessions.leave("one")  # two that nobody watches, one of them in line: still nobody else waits
        sessions._give_way()
        assert not first.stopping and not second.stopping
        waits = desk.service.converse([Message("user", "And mine?")], SamplingParams(max_new_tokens=1))
        sessions._give_way()
        assert first.stopping and not second.stopping
        going.set()
        await asyncio.to_thread(list, waits)

    result_of(use())


def test_saving_growing_words_leaves_the_ended_answer_alone(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine ends an answer while its last words are still on their way."""
    monkeypatch.setattr("app.ui.answer.KEEP_S", 0.0)

    async def use() -> None:
        session = await desk.tab()
        for number in range(5):
            await desk.asked(session, f"Question {number}?")
        saved = session.owner.open_chat(session.conversation.chat.id)
        assert saved is not None
        for chat in (session.conversation.chat, saved):
            for turn in chat.tree.values():
                assert bytes(turn.answer_ids) == turn.answer.encode() == b"Yes."

    result_of(use())


def test_a_chat_is_renamed_though_its_answer_is_saved_meanwhile(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use() -> None:
        session = await desk.tab()
        await desk.asked(session, "What?")
        conversation, rename = session.conversation, ChatStore.rename

        def then_save(*args: Any) -> None:
            rename(*args)
            conversation.save()

        monkeypatch.setattr(ChatStore, "rename", then_save)
        event: Any = SimpleNamespace(_data={"do": "rename", "id": conversation.chat.id, "value": "Another title"})
        await desk.handlers.acted(session, event, REQUEST)
        conversation.save()
        assert conversation.chat.title == "Another title"
        assert [listed.title for listed in session.owner.chats.find()] == ["Another title"]

    result_of(use())


def test_a_title_that_the_disk_does_not_take_is_not_shown(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use() -> None:
        session = await desk.tab()
        await desk.asked(session, "What?")
        monkeypatch.setattr("app.library.chats.write_whole", _no_room)
        event: Any = SimpleNamespace(_data={"do": "rename", "id": session.conversation.chat.id, "value": "Another"})
        await desk.handlers.acted(session, event, REQUEST)
        assert session.conversation.chat.title == "What?"
        assert "The disk is full" in session.refusal[1]

    result_of(use())


def test_words_that_were_written_outlive_a_killed_program(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.ui.answer.KEEP_S", 0.0)
    desk.runner.answer = lambda prompt: "Once upon a time"
    going = threading.Event()
    desk.runner.hook = lambda step, slot: going.wait(10) if step == "decode" and slot.script[0] == ord("m") else None

    async def use() -> None:
        session = await desk.tab()
        desk.looked.set()
        await desk.ask(session, "What?")
        answer = session.conversation.running
        assert answer is not None
        while answer.text != "Once upon a ti":
            await asyncio.sleep(0.01)
        while True:  # as the disk has it, were the program killed now
            saved = session.owner.open_chat(session.conversation.chat.id)
            assert saved is not None
            (turn,) = saved.path(saved.head)
            if turn.answer == "Once upon a ti":
                break
            await asyncio.sleep(0.01)
        assert (turn.finish_reason, turn.answered, turn.answer_ids) == ("interrupted", True, ())
        going.set()
        await asyncio.to_thread(answer.finished.wait, 10)
        whole = session.owner.open_chat(saved.id)
        assert whole is not None and whole.path(whole.head)[0].answer == "Once upon a time"
        desk.runner.answer = lambda prompt: "me there was"
        events = await asyncio.to_thread(list, desk.service.resume(saved, turn.id))
        assert events[-1].text == "me there was"
        assert saved.path(saved.head)[0].answer == "Once upon a time there was"

    result_of(use())


def _no_room(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_chat_that_the_disk_did_not_take_is_written_when_there_is_room(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_, "ATTEND_S", 0.01)
    monkeypatch.setattr(session_, "REMEMBER_S", -1.0)

    async def use() -> None:
        session = await desk.tab()
        with monkeypatch.context() as full:
            full.setattr(type(session.owner), "save_chat", _no_room)
            await desk.asked(session, "First?")
            assert "No space" in session.conversation.unsaved
            desk.handlers.sessions.clear(session)
            desk.handlers.sessions.leave("nobody's")  # whoever is gone is forgotten after a while
            assert not session.owner.chats.find()
        attending = asyncio.create_task(desk.handlers.sessions.attend())
        async with asyncio.timeout(20):
            while not session.owner.chats.find():
                await asyncio.sleep(0.01)
        attending.cancel()
        assert [listed.title for listed in session.owner.chats.find()] == ["First?"]

    result_of(use())


def test_a_chat_that_the_disk_keeps_is_there_as_before(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use() -> None:
        session = await desk.tab()
        await desk.asked(session, "First?")
        chat = session.conversation.chat
        with monkeypatch.context() as readonly:
            readonly.setattr(type(session.owner.chats), "delete", _no_room)
            await desk.delete(session, chat.id)
            assert session.conversation.chat is chat and not session.conversation.deleted
            assert "The disk is full" in desk.handlers.draw.plan_strip(session)
        await desk.asked(session, "Second?")
        assert len(chat.path(chat.head)) == 2
        await desk.delete(session, chat.id)
        assert session.conversation.chat is not chat and not session.owner.chats.find()

    result_of(use())


def test_a_chat_is_deleted_though_nothing_else_can_be_looked_at(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use() -> None:
        session = await desk.tab()
        await desk.asked(session, "First?")
        chat = session.conversation.chat
        monkeypatch.setattr(desk.service.library, "sweep", _no_room)
        await desk.delete(session, chat.id)
        assert session.conversation.chat is not chat and not session.owner.chats.find()

    result_of(use())


def test_a_tab_that_opens_a_chat_while_it_is_deleted_has_none(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use() -> None:
        one, two = await desk.tab("one"), await desk.tab("two")
        await desk.asked(one, "First?")
        chat, sessions = one.conversation.chat, desk.handlers.sessions
        deleting, gone = desk.service.delete_chat, threading.Event()

        def slow(*about: Any) -> None:
            assert gone.wait(10)
            deleting(*about)

        monkeypatch.setattr(desk.service, "delete_chat", slow)
        work = asyncio.create_task(asyncio.to_thread(sessions.forget, one.owner, chat.id))
        while not one.conversation.deleted:
            await asyncio.sleep(0.01)
        await sessions.show(two, chat.id)
        assert two.conversation.chat is not chat
        again: Any = SimpleNamespace(_data={"do": "again", "id": chat.head})
        await desk.handlers.acted(one, again, REQUEST)
        assert len(chat.tree) == 1
        gone.set()
        await work
        assert one.conversation.chat is not chat and not one.conversation.deleted and not one.owner.chats.find()

    result_of(use())


def test_a_tab_that_left_a_chat_undoes_no_other_when_its_deletion_fails(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use() -> None:
        session = await desk.tab()
        await desk.asked(session, "First?")
        conversation, sessions = session.conversation, desk.handlers.sessions
        put_off, gone = threading.Event(), threading.Event()

        def slow(*_: Any) -> None:
            put_off.set()
            assert gone.wait(10)
            _no_room()

        monkeypatch.setattr(desk.service, "delete_chat", slow)
        work = asyncio.create_task(asyncio.to_thread(sessions.forget, session.owner, conversation.chat.id))
        await asyncio.to_thread(put_off.wait, 10)
        sessions.clear(session)
        gone.set()
        with pytest.raises(OSError, match="No space"):
            await work
        assert not conversation.deleted and session.conversation is not conversation

    result_of(use())


def test_a_deleted_chat_is_not_written_by_what_was_on_its_way(desk: Desk) -> None:
    async def use() -> None:
        one, two = await desk.tab("one"), await desk.tab("two")
        await desk.asked(one, "First?")
        owner, chat = one.owner, one.conversation.chat
        await asyncio.to_thread(desk.handlers.sessions.forget, owner, chat.id)
        owner.save_chat(chat)
        assert not owner.chats.find()
        opened = owner.open_chat
        owner.open_chat = lambda chat_id: opened(chat_id) or chat  # type: ignore[method-assign]  # read before that
        await desk.handlers.sessions.show(two, chat.id)
        assert two.conversation.chat is not chat

    result_of(use())


def test_words_of_a_continued_answer_that_fails_are_kept(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.runner.answer = lambda prompt: "One two three"

    def fails(step: str, slot: Any) -> None:
        if step == "decode" and slot.ids[-4:] == list(b"more"):
            raise RuntimeError("broken")

    async def use() -> None:
        session = await desk.tab()
        session.conversation.chat.sampling = SamplingParams(max_new_tokens=8)
        await desk.asked(session, "What?")
        (turn,) = session.conversation.chat.tree.values()
        assert (turn.answer, turn.finish_reason) == ("One two ", "length")
        desk.runner.answer, desk.runner.hook = lambda prompt: "and more words", fails
        session.conversation.chat.sampling = SamplingParams()
        answer = session.conversation.resume(turn.id)
        await asyncio.to_thread(answer.finished.wait, 10)
        saved = session.owner.open_chat(session.conversation.chat.id)
        assert saved is not None
        for chat in (session.conversation.chat, saved):
            (turn,) = chat.tree.values()
            assert turn.answer.startswith("One two and more"[:15]) and turn.answer_ids == () and turn.error

    result_of(use())


def test_a_chat_is_left_when_the_last_of_its_tabs_is(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was closed long ago says nothing about the other, which is loaded again just now."""
    going, now = threading.Event(), [1000.0]
    monkeypatch.setattr(session_, "time", SimpleNamespace(monotonic=lambda: now[0]))
    desk.runner.hook = lambda step, slot: going.wait(10) if step == "decode" else None
    desk.looked.set()

    async def use() -> None:
        sessions = desk.handlers.sessions
        old, new = await desk.tab("old"), await desk.tab("new")
        await desk.ask(old, "What?")
        answer = old.conversation.running
        assert answer is not None
        await sessions.show(new, old.conversation.chat.id)
        sessions.leave("old")
        waits = desk.service.converse([Message("user", "And mine?")], SamplingParams(max_new_tokens=1))
        for seconds, stopping in ((60.0, False), (14.0, False), (2.0, True)):
            now[0] += seconds
            sessions._give_way()
            assert answer.stopping == stopping
            sessions.leave("new")
        going.set()
        await asyncio.to_thread(list, waits)

    result_of(use())


def test_files_that_were_refused_go_with_the_page_that_told_of_them(desk: Desk, tmp_path: Path) -> None:
    async def use() -> None:
        session, first = await after_one_chat(desk)
        sessions = desk.handlers.sessions
        put(desk, session, tmp_path, "good.txt")

        def refuse() -> None:
            session.conversation.shelve(Attachment("scan.pdf", error="It has no text."))
            assert waiting(session)[-1] == "scan.pdf"

        refuse()
        sessions.clear(session)  # pressed in the new chat itself
        assert waiting(session) == ["good.txt"]
        refuse()
        await sessions.show(session, first)
        refuse()
        sessions.clear(session)
        assert waiting(session) == ["good.txt"]
        refuse()
        await sessions.open(session.kept, session.owner, "loaded again", again=True)
        assert waiting(session) == ["good.txt"]
        await sessions.show(session, first)
        assert waiting(session) == []
        refuse()
        other = await desk.tab("other")
        await sessions.show(other, first)
        await sessions.show(other, other.draft.chat.id)
        assert waiting(session) == ["scan.pdf"]  # where it is still told of

    result_of(use())


def test_another_wording_is_marked_wherever_it_is_read(desk: Desk) -> None:
    async def use() -> None:
        session = await desk.tab()
        await desk.asked(session, "What?")
        conversation = session.conversation
        first = next(iter(conversation.chat.tree.values()))
        assert "sampled, since at Exact" in turns(conversation, 0)
        answer = conversation.ask_again(first.id)
        await asyncio.to_thread(answer.finished.wait, 10)
        owner, chat = session.owner, conversation.chat
        saved = owner.open_chat(chat.id)
        assert saved is not None
        for whole in (chat, saved):
            one, two = whole.tree.values()
            assert one.sampling is None and two.sampling is not None and whole.head == two.id
            assert two.sampling.temperature > 0 and two.sampling.seed is not None
        exported = json.loads(owner.export_chat(chat.id, "json") or "")
        assert [turn.get("sampling", {}).get("temperature") for turn in exported["turns"]] == [None, 0.7]
        assert "asked again, sampled*" in (owner.export_chat(chat.id, "md") or "")
        conversation.show(first.id)
        assert "asked again" not in (owner.export_chat(chat.id, "md") or "")

    result_of(use())
