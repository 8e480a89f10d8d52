"""Documents and chats on disk: whole or not there, and each browser's alone."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.chat import Chat, Selection, Turn
from app.documents import Document, Page, read_document
from app.evidence import Passage, Quote
from app.library import Library
from app.library.documents import DocumentStore
from app.places import told


@pytest.fixture
def document(tmp_path: Path) -> Document:
    path = tmp_path / "heron \u00e9.txt"
    path.write_text("The word is heron.\fSaid twice, \U0001f426 and \u2028 all.\fNo more.", encoding="utf-8")
    return read_document(path)


def _chat(document: Document) -> Chat:
    chat = Chat("Be brief.")
    first = chat.add(
        Turn("What is the word?", (Selection.whole(document),), tuple(range(500)), (7, 8), "Heron.", "stop")
    )
    chat.add(Turn("And\nthen?", (), (9,), (10, 11), "Nothing.", "stop"))
    chat.head = first.id
    chat.add(Turn("Why?", (), (9, 9), (12,), "Because.", "length"))
    chat.begin("Still there?")
    return chat


def test_a_document_comes_back_equal_and_damage_is_noticed(tmp_path: Path, document: Document) -> None:
    store = DocumentStore(tmp_path / "documents")
    label = store.put(document)
    assert store.get(label) == document
    assert store.get("../" + label) is None
    assert store.get("0" * 32) is None
    path = tmp_path / "documents" / f"{label}.json"
    whole = path.read_bytes()
    other = whole.replace(b"heron", b"crane", 1)  # JSON as good as before, of another text
    assert other != whole
    for damaged in (other, whole[:-20], whole[:3], b"", b"\n", b"[]", b'{"crc32": 0}\n'):
        path.write_bytes(damaged)
        assert store.get(label) is None, damaged[:40]
        assert store.put(document) == label  # added again it is whole again
        assert store.get(label) == document
    changed = path.stat().st_mtime_ns
    store.put(document)
    assert path.stat().st_mtime_ns == changed


def test_half_characters_are_kept_out_of_documents_and_mended_in_saved_chats(tmp_path: Path) -> None:
    cells = [{"cell_type": "markdown", "source": ["Half a bird: \ud83d."], "metadata": {}}]
    path = tmp_path / "birds.ipynb"
    path.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    document = read_document(path)
    assert document.text.startswith("Half a bird: \ufffd.")
    owner = Library(tmp_path).owner("a secret")
    chat = Chat()
    chat.begin("Which \ud83d?", [Selection.whole(document)])
    owner.save_chat(chat)
    back = Library(tmp_path).owner("a secret").open_chat(chat.id)
    assert back is not None
    assert [turn.question for turn in back.path(back.head)] == ["Which \ufffd?"]  # a page with a half could not be sent


def test_ids_are_kept_where_they_are_many_and_checked(tmp_path: Path) -> None:
    store = DocumentStore(tmp_path)
    store.keep_ids("few", [1, 2, 3])
    assert store.ids("few") is None
    many = tuple(range(5000))
    store.keep_ids("many", many)
    assert store.ids("many") == many
    data = bytearray((tmp_path / "many.ids").read_bytes())
    data[2000] ^= 1
    (tmp_path / "many.ids").write_bytes(data)
    assert store.ids("many") is None
    (tmp_path / "file").touch()
    DocumentStore(tmp_path / "file").keep_ids("many", many)  # no folder can be there: nothing is kept, nothing fails


def test_a_chat_comes_back_as_it_was(tmp_path: Path, document: Document) -> None:
    library = Library(tmp_path)
    owner = library.owner("a secret")
    chat = _chat(document)
    owner.save_chat(chat)
    owner.save_chat(chat)
    size = (tmp_path / "owners").rglob("*.ids").__next__().stat().st_size

    again = Library(tmp_path).owner("a secret")
    back = again.open_chat(chat.id)
    assert back is not None
    assert (back.system, back.head, back.title) == ("Be brief.", chat.head, "What is the word?")
    want = [
        replace(turn, finish_reason="interrupted") if turn.finish_reason == "running" else turn
        for turn in chat.tree.values()
    ]
    assert list(back.tree.values()) == want
    assert [turn.answer for turn in back.turns] == ["Heron.", "Because."]
    again.save_chat(back)
    assert (tmp_path / "owners").rglob("*.ids").__next__().stat().st_size == size  # ids are not written twice
    assert not list(tmp_path.rglob("*.part"))


def test_ids_that_cannot_be_read_once_are_nobody_elses_after_that(
    tmp_path: Path, document: Document, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = _chat(document)
    Library(tmp_path).owner("a secret").save_chat(chat)
    again = Library(tmp_path).owner("a secret")
    with monkeypatch.context() as patch:
        patch.setattr(again.chats, "_ids", lambda *_: (_ for _ in ()).throw(OSError(24, "Too many open files")))
        back = again.open_chat(chat.id)
    assert back is not None and all(turn.prompt_ids == turn.answer_ids == () for turn in back.turns)
    again.save_chat(back)
    later = Library(tmp_path).owner("a secret").open_chat(chat.id)
    assert later is not None and all(turn.prompt_ids == turn.answer_ids == () for turn in later.turns)


def test_damaged_ids_are_made_anew_and_a_damaged_chat_is_not_listed(tmp_path: Path, document: Document) -> None:
    gc.collect()  # what other tests left behind must not be finalised where there is no stack left for it
    owner = Library(tmp_path).owner("a secret")
    chat = _chat(document)
    owner.save_chat(chat)
    ids = next((tmp_path / "owners").rglob("*.ids"))
    data = bytearray(ids.read_bytes())
    data[1000] ^= 1
    ids.write_bytes(data)
    back = Library(tmp_path).owner("a secret").open_chat(chat.id)
    assert back is not None
    assert [bool(turn.prompt_ids) for turn in back.turns] == [False, True]
    file = next((tmp_path / "owners").rglob(f"{chat.id}.json"))
    whole = json.loads(file.read_text())
    first, *others = whole["turns"]
    other = Chat()
    other.begin("Whole?")
    owner.save_chat(other)
    for damaged in (
        "{",
        "[" * 100_000,
        file.read_text()[:-1],
        json.dumps({"id": chat.id}),
        json.dumps({"id": chat.id, "title": "A", "turns": [{"id": "b"}]}),
        *(json.dumps(whole | {name: None}) for name in ("title", "turns", "sampling", "created")),
        json.dumps(whole | {"turns": []}),
        json.dumps(whole | {"turns": [5]}),
        json.dumps(whole | {"head": "gone"}),
        json.dumps(whole | {"turns": [first | {"parent": first["id"]}, *others]}),
        json.dumps(whole | {"turns": [first | {"at": "now"}, *others]}),
    ):
        file.write_text(damaged)
        library = Library(tmp_path)
        owner = library.owner("a secret")
        assert [listed.id for listed in owner.chats.find()] == [other.id], damaged[:200]
        assert owner.open_chat(chat.id) is None
        assert owner.export_chat(chat.id, "md") is None
        owner.chats.rename(chat.id, "Other")
        assert file.read_text() == damaged
        library.sweep()


def test_a_damaged_chat_or_list_costs_no_document_and_nobody_else(tmp_path: Path, document: Document) -> None:
    library = Library(tmp_path)
    chat = Chat()
    chat.begin("What?", [Selection.whole(document)])
    owner = library.owner("a secret")
    owner.save_chat(chat)
    label = owner.add(document)
    file = next((tmp_path / "owners").rglob(f"{chat.id}.json"))
    file.write_text(file.read_text()[:-30])
    listed = next((tmp_path / "owners").rglob("documents.json"))
    entry = json.loads(listed.read_text())[0]
    for damaged in ("[" * 100_000, "{}", "[1]", '[{"a": 1}]', '[{"label": 5}]'):
        listed.write_text(damaged)
        library = Library(tmp_path)
        assert library.owner("a secret").documents() == []
        assert library.pinned() == frozenset()
        library.sweep()
        assert library.documents.has(label)  # the damaged chat names it
    listed.write_text(json.dumps([1, entry | {"from a later version": 1}]))
    assert [shelved.label for shelved in Library(tmp_path).owner("a secret").documents()] == [label]


def test_other_chats_with_the_same_beginning_are_found_whichever_branch_has_it(tmp_path: Path) -> None:
    owner = Library(tmp_path).owner("a secret")
    alone, other, late = Chat(), Chat(), Chat()
    alone.add(Turn("What?", (), (7, 8), (9,), "x", "stop"))
    other.add(Turn("What?", (), tuple(range(600)), (9,), "x", "stop"))
    other.head = None
    other.add(Turn("What else?", (), (7, 8, 3), (9,), "x", "stop"))  # the question was edited: another beginning
    late.begin("Too long?")  # failed before there were ids; what is asked behind it begins the prompt
    late.add(Turn("And this?", (), (5, 5), (9,), "x", "stop"))
    late.add(Turn("Then?", (), (6, 6), (9,), "x", "stop"))
    for chat in (alone, other, late):
        owner.save_chat(chat)
    edited = {(*range(600), 9), (7, 8, 3, 9)}
    assert set(owner.chats.paths([(7, 8, 3)])) == {(7, 8, 9), *edited}
    assert set(owner.chats.paths([tuple(range(900))])) == edited
    assert (5, 5, 9, 6, 6, 9) in set(owner.chats.paths([(1,), (5,)]))
    assert list(owner.chats.paths([(6, 6), (9,)])) == []


def test_chats_are_found_renamed_exported_and_deleted(tmp_path: Path, document: Document) -> None:
    owner = Library(tmp_path).owner("a secret")
    chat, other = _chat(document), Chat()
    other.add(Turn("Quite another thing: " + "long " * 30, (), (1,), (2,), "Yes.", "stop"))
    owner.save_chat(chat)
    owner.save_chat(other)
    assert [listed.id for listed in owner.chats.find()] == [other.id, chat.id]
    assert [listed.id for listed in owner.chats.find("BECAUSE heron")] == [chat.id]
    assert owner.chats.find("absent") == []
    assert len(owner.chats.find("quite")[0].title) <= 61
    owner.chats.rename(chat.id, "  Birds \n of the coast ")
    assert owner.chats.find("coast")[0].title == "Birds of the coast"
    text = owner.export_chat(chat.id, "md")
    assert text is not None
    assert text.startswith("# Birds of the coast")
    assert "Because." in text and "Nothing." not in text  # the branch that is seen
    assert document.name in text
    plain = json.loads(owner.export_chat(chat.id, "json") or "")
    assert len(plain["turns"]) == 4
    assert "prompt" not in plain["turns"][0]
    for nonsense in ("", "../../x", chat.id + "/..", "0" * 32):
        assert owner.export_chat(nonsense, "md") is None
        owner.chats.delete(nonsense)
    owner.chats.delete(chat.id)
    assert [listed.id for listed in owner.chats.find()] == [other.id]


def test_a_save_looks_at_the_ids_of_new_turns_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words of an answer are saved every few seconds, and the ids in front of it may be millions."""
    owner, chat = Library(tmp_path).owner("a secret"), Chat()
    chat.add(Turn("First?", (), (1, 2), (3,), "Yes.", "stop"))
    running = chat.add(Turn("Then?", (), (4, 5), (), "", "running", answered=False))
    owner.save_chat(chat)
    looked: list[Any] = []
    ids_of = np.asarray
    monkeypatch.setattr(np, "asarray", lambda ids, *args, **types: (looked.append(ids), ids_of(ids, *args, **types))[1])
    for words in ("A", "A word"):
        owner.save_chat(chat, (running.id, words))
    assert looked == []
    chat.update(running.id, answer_ids=(6,), answer="A word.", finish_reason="stop", answered=True)
    owner.save_chat(chat)
    assert (6,) in looked and (1, 2) not in looked
    monkeypatch.undo()
    saved = owner.open_chat(chat.id)
    assert saved is not None and saved.token_ids == (1, 2, 3, 4, 5, 6)


