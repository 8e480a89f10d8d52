"""Electronic books, notebooks, and the plain formats that are read word for word."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.documents import Document, Limits, read_document
from app.errors import BadDocument, DocumentTooLarge
from tests.documents.build import archive

CONTAINER = (
    '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
    '<rootfile full-path="OEBPS/book.opf"/></rootfiles></container>'
)
PACKAGE = """<package xmlns="http://www.idpf.org/2007/opf" xmlns:dc="http://purl.org/dc/elements/1.1/">
<metadata><dc:title>A  Book</dc:title></metadata><manifest>
<item id="two" href="text/chapter%202.xhtml" media-type="application/xhtml+xml"/>
<item id="one" href="text/chapter1.xhtml#start" media-type="application/xhtml+xml"/>
<item id="gone" href="text/gone.xhtml" media-type="application/xhtml+xml"/>
<item id="pic" href="cover.png" media-type="image/png"/></manifest>
<spine><itemref idref="pic"/><itemref idref="one"/><itemref idref="two"/><itemref idref="gone"/></spine></package>"""


def book(**more: str) -> bytes:
    members = {
        "mimetype": "application/epub+zip",
        "META-INF/container.xml": CONTAINER,
        "OEBPS/book.opf": PACKAGE,
        "OEBPS/text/chapter1.xhtml": "<html><head><title>t</title></head><body><h1>One</h1><p>First words.</p></body>",
        "OEBPS/text/chapter 2.xhtml": "<html><body><script>x</script><p>Ünd zwei.</p></body></html>",
    }
    return archive(members | {name.replace("__", "/").replace("_", "."): text for name, text in more.items()})


def read(tmp_path: Path, data: bytes, name: str, limits: Limits | None = None) -> Document:
    path = tmp_path / "upload"
    path.write_bytes(data)
    return read_document(path, name, limits)


def test_a_book_gives_its_chapters_in_order(tmp_path: Path) -> None:
    document = read(tmp_path, book(), "a.epub")
    assert document.kind == "epub"
    assert document.text == "A Book\n\n# One\n\nFirst words.\nÜnd zwei.\n"
    assert len(document.pages) == 2
    assert read(tmp_path, book(), "renamed").kind == "epub"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (archive({"mimetype": "application/epub+zip"}), "damaged EPUB"),
        (archive({"META-INF/container.xml": "<container/>"}), "damaged EPUB"),
        (archive({"META-INF/container.xml": "<conta"}), "damaged EPUB"),
        (archive({"META-INF/container.xml": CONTAINER, "OEBPS/book.opf": "<package/>"}), "holds no text"),
        (
            book(
                **{
                    "META-INF__encryption_xml": "<encryption><EncryptionMethod"
                    ' Algorithm="http://www.w3.org/2001/04/xmlenc#aes128-cbc"/></encryption>'
                }
            ),
            "DRM",
        ),
        (b"just words", "no EPUB file, although"),
    ],
)
def test_books_that_cannot_be_read_say_why(tmp_path: Path, data: bytes, words: str) -> None:
    with pytest.raises(BadDocument, match=words):
        read(tmp_path, data, "a.epub")


def test_chapters_that_are_missing_are_named_and_the_others_read(tmp_path: Path) -> None:
    document = read(tmp_path, book(), "a.epub")
    told = "1 chapter of 3 missing in the book: OEBPS/text/gone.xhtml. No answer knows them."
    assert document.warnings == (told,)
    assert "First words." in document.text
    unknown = PACKAGE.replace('idref="gone"', 'idref="nowhere"')
    assert "missing in the book: nowhere." in read(tmp_path, book(OEBPS__book_opf=unknown), "a.epub").warnings[0]
    whole = book(OEBPS__text__gone_xhtml="<html><body><p>Found.</p></body></html>")
    assert read(tmp_path, whole, "a.epub").warnings == ()


def test_a_file_that_the_book_names_often_is_read_once(tmp_path: Path) -> None:
    often = PACKAGE.replace('<itemref idref="one"/>', '<itemref idref="one"/>' * 1000)
    document = read(tmp_path, book(OEBPS__book_opf=often), "a.epub")
    assert document.text == "A Book\n\n# One\n\nFirst words.\nÜnd zwei.\n"


def test_a_book_without_any_of_its_chapters_names_them(tmp_path: Path) -> None:
    many = "".join(f'<item id="c{n}" href="{n}.html" media-type="text/html"/>' for n in range(9))
    spine = "".join(f'<itemref idref="c{n}"/>' for n in range(9))
    package = f"<package><manifest>{many}</manifest><spine>{spine}</spine></package>"
    data = archive({"META-INF/container.xml": CONTAINER, "OEBPS/book.opf": package})
    told = "a.epub is a damaged EPUB: 9 chapters of 9 missing in the book: OEBPS/0.html, .*/4.html and 4 more. Get it"
    with pytest.raises(BadDocument, match=told):
        read(tmp_path, data, "a.epub")


def test_hidden_fonts_are_no_protection(tmp_path: Path) -> None:
    fonts = '<encryption><EncryptionMethod Algorithm="http://www.idpf.org/2008/embedding"/></encryption>'
    assert "First words." in read(tmp_path, book(**{"META-INF__encryption_xml": fonts}), "a.epub").text


def test_entities_in_a_book_are_not_expanded(tmp_path: Path) -> None:
    laughs = "".join(f'<!ENTITY a{n + 1} "{f"&a{n};" * 10}">' for n in range(9))
    bomb = f'<!DOCTYPE p [<!ENTITY a0 "ha">{laughs}]>{PACKAGE.replace("A  Book", "&a9;")}'
    try:
        text = read(tmp_path, book(OEBPS__book_opf=bomb), "a.epub").text
    except BadDocument:
        return
    assert "haha" not in text


def notebook(**more: object) -> dict[str, object]:
    cells = [
        {"cell_type": "markdown", "source": ["# Tea\n", "Prices."]},
        {
            "cell_type": "code",
            "source": "price * 2",
            "outputs": [
                {"output_type": "stream", "text": ["loading\n"]},
                {"output_type": "execute_result", "data": {"text/plain": ["84"], "image/png": "iVBORw0KGgo"}},
                {"output_type": "error", "ename": "ValueError", "evalue": "no tea", "traceback": ["\x1b[31m..."]},
                {"output_type": "stream", "text": "x" * 9000},
            ],
        },
        {"cell_type": "raw", "source": "As it is."},
    ]
    return {"cells": cells, "metadata": {"kernelspec": {"language": "python"}}, "nbformat": 4} | more


def test_a_notebook_gives_its_cells_and_outputs(tmp_path: Path) -> None:
    document = read(tmp_path, json.dumps(notebook()).encode(), "tea.ipynb")
    assert document.kind == "notebook"
    assert len(document.pages) == 3  # a page is a cell
    assert document.slice(1, 1) == "# Tea\nPrices.\n\n"
    code = document.slice(2, 2)
    assert code.startswith("```python\nprice * 2\n```\nOutput:\n```\nloading\n```\nOutput:\n```\n84\n```\n")
    assert "ValueError: no tea" in code
    assert "iVBOR" not in code
    assert len(code) < 5000
    old = {"worksheets": [{"cells": [{"cell_type": "code", "input": "1 + 1", "outputs": []}]}]}
    assert "1 + 1" in read(tmp_path, json.dumps(old).encode(), "old.ipynb").text


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"{", "damaged notebook"),
        (b"[" * 200_000, "damaged notebook: it is nested too deeply. Open it"),
        (b'{"cells": "\xff"}', "damaged notebook: it is not UTF-8. Open it"),
        (b'{"nbformat": ' + b"9" * 5000 + b"}", "damaged notebook: a number has too many digits. Open it"),
        (b"[]", "no notebook"),
        (b'{"cells": 1}', "no notebook"),
        (b'{"cells": []}', "holds no text"),
        (b'{"cells": [1, null, {"cell_type": "code", "outputs": [3, {"data": 4}]}]}', "^a.ipynb"),
    ],
)
def test_notebooks_that_cannot_be_read_say_why(tmp_path: Path, data: bytes, words: str) -> None:
    if words == "^a.ipynb":  # odd, but no reason to fail
        assert "```" in read(tmp_path, data, "a.ipynb").text
        return
    with pytest.raises(BadDocument, match=words):
        read(tmp_path, data, "a.ipynb")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("table.csv", 'name,price\n"Tea, green",3\nCoffee,4\n'),
        ("data.json", '{"tea": {"price": 3, "origin": "Darjeeling"}}\n'),
        ("guide.rst", "Tea\n===\n\n.. note:: Steep it.\n"),
        ("notes.md", "# Tea\n\n- green\n- black\n"),
        ("main.rs", 'fn main() {\n    println!("tea");\n}\n'),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_plain_formats_are_read_word_for_word(tmp_path: Path, name: str, text: str, encoding: str) -> None:
    long = text + "filler\n" * 900 + "the last line"
    document = read(tmp_path, long.encode(encoding), name)
    assert document.text == long
    place = document.place(long.index("the last line"))
    assert (place.file, place.line) == (name, long.count("\n") + 1)
    assert place.page == len(document.pages) > 1


def test_deep_xml_is_refused_and_deep_html_read(tmp_path: Path) -> None:
    deep = "<w:p>" * 100_000
    with pytest.raises(BadDocument, match="deeper than 256"):
        read(tmp_path, archive({"word/document.xml": f'<w:document xmlns:w="x">{deep}'}), "a.docx")
    page = "<div>" * 100_000 + "words"
    assert "words" in read(tmp_path, b"<html><body>words " + page.encode(), "a.html").text


def test_a_huge_text_is_refused_with_both_numbers(tmp_path: Path) -> None:
    path = tmp_path / "big.txt"
    path.write_bytes(b"word " * (41 << 20))  # 205 MiB
    with pytest.raises(DocumentTooLarge, match="64,000,000 characters"):
        read_document(path)
    path.unlink()
