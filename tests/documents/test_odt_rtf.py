"""Texts of other word processors: OpenDocument and RTF."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from app.documents import Document, Limits, read_document, read_safely
from app.errors import BadDocument
from tests.documents.build import archive

NAMES = " ".join(
    f'xmlns:{short}="urn:oasis:names:tc:opendocument:xmlns:{short}:1.0"' for short in ("office", "text", "table")
)
TYPE = "application/vnd.oasis.opendocument.text"


def content(body: str) -> str:
    body = f"<office:body><office:text>{body}</office:text></office:body>"
    return f"<office:document-content {NAMES}>{body}</office:document-content>"


def odt(body: str, **more: str) -> bytes:
    members = {"mimetype": TYPE, "content.xml": content(body)}
    return archive(members | {name.replace("__", "/").replace("_", "."): text for name, text in more.items()})


def read(tmp_path: Path, data: bytes, name: str) -> Document:
    path = tmp_path / "upload"
    path.write_bytes(data)
    document = read_document(path, name)
    assert read_safely(path, name) == document
    return document


def test_odt_gives_what_a_person_reads(tmp_path: Path) -> None:
    body = (
        "<text:tracked-changes><text:changed-region><text:deletion><text:p>deleted</text:p></text:deletion>"
        "</text:changed-region></text:tracked-changes>"
        '<text:h text:outline-level="2">Report</text:h>'
        '<text:p>One<text:tab/>two<text:s text:c="3"/>three<text:line-break/>'
        "four <text:span>fi<text:span>ve</text:span>"
        "</text:span>.<text:note><text:note-citation>1</text:note-citation><text:note-body><text:p>The note.</text:p>"
        "</text:note-body></text:note> Six.<office:annotation><text:p>comment</text:p></office:annotation></text:p>"
        "<text:list><text:list-item><text:p>first</text:p></text:list-item><text:list-item><text:p>second</text:p>"
        "<text:list><text:list-item><text:p>inner</text:p></text:list-item></text:list></text:list-item></text:list>"
        "<table:table><table:table-row><table:table-cell><text:p>tea</text:p></table:table-cell><table:table-cell>"
        "<text:p>3 €</text:p></table:table-cell></table:table-row></table:table>"
        "<text:section><text:p>Before<text:soft-page-break/>behind.</text:p></text:section>"
    )
    document = read(tmp_path, odt(body), "report.odt")
    assert document.kind == "odt"
    first, second = (document.slice(page, page) for page in (1, 2))
    assert first.split("\n\n") == [
        "## Report",
        "One\ttwo   three\nfour five.[note 1] Six.",
        "- first",
        "- second",
        "- inner",
        "tea | 3 €",
        "Before\n",
    ]
    assert second == "behind.\n\n[note 1] The note.\n\n"
    assert read(tmp_path, odt("<text:p>words</text:p>"), "renamed").kind == "odt"
    cell, inner = "<table:table-row><table:table-cell>{}</table:table-cell></table:table-row>", "<text:p>inner</text:p>"
    nested = cell.format(f"<text:p>outer</text:p><table:table>{cell.format(inner)}</table:table>")
    assert read(tmp_path, odt(f"<table:table>{nested}</table:table>"), "a.odt").text.split() == ["outer", "inner"]
    listed = read(tmp_path, archive({"docs/a.odt": odt("<text:p>words inside</text:p>")}), "all.zip")
    assert "words inside" in listed.text


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (odt("<text:p>"), "damaged ODT"),
        (odt("<text:p/>"), "holds no text"),
        (odt("<text:p>x</text:p>")[:120], "damaged ZIP"),
        (
            archive(
                {
                    "mimetype": TYPE,
                    "content.xml": b"\x93\x01 encrypted",
                    "META-INF/manifest.xml": '<m:manifest xmlns:m="urn:x"><m:file-entry><m:encryption-data/>'
                    "</m:file-entry></m:manifest>",
                }
            ),
            "protected by a password",
        ),
        (b"just words", "no ODT file, although"),
    ],
)
def test_an_odt_that_cannot_be_read_says_why(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "upload"
    path.write_bytes(data)
    with pytest.raises(BadDocument, match=words):
        read_document(path, "a.odt")


def test_entities_in_an_odt_are_not_expanded(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("private words")
    head = f'<!DOCTYPE d [<!ENTITY a "boom"><!ENTITY f SYSTEM "{secret.as_uri()}">]>'
    body = "<office:body><office:text><text:p>safe &f; &a;</text:p></office:text></office:body>"
    xml = f"{head}<office:document-content {NAMES}>{body}</office:document-content>"
    text = read(tmp_path, archive({"mimetype": TYPE, "content.xml": xml}), "a.odt").text
    assert "safe" in text
    assert "private" not in text and "boom" not in text


RTF = (
    r"{\rtf1\ansi\ansicpg1252\deff0{\fonttbl{\f0\fswiss\fcharset0 Arial;}{\f1\fnil\fcharset204 Cyr;}}"
    r"{\colortbl;\red255\green0\blue0;}{\info{\title hidden title}}"
    r"\f0 Caf\'e9 \b bold\b0  and \u8364? and \u-10179?\u-8703?.\par"
    r"{\pict\pngblip 89504e470d0a}{\*\generator hidden}Second\tab line\line third \{braces\}\page "
    r"\f1\'cf\'f0\'e8\'e2\'e5\'f2\f0\par}"
)


def test_rtf_gives_its_text_and_pages(tmp_path: Path) -> None:
    document = read(tmp_path, RTF.encode("ascii"), "letter.rtf")
    assert document.kind == "rtf"
    assert document.slice(1, 1) == "Café bold and € and 😁.\nSecond\tline\nthird {braces}\n"
    assert document.slice(2, 2).strip() == "Привет"
    assert document.warnings == ()
    assert read(tmp_path, RTF.encode("ascii"), "letter.doc").kind == "rtf"  # as some programs name it


def test_a_backslash_before_a_word_is_no_page_of_an_rtf(tmp_path: Path) -> None:
    document = read(tmp_path, rb"{\rtf1 see C:\\page and C:\\pages\page behind}", "paths.rtf")
    assert document.slice(1, 1).strip() == r"see C:\page and C:\pages"
    assert document.slice(2, 2).strip() == "behind"


def test_damaged_rtf_is_told(tmp_path: Path) -> None:
    cut = read(tmp_path, RTF[: RTF.index("Second") + 6].encode(), "cut.rtf")
    assert "Second" in cut.text
    assert "cut short" in cut.warnings[0]
    for number, text in enumerate((r"{\rtf1}", r"{\rtf1 \u99999999999999?}", r"{\rtf1}}}}}}" + "{" * 10_000)):
        path = tmp_path / f"{number}.rtf"
        path.write_text(text)
        with pytest.raises(BadDocument, match="holds no text|damaged RTF") as caught:
            read_safely(path)
        assert "Python" not in str(caught.value)


def test_hostile_rtf_takes_seconds(tmp_path: Path) -> None:
    for unit in (r"{\field{\*\fldinst{HYPERLINK ", "{", r"\'e9", r"\u8364?", r"{\pict\bin9 "):
        path = tmp_path / "hostile.rtf"
        path.write_text(r"{\rtf1 words " + unit * (300_000 // len(unit)))
        before = time.monotonic()
        try:
            read_safely(path, limits=Limits(max_seconds=5))
        except BadDocument:
            pass
        assert time.monotonic() - before < 20, unit
