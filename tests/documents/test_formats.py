"""PDF, DOCX, HTML and archives: what is read, and what each refusal says."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import docx
import pytest

from app.documents import Document, Limits, read_document
from app.errors import BadDocument, DocumentTooLarge
from tests.documents.build import W, archive, docx_xml, pdf


def read(tmp_path: Path, data: bytes, name: str, limits: Limits | None = None) -> Document:
    path = tmp_path / "upload"
    path.write_bytes(data)
    return read_document(path, name, limits)


# --- PDF


def test_pdf_gives_its_pages(tmp_path: Path) -> None:
    document = read(tmp_path, pdf("The first page.", "The code is 4711.", "Third."), "book.pdf")
    assert document.kind == "pdf"
    assert [document.slice(n, n).strip() for n in (1, 2, 3)] == ["The first page.", "The code is 4711.", "Third."]
    assert document.slice(1, 3) == document.text
    assert document.warnings == ()


def test_pdf_is_known_by_its_content(tmp_path: Path) -> None:
    assert read(tmp_path, b"\n" + pdf("Named otherwise."), "notes.txt").kind == "pdf"


def test_words_broken_at_line_ends_are_mended(tmp_path: Path) -> None:
    document = read(tmp_path, pdf("an extra-\nordinary state-\nof-the-art post-\nWar Covid-\n19 well-known"), "a.pdf")
    assert document.text.split() == "an extraordinary state-of-the-art post-War Covid-19 well-known".split()


def test_pages_without_text_are_named(tmp_path: Path) -> None:
    document = read(tmp_path, pdf("One.", "", "", "Four.", ""), "mixed.pdf")
    assert len(document.pages) == 5
    assert document.warnings == ("3 pages without text (pictures or scans): 2-3, 5.",)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (pdf("", ""), "2 pages and no text: it is a scan"),
        (pdf("secret", encrypted=True), "protected by a password"),
        (b"%PDF-1.7\n" + b"rubbish " * 50, "damaged PDF"),
        (b"%PDF-", "damaged PDF"),
        (b"<!DOCTYPE html><html><body>Log in</body></html>", "an HTML page, although its name ends in .pdf"),
        (b"\xef\xbb\xbf\n<!-- x --><HTML><body>Log in</body></html>", "an HTML page, although its name ends in .pdf"),
        (b"just words", "no PDF file, although its name ends in .pdf"),
    ],
)
def test_a_pdf_that_cannot_be_read_says_what_it_is(tmp_path: Path, data: bytes, words: str) -> None:
    with pytest.raises(BadDocument, match=words):
        read(tmp_path, data, "paper.pdf")


def test_a_cut_pdf_is_repaired_or_refused_but_never_silent(tmp_path: Path) -> None:
    whole = pdf("Some text here.", "More text here.")
    for size in range(0, len(whole), 40):
        try:
            document = read(tmp_path, whole[:size], "cut.pdf")
        except BadDocument:
            continue
        assert "text here" in document.text


def test_pdfs_are_read_from_many_threads(tmp_path: Path) -> None:
    def one(number: int) -> str:
        path = tmp_path / f"{number}.pdf"
        path.write_bytes(pdf(*(f"Document {number} page {page}" for page in range(20))))
        return read_document(path).slice(20, 20).strip()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(16))) == [f"Document {n} page 19" for n in range(16)]


# --- DOCX


def test_docx_gives_headings_lists_tables_in_order(tmp_path: Path) -> None:
    written = docx.Document()
    written.add_heading("Report", 1)
    written.add_paragraph("Opening words.")
    table = written.add_table(2, 2)
    for row, column, value in ((0, 0, "name"), (0, 1, "price"), (1, 0, "tea"), (1, 1, "3 €")):
        table.cell(row, column).text = value
    written.add_page_break()
    written.add_paragraph("Second page.")
    out = io.BytesIO()
    written.save(out)
    document = read(tmp_path, out.getvalue(), "report.docx")
    assert document.kind == "docx"
    assert document.slice(1, 1).split("\n\n")[:3] == ["# Report", "Opening words.", "name | price\ntea | 3 €"]
    assert document.slice(2, 2).strip() == "Second page."


def test_docx_keeps_insertions_controls_and_notes_and_drops_deletions(tmp_path: Path) -> None:
    run = "<w:r><w:t>{}</w:t></w:r>"
    body = (
        f"<w:p>{run.format('kept ')}<w:ins>{run.format('inserted')}</w:ins>"
        "<w:del><w:r><w:delText>gone</w:delText></w:r></w:del>"
        f"<w:moveFrom>{run.format('moved away')}</w:moveFrom>"
        '<w:r><w:tab/><w:footnoteReference w:id="2"/></w:r></w:p>'
        f"<w:sdt><w:sdtContent><w:p>{run.format('in a control')}</w:p></w:sdtContent></w:sdt>"
    )
    notes = f'<w:footnotes xmlns:w="{W}"><w:footnote w:type="separator" w:id="0"><w:p>{run.format("line")}</w:p>'
    notes += f'</w:footnote><w:footnote w:id="2"><w:p>{run.format("The note.")}</w:p></w:footnote></w:footnotes>'
    document = read(tmp_path, docx_xml(body, footnotes=notes), "a.docx")
    assert document.text == "kept inserted\t[footnote 2]\n\nin a control\n\n[footnote 2] The note.\n"


def test_docx_pages_are_those_of_the_last_rendering(tmp_path: Path) -> None:
    body = (
        '<w:p><w:r><w:t>one</w:t></w:r><w:r><w:br w:type="page"/></w:r></w:p>'
        "<w:p><w:r><w:lastRenderedPageBreak/><w:t>two</w:t></w:r></w:p>"
        "<w:p><w:r><w:lastRenderedPageBreak/><w:t>three</w:t></w:r></w:p>"
    )
    document = read(tmp_path, docx_xml(body), "a.docx")
    assert [document.slice(n, n).strip() for n in range(1, len(document.pages) + 1)] == ["one", "two", "three"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (docx_xml("<w:p>"), "damaged DOCX"),
        (docx_xml("<w:p/>"), "holds no text"),
        (docx_xml("<w:p><w:r><w:t>words</w:t></w:r></w:p>")[:200], "damaged ZIP or Office file"),
        (b"no zip at all", "no DOCX file, although its name ends in .docx"),
        (archive({"a.txt": "a"}), "ZIP archive, although its name ends in .docx"),
        (archive({"xl/workbook.xml": "<x/>"}), "Excel workbook"),
        (archive({"ppt/presentation.xml": "<x/>"}), "PowerPoint"),
        (archive({"mimetype": "application/vnd.oasis.opendocument.spreadsheet", "content.xml": "<x/>"}), "as CSV"),
        (archive({"mimetype": "application/vnd.oasis.opendocument.presentation", "content.xml": "<x/>"}), "as PDF"),
        (archive({"C:/evil.xml": "x", "word/document.xml": "x"}), "leads outside"),
        (archive({"a\\..\\..\\evil.xml": "x", "word/document.xml": "x"}), "leads outside"),
        (archive({"../../evil.xml": "x", "word/document.xml": "x"}), "leads outside"),
        (archive({"/etc/evil.xml": "x", "word/document.xml": "x"}), "leads outside"),
    ],
)
def test_an_archive_that_cannot_be_read_says_what_it_is(tmp_path: Path, data: bytes, words: str) -> None:
    with pytest.raises(BadDocument, match=words):
        read(tmp_path, data, "a.docx")


def test_a_zip_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    bomb = archive({"word/document.xml": b"\0" * (8 << 20)})
    assert len(bomb) < 20_000
    with pytest.raises(DocumentTooLarge, match=r"unpacks to 8\.0 MiB; the limit is 4\.0 MiB"):
        read(tmp_path, bomb, "a.docx", Limits(max_unpacked_bytes=4 << 20))


def test_entities_in_a_docx_are_not_expanded(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("private words")
    xml = (
        f'<!DOCTYPE d [<!ENTITY a "boom"><!ENTITY f SYSTEM "{secret.as_uri()}">]>'
        f'<w:document xmlns:w="{W}"><w:body><w:p><w:r><w:t>safe &f; &a;</w:t></w:r></w:p></w:body></w:document>'
    )
    text = read(tmp_path, archive({"word/document.xml": xml}), "a.docx").text
    assert "safe" in text
    assert "private" not in text
    assert "boom" not in text


# --- HTML


def test_html_gives_what_a_browser_shows(tmp_path: Path) -> None:
    page = (
        "<!doctype html><html><head><title> The  title </title><style>p {}</style></head><body>"
        "<script>var hidden = 1;</script><h2>Chapter &amp; verse</h2>\n<p>One\n  two <b>three</b>.<br>four</p>"
        "<!-- hidden --><ul><li>first</li><li>second</li></ul>"
        "<table><tr><td>a</td><td>b</td></tr><tr><td>c</td><td>d</td></tr></table>"
        "<pre>if x:\n    y\n</pre><template>hidden</template>end</body></html>"
    )
    assert read(tmp_path, page.encode(), "page.html").text == (
        "The title\n\n## Chapter & verse\n\nOne two three.\nfour\n\n- first\n\n- second\n\na\tb\n\nc\td\n\n"
        "if x:\n    y\n\nend\n"
    )


@pytest.mark.parametrize("encoding", ["utf-8", "shift_jis", "euc-jp", "windows-1252", "utf-16"])
def test_html_is_decoded_as_it_declares(tmp_path: Path, encoding: str) -> None:
    words = "déjà vu" if encoding == "windows-1252" else "吾輩は猫である"
    page = f'<html><head><meta charset="{encoding}"></head><body><p>{words}</p></body></html>'
    assert read(tmp_path, page.encode(encoding), "page.htm").text == words + "\n"


@pytest.mark.parametrize("label", ["hex", "idna", "unicode_escape", "utf-16", "no-such"])
def test_a_senseless_declared_encoding_is_not_followed(tmp_path: Path, label: str) -> None:
    page = f'<html><meta charset="{label}"><p>Un café, là.</p></html>'
    document = read(tmp_path, page.encode("windows-1252"), "page.html")
    assert document.text == "Un café, là.\n"
    assert document.warnings


def test_html_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadDocument, match="holds no text"):
        read(tmp_path, b"<html><body><script>1</script></body></html>", "page.html")


def test_html_source_named_as_text_stays_source(tmp_path: Path) -> None:
    assert read(tmp_path, b"<html><p>x</p></html>", "page.txt").text == "<html><p>x</p></html>"


@pytest.mark.parametrize("unit", ["<div>", "<!--", "<a href='", "&amp;", "<p>word</p> ", "</b>", "<pre> "])
def test_hostile_html_takes_seconds(tmp_path: Path, unit: str) -> None:
    page = "<html><body>start " + unit * (1_000_000 // len(unit))
    assert read(tmp_path, page.encode(), "page.html").text.startswith("start")
