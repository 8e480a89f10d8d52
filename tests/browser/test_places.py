"""How places are told, and what is said of an answer's passages."""

from __future__ import annotations

import json
from html import unescape
from typing import Any

import pytest

from app import cli_ask
from app.chat import Chat, Selection, Turn
from app.documents import Document, File, Page
from app.documents.document import Kind
from app.evidence import Passage, Quote
from app.local import LocalService
from app.places import told
from app.ui import shelf
from app.ui.attachment import Attachment
from app.ui.conversation import Conversation
from app.ui.messages import turns
from app.ui.source import view

TEXT = "tree\nguide one\nguide two\n    def retry():\n"
PAGES = (Page(1, 0, 5), Page(2, 5, 15), Page(3, 15, 25), Page(4, 25, len(TEXT)))
FILES = (File("docs/guide.pdf", 5, 25), File("net/client.py", 25, len(TEXT)))
SHOP = Document("shop", "code", TEXT, PAGES, (), 0, "0" * 32, FILES)


def passage(document: Document, at: int, end: int, excerpt: str) -> Passage:
    place = document.place(at)
    label = Selection.whole(document).label
    return Passage(label, place.file, at, end, place.page, place.line, 0.5, excerpt)


@pytest.mark.parametrize(
    ("at", "says"),
    [(0, "shop, line 1"), (17, "docs/guide.pdf, page 2, line 1"), (27, "net/client.py, line 1")],
)
def test_pages_are_those_of_the_file_and_code_has_none(at: int, says: str) -> None:
    assert told(passage(SHOP, at, at + 5, "x"), SHOP) == says


def test_the_command_line_tells_places_as_the_page_does() -> None:
    found = passage(SHOP, 25, len(SHOP.text), "    def retry():")
    assert cli_ask._looked_at(found, [Selection.whole(SHOP)]) == "50% from net/client.py, line 1: def retry():"


def test_other_documents_have_their_pages() -> None:
    quote = Quote("words", "notes.txt", 1234, "label", 0, 5, 7)
    assert told(quote, None) == "notes.txt, page 1,234, line 7"


PDF = "one\ntwo\nthree\nfour\n"


@pytest.mark.parametrize(("kind", "says"), [("pdf", "page 2, line 2"), ("text", "page 2, line 4")])
def test_lines_of_a_pdf_are_counted_on_its_page(kind: Kind, says: str) -> None:
    document = Document("a", kind, PDF, (Page(1, 0, 8), Page(2, 8, len(PDF))), (), 0, "0" * 32)
    quote = Quote("four", "a", 2, "label", PDF.index("four"), len(PDF), 4)
    assert told(quote, document) == f"a, {says}"


@pytest.mark.parametrize("name", ["retry.py", "guide.md"])
def test_the_line_told_is_that_of_the_first_text_shown(name: str) -> None:
    text = "".join(f"line {number} says nothing of any use\n" for number in range(1, 9)) + "    key is here\n"
    key = text.index("key")
    excerpt = text.rstrip()
    document = Document(name, "text", text, (Page(1, 0, len(text)),), (), 0, "0" * 32)
    found = Passage(Selection.whole(document).label, name, 0, len(text), 1, 1, 0.5, excerpt, key, key + 11)
    chat = Chat()
    chat.add(Turn("Where?", (Selection.whole(document),), (), (), "Here.", "stop", passages=(found,)))
    (card,) = _facts(chat)["passages"]
    mark, _, shown = card["before"].partition("\u2026")
    first = text[: text.index(shown.strip() or card["key"])].count("\n") + 1
    assert not mark and "\u2026" in card["before"] and first > 5
    assert card["place"].endswith(f"line {first}")
    assert cli_ask._looked_at(found, [Selection.whole(document)]).startswith(f"50% from {card['place']}: \u2026 ")


def test_a_place_in_code_opens_as_code_and_names_its_file() -> None:
    found = passage(SHOP, 25, len(SHOP.text), "    def retry():")
    shown = view(SHOP, found, "turn", "p0")
    assert '<pre class="oc-code">' in shown and ">net/client.py</h2>" in shown and "Part 4 of 4" in shown
    assert "    def retry():" in shown
    before = view(SHOP, found, "turn", "p0", 3)
    assert "<pre>" in before and ">docs/guide.pdf</h2>" in before


def test_an_archive_says_how_many_files_it_has() -> None:
    shown = shelf.cards([Attachment("shop", document=SHOP, last=4)])
    assert "<span>2 files</span><span>4 parts</span>" in shown and "read parts" in shown


def test_a_card_has_its_place_and_the_words_that_were_looked_at_most() -> None:
    found = passage(SHOP, 25, len(SHOP.text), "    def retry(): # reason")
    chat = Chat()
    chat.add(Turn("What is the reason?", (Selection.whole(SHOP),), (), (), "It is retried.", "stop", passages=(found,)))
    facts = _facts(chat)
    assert facts["passages"][0]["place"] == "net/client.py, line 1" and facts["passages"][0]["code"]
    assert facts["passages"][0]["key"].startswith("    def")


def _facts(chat: Chat) -> dict[str, Any]:
    conversation = Conversation.__new__(Conversation)
    conversation.chat, conversation._answers = chat, []
    conversation.service = LocalService.__new__(LocalService)
    shown = turns(conversation, 0)
    (one,) = json.loads(unescape(shown.split('data-turns="')[1].split('"')[0]))
    return dict(one)
