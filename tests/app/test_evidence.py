"""Passages and quotes: the right place in the text, whatever the tokens and the layout."""

from itertools import pairwise

import numpy as np
import pytest

from app.chat import Selection
from app.documents import Document, Page
from app.embedded import embedded_model_path
from app.evidence import Source, char_offsets, find_ids, passages, quotes
from app.tokenizer import Tokenizer
from models.evidence import Looked


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(embedded_model_path())


def _document(*pages, name="notes.txt"):
    text = "".join(pages)
    ends = np.cumsum([len(page) for page in pages])
    spans = tuple(
        Page(i + 1, int(end) - len(page), int(end)) for i, (page, end) in enumerate(zip(pages, ends, strict=True))
    )
    return Document(name, "text", text, spans, (), len(text), name)


def _source(tokenizer, selection, start=7):
    ids = tokenizer.encode_text(selection.text.strip(), start=False)
    return Source(selection.label, selection.document, selection.text, selection.start, ids, start)


def test_offsets_count_characters_not_bytes(tokenizer):
    document = _document("first page, skipped\n", "\n\n  Zwölf Bäume – 木の下に. Ende\n")
    source = _source(tokenizer, Selection(document, 2, 2))
    places = char_offsets(tokenizer, source, np.arange(len(source.ids)))
    assert document.text[places[0] :].startswith("Zwölf")
    last = tokenizer.decode(source.ids[-1:])
    assert document.text[places[-1] :].strip() == last.strip() != ""
    assert places == sorted(places)


def test_ids_are_found_whole_only():
    prompt = [0, 1 << 8, 0, 5, 6, 7]
    assert find_ids(prompt, [5, 6]) == 3
    assert find_ids(prompt, [0, 1 << 8, 0, 5, 6, 7]) == 0
    assert find_ids(prompt, [1, 0]) is None
    assert find_ids(prompt, []) is None


def test_the_passage_with_most_attention_comes_first(tokenizer):
    pages = ("Alpha beta.\n\nGamma delta is here.\n\n", "Epsilon.\nZeta.\n\nThe fact of the matter.\n")
    document = _document(*pages)
    source = _source(tokenizer, Selection.whole(document), 100)
    offsets = char_offsets(tokenizer, source, np.arange(len(source.ids)))
    fact, gamma = (document.text.index(word) for word in ("The fact", "Gamma"))
    masses = np.array([1.0 if place >= fact else 2.0 if gamma <= place < gamma + 5 else 0.0 for place in offsets])
    looked = Looked(np.arange(100, 100 + len(masses)), masses)
    first, second = passages(looked, [source], tokenizer)
    assert (first.excerpt, first.page, first.line) == ("The fact of the matter.", 2, 8)
    assert (second.excerpt, second.page, second.line) == ("Gamma delta is here.", 1, 3)
    assert first.strength > second.strength > 0 and first.strength + second.strength == pytest.approx(1)


@pytest.mark.parametrize("spread", [True, False])
def test_the_words_that_were_looked_at_are_told(tokenizer, spread):
    words = " ".join(f"word{i}" for i in range(40))
    fact = "The key lies under the third stone." if spread else f"And {words} the key lies {words} so"
    document = _document(f"\n\n  It was a long day. {fact} Nobody saw it\n\nElse.")
    source = _source(tokenizer, Selection.whole(document))
    offsets = char_offsets(tokenizer, source, np.arange(len(source.ids)))
    at = document.text.index("key lies")
    masses = np.array([0.5 if at <= place < at + 8 else 0.001 for place in offsets])
    (found, *_) = passages(Looked(np.arange(7, 7 + len(masses)), masses), [source], tokenizer)
    key = found.excerpt[found.key_start : found.key_end]
    assert "key lies" in key and len(key) <= 160
    assert not spread or key == fact
    assert key.strip() == key and set(key.split()) <= set(document.text.split())


def test_attention_outside_the_documents_gives_no_passage(tokenizer):
    source = _source(tokenizer, Selection.whole(_document("One. Two.")), 10)
    assert passages(Looked(np.arange(10), np.ones(10)), [source], tokenizer) == []


