"""An open chat: what happens where it cannot be written to disk."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.chat import Selection
from app.config import Settings
from app.library import Library, Owner, Shelved
from app.local import LocalService
from app.model import OpenModel
from app.ui import sidebar
from app.ui.attachment import Attachment
from app.ui.conversation import Conversation
from app.ui.drawing import Drawing
from app.ui.session import Loading
from tests.fakes import END, FakeRunner, FakeTokenizer


def test_a_document_is_ready_where_it_was_read_at_these_settings() -> None:
    entry = Shelved("a", "a.txt", 3, 0.0, 0.0, 5000)

    def told(ready: set[str], held: int) -> str:
        return sidebar.library([entry], ready, lambda label: held, lambda tokens: 7.0, held, 0)

    assert "5,000 tokens, ready (2 MB)" in told({"a"}, 2_000_000)
    assert "5,000 tokens, ready<" in told({"a"}, 0)  # another document counts its files
    assert "5,000 tokens, read anew in 7 s, 2 MB on disk<" in told(set(), 2_000_000)
    assert "5,000 tokens, read anew in 7 s<" in told(set(), 0)
    assert "behind something else, or at other settings" in told(set(), 1) and "something else" not in told({"a"}, 1)


def test_an_empty_library_promises_what_is_kept() -> None:
    def told(quota: int) -> str:
        return sidebar.library([], set(), lambda label: 0, lambda tokens: None, 0, quota)

    assert "opens at once when another one begins with it" in told(1 << 30)
    assert "at once" not in told(0)


def above(conversation: Conversation) -> str:
    """The line above the question box."""
    drawing: Any = SimpleNamespace(service=conversation.service, loading=Loading())
    session: Any = SimpleNamespace(conversation=conversation, editing=None, lost="", refusal=(None, ""))
    return Drawing.plan_strip(drawing, session)


def test_a_full_disk_stops_no_answer_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(owner: Owner, *_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    model = OpenModel("fake", FakeRunner(), FakeTokenizer(), frozenset({END}), lambda context: context)
    service = LocalService(Settings(cache_dir=tmp_path), lambda settings, progress: model)
    service.load()
    conversation = Conversation(service, Library(tmp_path / "library").owner("a secret"))
    with monkeypatch.context() as patch:
        patch.setattr(Owner, "save_chat", full)
        patch.setattr(Owner, "add", full)
        (tmp_path / "first.txt").write_text("The word is heron.")
        conversation.shelf = [Attachment("first.txt", document=service.add_document(tmp_path / "first.txt"), last=1)]
        assert conversation.ask("First?").finished.wait(10)
        assert conversation.running is None
        assert conversation.chat.turns[0].answer == "Yes."
        assert conversation.unsaved.startswith("This chat is not saved: No space left on device.")
        shown = sidebar.library([], set(), service.saved_bytes, service.reading_seconds, 0, 0, conversation.unsaved)
        assert "No space left" in shown
        assert 'data-state="error"' in above(conversation) and "This chat is not saved: No space" in above(conversation)
        assert conversation.ask("Again?").finished.wait(10)
        assert len([record for record in caplog.records if "Nothing can be saved" in record.message]) == 1
    assert conversation.ask("Second?").finished.wait(10)
    assert conversation.unsaved == ""
    assert 'data-state="idle"' in above(conversation)
    assert [listed.title for listed in conversation.owner.chats.find("second")] == ["First?"]
    assert [entry.name for entry in conversation.owner.documents()] == ["first.txt"]  # from when the disk was full
    service.close()


def test_the_shelf_is_in_the_order_of_arrival(tmp_path: Path) -> None:
    model = OpenModel("fake", FakeRunner(), FakeTokenizer(), frozenset({END}), lambda context: context)
    service = LocalService(Settings(cache_dir=tmp_path), lambda settings, progress: model)
    conversation = Conversation(service, Library(tmp_path / "library").owner("a secret"))
    first, second, third = (Attachment(name, arrived=at) for at, name in enumerate(("first", "second", "third"), 1))
    for attachment in (first, third, second):  # word of the third was faster
        conversation.shelve(attachment)
    assert conversation.shelf == [first, second, third]
    conversation.read_earlier(third.id)
    conversation.shelve(Attachment("fourth", arrived=4))
    assert [item.name for item in conversation.shelf] == ["first", "third", "second", "fourth"]
    service.close()


def test_a_file_that_is_read_while_a_question_is_asked_stays_on_the_shelf(tmp_path: Path) -> None:
    model = OpenModel("fake", FakeRunner(capacity=2000), FakeTokenizer(), frozenset({END}), lambda context: context)
    service = LocalService(Settings(cache_dir=tmp_path), lambda settings, progress: model)
    service.load()
    conversation = Conversation(service, Library(tmp_path / "library").owner("a secret"))
    (tmp_path / "asked.txt").write_text("The word is heron.")
    conversation.use(service.add_document(tmp_path / "asked.txt"))
    conversation.shelf = [*conversation.shelf, Attachment("bad.txt", error="No text."), Attachment("coming.txt")]
    answer = conversation.ask("What is the word?")
    assert [item.name for item in conversation.shelf] == ["coming.txt"]
    assert answer.finished.wait(10)
    service.close()


def test_what_a_question_was_about_waits_again_where_the_program_ended_before_it_was_read(tmp_path: Path) -> None:
    model = OpenModel("fake", FakeRunner(capacity=2000), FakeTokenizer(), frozenset({END}), lambda context: context)
    service = LocalService(Settings(cache_dir=tmp_path), lambda settings, progress: model)
    service.load()
    owner = Library(tmp_path / "library").owner("a secret")
    sources = []
    for name in ("read.txt", "asked.txt", "more.txt"):
        (tmp_path / name).write_text(f"The word in {name} is heron.")
        sources.append(Selection.whole(service.add_document(tmp_path / name)))
    before = Conversation(service, owner)
    before.use(sources[0].document)
    assert before.ask("First?").finished.wait(10)
    for source in sources[1:]:
        before.chat.begin("What is the word?", [source])
        owner.add(source.document)
    before.save()
    opened = owner.open_chat(before.chat.id)
    assert opened is not None and [turn.answered for turn in opened.path(opened.head)] == [True, False, False]
    assert {item.name for item in Conversation(service, owner, opened).shelf} == {"asked.txt", "more.txt"}
    service.close()


def test_a_stopped_question_that_is_asked_again_takes_its_documents_from_the_shelf(tmp_path: Path) -> None:
    model = OpenModel("fake", FakeRunner(capacity=2000), FakeTokenizer(), frozenset({END}), lambda context: context)
    service = LocalService(Settings(cache_dir=tmp_path), lambda settings, progress: model)
    service.load()
    conversation = Conversation(service, Library(tmp_path / "library").owner("a secret"))
    asked, other = (tmp_path / name for name in ("asked.txt", "other.txt"))
    asked.write_text("The word is heron.")
    other.write_text("The word is plover.")
    source = Selection.whole(service.add_document(asked))
    turn = conversation.chat.begin("What is the word?", [source])
    conversation.shelf = [Attachment.of(source), Attachment.of(Selection.whole(service.add_document(other)))]
    assert conversation.ask_again(turn.id).finished.wait(10)
    assert [item.name for item in conversation.shelf] == ["other.txt"]
    service.close()