@pytest.mark.parametrize(("name", "part"), [("notes.txt", "page"), ("retry.py", "part")])
def test_an_export_words_places_as_the_page_does(tmp_path: Path, name: str, part: str) -> None:
    text = "one\ntwo\nthree\nfour\n"
    document = Document(name, "text", text, (Page(1, 0, 8), Page(2, 8, len(text))), (), 0, "0" * 32)
    label = Selection.whole(document).label
    found, quote = Passage(label, name, 8, 18, 2, 3, 0.5, "three\nfour"), Quote("four", name, 2, label, 14, 18, 4)
    lost = Quote("five", None, None)
    owner, chat = Library(tmp_path).owner("a secret"), Chat()
    turn = Turn(
        "Which?", (Selection(document, 1, 2),), (), (), "Four.", "stop", passages=(found,), quotes=(quote, lost)
    )
    chat.add(turn)
    owner.save_chat(chat)
    exported = owner.export_chat(chat.id, "md") or ""
    assert f"- {told(found, document)} (50%): three four" in exported
    assert f"\u201cfour\u201d: {told(quote, document)}\n" in exported
    assert "\u201cfive\u201d: not in the documents" in exported
    assert f"{name}, {part}s 1 to 2*" in exported


def test_a_branch_is_on_top_as_new(tmp_path: Path) -> None:
    owner = Library(tmp_path).owner("a secret")
    old, other = Chat(created=1000.0), Chat(created=2000.0)
    first = old.add(Turn("First?", (), (1,), (2,), "Yes.", "stop", at=1000.0))
    other.add(Turn("Later?", (), (1,), (2,), "Yes.", "stop", at=2000.0))
    branch = old.fork(first.id)
    for chat in (old, other, branch):
        owner.save_chat(chat)
    assert [listed.id for listed in owner.chats.find()] == [branch.id, other.id, old.id]