@pytest.mark.parametrize(
    "text", ["word " * 4000, "x" * 20000, "A sentence of some length. " * 600, "line\n" * 4000, "\n\n\n\na\n\n\n\nb"]
)
def test_passages_are_short_and_hold_what_was_looked_at(tokenizer, text):
    document = _document(text)
    source = _source(tokenizer, Selection.whole(document), 0)
    count = len(source.ids)
    for token in {0, count // 3, count // 2, count - 1}:
        masses = np.zeros(count)
        masses[token] = 1
        (found,) = passages(Looked(np.arange(count), masses), [source], tokenizer)
        (place,) = char_offsets(tokenizer, source, np.array([token]))
        assert found.start <= place < found.end and found.end - found.start <= 500
        assert found.excerpt or not text[place].strip()


def test_quotes_are_looked_up_word_for_word():
    document = _document(
        "He said: The gate\nis  painted \u2013 and left.\n", "It\u2019s a long way home.\n", name="a.txt"
    )
    answer = (
        'It says "the gate is painted - and left." and \u00abIt\'s a long way home\u00bb; "the gate is closed now". '
        'A "short term" is none.\n\n> He said: The gate\n> is painted\n'
    )
    found = {quote.text: (quote.name, quote.page) for quote in quotes(answer, {"a": document})}
    assert found == {
        "the gate is painted - and left.": ("a.txt", 1),
        "It's a long way home": ("a.txt", 2),
        "the gate is closed now": (None, None),
        "He said: The gate\nis painted": ("a.txt", 1),
    }


def test_a_quote_knows_its_place_and_may_be_emphasised():
    document = _document("One.\nThe gate is\n  snake_case green.\n", name="a.txt")
    (quote,) = quotes('"The **gate** is snake_case `green`."', {"label": document})
    assert (quote.document, quote.line) == ("label", 2)
    assert document.text[quote.start : quote.end] == "The gate is\n  snake_case green"


def test_a_quote_of_odd_signs_is_text_not_a_pattern():
    assert quotes('"a (b [c* d+"', {"x": _document("a (b [c* d+")})[0].page == 1
    assert quotes('"... ... ..."', {"x": _document("a")}) == []


def test_strings_of_code_and_attributes_of_tags_are_no_quotes():
    document = _document("The gate is painted green.\n", name="a.txt")
    answer = (
        '<p class="one two three">It says</p> `print("the gate is closed")` and "the gate is `painted` green":\n\n'
        '```python\nsay("one two three four")\n> not a quoted block\n```\n\n~~~\nsay("never closed at all")\n'
    )
    assert [(quote.text, quote.name) for quote in quotes(answer, {"a": document})] == [
        ("the gate is `painted` green", "a.txt")
    ]


def _looked(tokenizer, document, masses):
    """Passages of a document whose characters `at` had these masses."""
    source = _source(tokenizer, Selection.whole(document))
    offsets = char_offsets(tokenizer, source, np.arange(len(source.ids)))
    weights = np.zeros(len(offsets))
    for at, mass in masses.items():
        weights[max(index for index, place in enumerate(offsets) if place <= at)] += mass
    return passages(Looked(np.arange(7, 7 + len(weights)), weights), [source], tokenizer)


def test_one_line_is_one_passage_however_long(tokenizer):
    line = "The council met at noon and spoke of the mill. " * 18
    document = _document(f"Minutes.\n\n{line}\n\nElse.\n")
    at = document.text.index("The council")
    (found,) = _looked(tokenizer, document, {at + 100: 0.26, at + 600: 0.11})
    assert found.strength == 1 and found.line == 3
    assert found.start <= at + 100 < found.end <= at + 500


@pytest.mark.parametrize(
    "line", ["The council met at noon and spoke of the mill.\n", "word " * 9 + "\n", "x" * 47 + "\n"]
)
def test_passages_of_a_paragraph_without_end_never_overlap(tokenizer, line):
    document = _document(line * 400)
    found = _looked(tokenizer, document, dict.fromkeys(range(7000, 9200, 310), 1.0))
    spans = sorted((passage.start, passage.end) for passage in found)
    assert all(one[1] <= other[0] for one, other in pairwise(spans))
    assert all(end - start <= 500 for start, end in spans)


def test_what_was_looked_at_in_passing_is_no_passage(tokenizer):
    document = _document("# The Harbour of Norrvik\n\nThe word is heron.\n\nNothing else is here.\n")
    heading, fact, rest = (document.text.index(word) for word in ("Harbour", "heron", "else"))
    assert [p.excerpt for p in _looked(tokenizer, document, {heading: 0.06, fact: 0.9, rest: 0.04})] == [
        "The word is heron."
    ]


def test_code_keeps_its_indentation(tokenizer):
    document = _document("class Client:\n\n    def retry(self):\n        return 3\n", name="client.py")
    (found,) = _looked(tokenizer, document, {document.text.index("retry"): 1.0})
    assert found.excerpt == "    def retry(self):\n        return 3"
    assert found.line == 3
    assert found.excerpt[found.key_start : found.key_end] == "def retry(self):"
