"""Branches of a chat with the embedded model: each equals a fresh run, token for token, and reads no document twice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from app.chat import Chat, Selection
from app.config import Settings
from app.documents import Document
from app.engine.types import SamplingParams
from app.local import LocalService

GREEDY = SamplingParams(max_new_tokens=8)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalService]:
    folder = tmp_path_factory.mktemp("cache")
    service = LocalService(Settings(model="embedded", context=4096, cache_dir=folder))
    service.load()
    assert service.load_error is None
    yield service
    service.close()


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory, prose: str) -> Document:
    path = tmp_path_factory.mktemp("texts") / "manual.txt"
    path.write_text(prose[:4000], encoding="utf-8")
    return LocalService(Settings()).add_document(path)


def _ask(service: LocalService, chat: Chat, question: str, document: Document | None = None) -> tuple[int, ...]:
    """Tokens that were read for a question; the answer is the chat's last."""
    done = service.ask(chat, question, [document] if document else [], GREEDY).result()
    return done.usage.prompt_tokens - done.usage.cached_tokens, *chat.turns[-1].answer_ids


def test_every_branch_equals_a_fresh_run_and_reads_no_document_twice(service: LocalService, document: Document) -> None:
    tokens = service.count_tokens(document)
    assert tokens > 800
    chat = service.new_chat()
    first_read, *_ = _ask(service, chat, "What is the subject?", document)
    assert first_read > tokens
    _ask(service, chat, "Which statements are named?")
    first, _ = chat.turns

    reads = {}
    answers: dict[tuple[str, ...], list[int]] = {}

    def note(asked: Chat, what: str, read: int, *answer: int) -> None:
        reads[what] = read
        answers[tuple(turn.question for turn in asked.turns)] = list(answer)

    chat.head = first.id
    note(chat, "edited", *_ask(service, chat, "Name one statement, please."))
    chat.head = None
    note(chat, "first edited", *_ask(service, chat, "Summarise all of it for a beginner.", document))
    fork = service.fork(chat, first.id)
    note(fork, "fork", *_ask(service, fork, "What comes next?"))
    other = service.new_chat()
    note(other, "another chat", *_ask(service, other, "Who would read this, and what for?", document))
    assert max(reads.values()) < 200, reads  # the questions, and the rest of a block: never the document

    alone = LocalService(replace(service.settings, library_quota=0.0))
    alone.load()
    try:
        for questions, answer in answers.items():
            runner = alone._need().engine.runner
            while runner.prefixes.drop_oldest():
                pass
            fresh = alone.new_chat()
            for question in questions:
                _, *told = _ask(alone, fresh, question, document)
            assert told == answer, questions
    finally:
        alone.close()


def test_a_second_service_opens_the_document_from_disk(service: LocalService, document: Document) -> None:
    chat = service.new_chat()
    _ask(service, chat, "What is the subject?", document)
    snapshots = service._need().snapshots
    assert snapshots is not None
    snapshots.flush()
    label = service.library.owner("a browser's secret").add(document)
    assert service.saved_bytes(label) > 0 and service.opens_at_once(label)
    other = LocalService(replace(service.settings, kv="kv8"))
    other.load()
    try:
        assert other.saved_bytes(label) > 0 and not other.opens_at_once(label)
    finally:
        other.close()
    again = LocalService(service.settings)
    again.load()
    try:
        fresh = again.new_chat()
        plan = again.plan(fresh, [document], "What is the subject?")
        assert plan.stored_tokens > 800
        read, *answer = _ask(again, fresh, "What is the subject?", document)
        assert read < 200
        assert tuple(answer) == chat.turns[0].answer_ids
        again.forget(label)
        assert again.saved_bytes(label) == 0
    finally:
        again.close()


def test_a_document_that_was_forgotten_is_kept_when_it_is_asked_about_again(
    service: LocalService, document: Document
) -> None:
    label, snapshots = Selection.whole(document).label, service._need().snapshots
    assert snapshots is not None
    for _ in range(2):
        while service._need().engine.runner.prefixes.drop_oldest():
            pass
        _ask(service, service.new_chat(), "What is the subject?", document)
        snapshots.flush()
        assert service.saved_bytes(label) > 0
        service.forget(label)
        assert service.saved_bytes(label) == 0


def test_a_document_is_ready_only_where_it_was_read_ahead_of_all_others(
    service: LocalService, tmp_path: Path, prose: str
) -> None:
    paths = tmp_path / "short.txt", tmp_path / "second.txt"
    paths[0].write_text(prose[4000:4800], encoding="utf-8")  # too short to be saved by itself
    paths[1].write_text(prose[5000:9000], encoding="utf-8")
    short, second = map(service.add_document, paths)
    label = service.library.owner("a browser's secret").add(second)
    snapshots = service._need().snapshots
    assert snapshots is not None

    def read(*documents: Document, system: str | None = None) -> None:
        service.ask(service.new_chat(system), "What is said?", documents, GREEDY).result()
        snapshots.flush()
        assert service.saved_bytes(label) > 0

    read(short, second)
    assert not service.opens_at_once(label)
    read(second, system="Answer in one word.")
    assert not service.opens_at_once(label)
    read(second)
    assert service.opens_at_once(label)
    service.forget(label)
    assert not service.opens_at_once(label)


def test_a_saved_chat_goes_on_after_a_restart(service: LocalService, document: Document, tmp_path: Path) -> None:
    owner = service.library.owner("a browser's secret")
    chat = service.new_chat()
    _ask(service, chat, "What is the subject?", document)
    owner.save_chat(chat)
    back = owner.open_chat(chat.id)
    assert back is not None
    read, *answer = _ask(service, back, "Which statements are named?")
    assert read < 200
    _, *straight = _ask(service, chat, "Which statements are named?")
    assert answer == straight