def test_owners_never_see_each_others_things(tmp_path: Path, document: Document) -> None:
    library = Library(tmp_path)
    one, two = library.owner("one"), library.owner("two")
    label = one.add(document, 900)
    chat = _chat(document)
    one.save_chat(chat)
    assert two.documents() == [] and two.chats.find() == []
    assert two.open(label) is None and two.open_chat(chat.id) is None
    assert two.export_chat(chat.id, "md") is None
    two.pin(label, True)
    assert library.pinned() == frozenset()
    one.pin(label, True)
    assert Library(tmp_path).pinned() == {label}
    assert library.listed() == {label} and two.listed() == set()
    assert "one" not in {path.name for path in tmp_path.rglob("*")}  # the secret itself is nowhere


def test_a_text_stays_while_a_list_or_a_chat_names_it(tmp_path: Path, document: Document) -> None:
    library = Library(tmp_path)
    owner = library.owner("one")
    label = owner.add(document)
    chat = _chat(document)
    owner.save_chat(chat)
    owner.remove(label)
    library.sweep()
    assert library.documents.has(label)
    owner.chats.delete(chat.id)
    dropped: list[str] = []
    library.sweep(dropped.append)
    assert dropped == [label] and not library.documents.has(label)


def test_a_chat_over_a_document_that_is_gone_keeps_its_name(tmp_path: Path, document: Document) -> None:
    library = Library(tmp_path)
    owner = library.owner("one")
    chat = _chat(document)
    owner.save_chat(chat)
    label = Selection.whole(document).label
    library.documents.drop(label)
    back = Library(tmp_path).owner("one").open_chat(chat.id)
    assert back is not None
    source = back.turns[0].sources[0]
    assert (source.document.name, source.document.text, source.label) == (document.name, "", label)
    assert back.turns[0].prompt_ids == tuple(range(500))


