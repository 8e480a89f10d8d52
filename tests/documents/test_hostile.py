"""Files that were made to break a reader, or to keep it busy: refused in time, and nothing beside them is lost."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.documents import Limits, docx, notebook, odt, read_document
from app.errors import BadDocument, DocumentTooLarge
from tests.documents.build import W, archive, docx_xml
from tests.documents.test_odt_rtf import content as odt_content
from tests.documents.test_odt_rtf import odt as odt_file

EPUB = {
    "META-INF/container.xml": '<container><rootfile full-path="c.opf"/></container>',
    "c.opf": '<package><item id="a" href="http://[bad" media-type="text/html"/><item id="b" href="b.html"'
    ' media-type="text/html"/><itemref idref="a"/><itemref idref="b"/></package>',
    "b.html": "<p>Chapter two</p>",
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["text/plain", "x"]), inner),
    max_leaves=5,
)
OUTPUT = st.dictionaries(st.sampled_from(["output_type", "data", "text", "ename", "evalue"]), JSON)
CELL = st.fixed_dictionaries({"cell_type": st.just("code") | JSON}) | st.fixed_dictionaries(
    {"cell_type": st.just("code"), "source": JSON, "input": JSON, "outputs": JSON | st.lists(OUTPUT, max_size=2)}
)


@settings(max_examples=300, deadline=None)
@given(
    JSON | st.lists(CELL, max_size=3),
    JSON | st.fixed_dictionaries({"kernelspec": JSON | st.dictionaries(st.just("language"), JSON)}),
)
def test_a_notebook_of_any_types_is_read_or_refused(cells: Any, metadata: Any) -> None:
    try:
        notebook.read(json.dumps({"cells": cells, "metadata": metadata}).encode(), "a.ipynb", Limits())
    except BadDocument:
        pass


def test_odd_values_do_not_break_a_document(tmp_path: Path) -> None:
    many = "9" * 5000
    (tmp_path / "a.odt").write_bytes(
        odt_file(f'<text:h text:outline-level="{many}">Head</text:h><text:p>a<text:s text:c="{many}"/>b</text:p>')
    )
    assert read_document(tmp_path / "a.odt").text.split() == ["#", "Head", "a", "b"]
    (tmp_path / "a.epub").write_bytes(archive(EPUB))
    assert "Chapter two" in read_document(tmp_path / "a.epub").text


def test_entities_that_grow_without_end_are_told_in_our_words(tmp_path: Path) -> None:
    bomb = "".join(f'<!ENTITY e{i} "{f"&e{i - 1};" * 100 if i else "x" * 100}">' for i in range(6))
    body = f'<!DOCTYPE d [{bomb}]><w:document xmlns:w="x"><w:body w:a="&e5;"/></w:document>'
    (tmp_path / "a.docx").write_bytes(archive({"word/document.xml": body}))
    with pytest.raises(BadDocument, match=r"word/document\.xml defines entities that grow") as caught:
        read_document(tmp_path / "a.docx")
    assert "xmlCtxt" not in str(caught.value)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("<w:tbl><w:tr><w:tc>" * 250 + "</w:tc></w:tr></w:tbl>" * 250, "deeper than 256, the limit. Take tables out"),
        (f"<w:p><w:r><w:t>{'x' * 10_100_000}</w:t></w:r></w:p>", "more than 10,000,000 characters, the limit"),
        (f"<w:p w:a='{'x' * 10_100_000}'/>", "more than 10,000,000 characters, the limit"),
        (f"<w:p><!--{'x' * 10_100_000}--></w:p>", "more than 10,000,000 characters, the limit"),
        (f"<w:p><![CDATA[{'x' * 10_100_000}]]></w:p>", "more than 10,000,000 characters, the limit"),
    ],
    ids=["depth", "text", "value", "comment", "section"],
)
def test_limits_of_the_xml_parser_are_told_in_our_words(tmp_path: Path, body: str, words: str) -> None:
    (tmp_path / "a.docx").write_bytes(docx_xml(body))
    with pytest.raises(BadDocument, match=words) as caught:
        read_document(tmp_path / "a.docx")
    assert "a.docx: word/document.xml" in str(caught.value)
    assert "HUGE" not in str(caught.value)
    (tmp_path / "good.txt").write_text("All is well.")
    assert "All is well." in read_document(tmp_path).text  # it costs itself alone


def test_a_reader_that_breaks_costs_its_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "good.txt").write_text("All is well.")
    (tmp_path / "odd.ipynb").write_text("{}")

    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(notebook, "read", broken)
    document = read_document(tmp_path)
    assert "All is well." in document.text
    assert "1 file skipped: 1 binary or not readable. No answer knows them." in document.warnings
    assert any(note.startswith("odd.ipynb: left out") for note in document.warnings)


def test_nested_notes_are_read_once(tmp_path: Path) -> None:
    body = "<text:p>innermost</text:p>"
    for _ in range(60):
        body = f"<text:p><text:note><text:note-body>{body}</text:note-body></text:note></text:p>"
    (tmp_path / "a.odt").write_bytes(odt_file(body))
    before = time.monotonic()
    text = read_document(tmp_path / "a.odt").text
    assert time.monotonic() - before < 5
    assert text.count("innermost") == 1
    assert text.count("[note ]") == 120


def test_nested_text_boxes_in_a_table_are_read_once(tmp_path: Path) -> None:
    inner = ""
    for number in range(50):
        inner = f"<w:p><w:r><w:t>box{number};</w:t></w:r>{inner}</w:p>"
    (tmp_path / "a.docx").write_bytes(docx_xml(f"<w:tbl><w:tr><w:tc>{inner}</w:tc></w:tr></w:tbl>"))
    text = read_document(tmp_path / "a.docx").text
    assert all(text.count(f"box{number};") == 1 for number in range(50))


@pytest.mark.parametrize(
    ("reader", "name", "data"),
    [
        (odt, "a.odt", odt_file("<text:p>many words</text:p>" * 20_000)),
        (docx, "a.docx", docx_xml("<w:p><w:r><w:t>many words</w:t></w:r></w:p>" * 20_000)),
    ],
)
def test_limits_end_a_walk_and_not_what_comes_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: Any, name: str, data: bytes
) -> None:
    read = []
    inline = reader._inline
    monkeypatch.setattr(reader, "_inline", lambda *given: read.append(0) or inline(*given))
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DocumentTooLarge):
        read_document(tmp_path / name, limits=Limits(max_chars=1000))
    assert len(read) < 200


def test_the_clock_is_watched_within_a_page(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_bytes(b"<p>many words</p>" * 1000)
    with pytest.raises(DocumentTooLarge):
        read_document(tmp_path / "a.html", limits=Limits(max_seconds=0))


@pytest.mark.parametrize("tag", ["font", "b", "div"])
def test_html_is_read_to_its_end_however_deep(tmp_path: Path, tag: str) -> None:
    body = "".join(f"<{tag}>word{at} " for at in range(20_000)) + "<p>the end</p>"
    chapter = archive(EPUB | {"b.html": f"<html><body>{body}</body></html>"})
    for name, data in (("a.html", f"<html><body>{body}".encode()), ("a.epub", chapter)):
        (tmp_path / name).write_bytes(data)
        assert read_document(tmp_path / name).text.split() == [f"word{at}" for at in range(20_000)] + ["the", "end"]
    (tmp_path / "b.html").write_text("<div>" * 100_000 + "at the bottom")
    assert read_document(tmp_path / "b.html").text.strip() == "at the bottom"


@pytest.mark.parametrize("between", ["&e;", "<!-- x -->", "<?x?>"])
def test_what_splits_a_text_loses_none_of_it(tmp_path: Path, between: str) -> None:
    head = f'<!DOCTYPE w:document [<!ENTITY e "x">]><w:document xmlns:w="{W}"><w:body><w:p><w:r>'
    text = f"<w:t>one{between} two {between}three</w:t></w:r></w:p></w:body></w:document>"
    (tmp_path / "a.docx").write_bytes(archive({"word/document.xml": head + text}))
    assert read_document(tmp_path / "a.docx").text == "one two three\n"
    words = f"<text:p>one{between} <text:span>{between}two</text:span> {between}three</text:p>"
    content = f'<!DOCTYPE x [<!ENTITY e "x">]>{odt_content(words)}'
    (tmp_path / "a.odt").write_bytes(odt_file("", content_xml=content))
    assert read_document(tmp_path / "a.odt").text == "one two three\n"
    title = f"<metadata xmlns:dc='http://purl.org/dc/elements/1.1/'><dc:title>one{between} two</dc:title></metadata>"
    package = '<!DOCTYPE package [<!ENTITY e "x">]>' + EPUB["c.opf"].replace("<package>", "<package>" + title)
    (tmp_path / "a.epub").write_bytes(archive(EPUB | {"c.opf": package}))
    assert read_document(tmp_path / "a.epub").text.startswith("one two\n")


def test_nested_footnotes_are_read_once(tmp_path: Path) -> None:
    notes = ""
    for number in range(80):
        notes = f'<w:footnote w:id="{number}"><w:p><w:r><w:t>note{number};</w:t></w:r>{notes}</w:p></w:footnote>'
    data = docx_xml("<w:p><w:r><w:t>Text.</w:t></w:r></w:p>", footnotes=f'<w:x xmlns:w="{W}">{notes}</w:x>')
    (tmp_path / "a.docx").write_bytes(data)
    text = read_document(tmp_path / "a.docx").text
    assert all(text.count(f"note{number};") == 1 for number in range(80))


def test_a_paragraph_without_anything_in_it_is_not_walked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    walked = []
    inline = docx._inline
    monkeypatch.setattr(docx, "_inline", lambda *given: walked.append(0) or inline(*given))
    (tmp_path / "a.docx").write_bytes(docx_xml("<w:p/>" * 1000 + "<w:p><w:r><w:t>Text.</w:t></w:r></w:p><w:p/>"))
    assert read_document(tmp_path / "a.docx").text == "Text.\n"
    assert len(walked) == 1


def test_the_clock_is_watched_where_there_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.docx").write_bytes(docx_xml("<w:p/>" * 1000))
    with pytest.raises(DocumentTooLarge):
        read_document(tmp_path / "a.docx", limits=Limits(max_seconds=0))