def test_branches(document: Document) -> None:
    chat = _chat(document)
    first, second, third, open_turn = chat.tree.values()
    assert [turn.id for turn in chat.siblings(second.id)] == [second.id, third.id]
    chat.show(second.id)
    assert chat.head == second.id
    chat.show(first.id)
    assert chat.head == open_turn.id  # the newest end
    assert chat.token_count == 500 + 2 + 2 + 1
    fork = chat.fork(second.id)
    fork.begin("On its own")
    assert fork.id != chat.id and len(fork.path(fork.head)) == 3
    assert len(chat.tree) == 4
    assert chat.has(Selection.whole(document))


def test_a_store_holds_no_ids_in_memory_and_nothing_of_a_deleted_chat(tmp_path: Path, document: Document) -> None:
    library = Library(tmp_path / "library")
    store, chat = library.owner("a").chats, _chat(document)
    chat.add(Turn("Long?", (), tuple(range(100_000)), (1,), "Yes.", "stop"))
    library.owner("a").save_chat(chat)
    size = (store.folder / f"{chat.id}.ids").stat().st_size
    assert store.find("heron")
    assert list(store.paths([range(500)]))
    opened = library.owner("a").open_chat(chat.id)
    assert opened is not None and len(opened.path(opened.head)[-1].prompt_ids) == 100_000
    library.owner("a").save_chat(opened)
    assert (store.folder / f"{chat.id}.ids").stat().st_size == size  # nothing was written a second time
    held = sum(len(key) for places in store._places.values() for key in places)
    assert held < 1000
    store.delete(chat.id)
    assert not store._known and not store._places
