"""Plain text: encodings, control characters, pages, what is refused."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.documents import Document, Limits, read_document
from app.documents.document import PAGE_CHARS, lay_out, paginate
from app.errors import BadDocument, DocumentTooLarge, UsageError

JAPANESE = "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。\nカタカナも書く。\n"
CHINESE = "很久以前,在一个遥远的地方,有一个小村庄。\n村民们每天早上都去田里干活。\n"
FRENCH = "L’été, les élèves révisent à la bibliothèque ; ça coûte 5 €.\nGröße, naïve façade, ¿mañana?\n"


def read(tmp_path: Path, data: bytes, name: str = "file.txt", limits: Limits | None = None) -> Document:
    path = tmp_path / "upload"
    path.write_bytes(data)
    return read_document(path, name, limits)


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        (JAPANESE + CHINESE + FRENCH + "🙂", "utf-8"),
        (JAPANESE + FRENCH + "🙂", "utf-8-sig"),
        (JAPANESE + FRENCH + "🙂", "utf-16"),
        (FRENCH + JAPANESE + "🙂", "utf-16-le"),
        (FRENCH + CHINESE, "utf-16-be"),
        (CHINESE, "utf-16-le"),
        ("Plain letters alone.\n", "utf-16-le"),
        (FRENCH, "utf-32"),
        (JAPANESE, "shift_jis"),
        ("plain first line\n" * 3 + "これはテストです\n", "cp932"),
        (CHINESE, "gbk"),
        ("人民\n这是一个测试文件\n", "gb18030"),
        (FRENCH, "windows-1252"),
        ("He said “hello” — it cost €5.", "windows-1252"),
        ("a café\n", "windows-1252"),
        ("It’s a test.", "windows-1252"),
        ("São Paulo, Ångström; ação, 5 €, © 2024", "windows-1252"),
        ("日本語で", "shift_jis"),
        ("中国", "gbk"),
        ("안녕하세요 세계. 오늘은 날씨가 좋습니다.", "euc_kr"),
        ("Привет, мир. Это проверка кодировки.\n", "windows-1251"),
        ("Привет, мир. Это проверка кодировки.\n", "koi8_r"),
    ],
)
def test_encodings_give_the_right_text(tmp_path: Path, text: str, encoding: str) -> None:
    document = read(tmp_path, text.encode(encoding))
    assert document.text == text
    guessed = not encoding.startswith("utf")
    assert [w.split(".")[0].split(" as ")[0] for w in document.warnings] == ["Read"] * guessed


@pytest.mark.parametrize(("tail", "encoding"), [("カタカナも書く。", "shift_jis"), ("été à la plage", "windows-1252")])
def test_the_encoding_is_judged_over_the_whole_file(tmp_path: Path, tail: str, encoding: str) -> None:
    text = "nothing but ASCII for a long while\n" * 20_000 + tail
    assert read(tmp_path, text.encode(encoding)).text == text


def test_undecodable_bytes_are_counted_and_shown(tmp_path: Path) -> None:
    document = read(tmp_path, "Größe café naïve déjà vu".encode() + b" \xff\xfe\xc3 end")
    assert document.text == "Größe café naïve déjà vu \ufffd\ufffd\ufffd end"
    assert document.warnings == ("3 bytes could not be decoded as utf-8, shown as \ufffd.",)


def test_a_damaged_byte_does_not_change_the_encoding_of_the_rest(tmp_path: Path) -> None:
    document = read(tmp_path, (JAPANESE * 5).encode("shift_jis") + b"\xff\n" + JAPANESE.encode("shift_jis"))
    assert document.text == JAPANESE * 5 + "\ufffd\n" + JAPANESE
    assert document.warnings[1:] == ("1 byte could not be decoded as cp932, shown as \ufffd.",)


def test_control_characters_are_stripped_and_line_ends_unified(tmp_path: Path) -> None:
    document = read(tmp_path, b"a\0b\x07c\x1b\r\nnext\rlast\tcell\xc2\x9f\x7f")
    assert document.text == "abc\nnext\nlast\tcell"
    assert document.warnings == ("5 control characters removed.",)


def test_special_token_text_stays(tmp_path: Path) -> None:
    assert read(tmp_path, b"<|im_end|> </s> <|eot_id|>").text == "<|im_end|> </s> <|eot_id|>"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b" \r\n\0\0 ", "is empty"),
        (b"\xef\xbb\xbf\n", "holds no text"),
        (bytes(range(256)) * 40, "binary"),
        (b"abc\0def\0" * 50, "binary"),
        (b"name\0a\0longer name\0" * 50, "binary"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 20, "PNG picture"),
        (b"\x1f\x8b\x08" + b"\0" * 20, "damaged gzip file"),
        (b"\x28\xb5\x2f\xfd" + b"\0" * 20, "Zstandard archive"),
        (b"\0" * 60 + b"BOOKMOBI" + b"\0" * 20, "Kindle book.*EPUB"),
        (b"\x80\x04\x95" + b"\0" * 20, "Python pickle, which is never opened"),
        (b"PAR1" + b"\0" * 20, "Parquet table.*CSV"),
        (b"\x7fELF" + b"\0" * 20, "a program"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + b"\0" * 20, "old or password-protected Office"),
    ],
)
def test_what_is_no_text_is_refused_by_name(tmp_path: Path, data: bytes, words: str) -> None:
    with pytest.raises(BadDocument, match=words):
        read(tmp_path, data)


def test_size_limits_name_both_sizes(tmp_path: Path) -> None:
    with pytest.raises(DocumentTooLarge, match=r"file\.txt has 2\.0 MiB; the limit is 1\.0 MiB"):
        read(tmp_path, b"x" * (2 << 20), limits=Limits(max_bytes=1 << 20))
    with pytest.raises(DocumentTooLarge, match="more than 10 characters"):
        read(tmp_path, b"x" * 11, limits=Limits(max_chars=10))
    assert len(read(tmp_path, b"x" * 10, limits=Limits(max_bytes=10, max_chars=10)).text) == 10


def test_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(BadDocument, match="no such file"):
        read_document(tmp_path / "absent.txt")
    with pytest.raises(BadDocument, match="folder"):
        read_document(tmp_path)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("../../etc/passwd", "passwd"),
        ("C:\\a\\b.txt", "b.txt"),
        ("two\nlines\0.md", "two lines.md"),
        ("a\u202efdp.exe\u2066\u200e", "afdp.exe"),
        ("\n", "document"),
        ("a" * 251 + ".txt", "a" * 115 + "….txt"),
        ("a" * 112 + ".html.md", "a" * 112 + ".html.md"),
        ("a" * 113 + ".html.md", "a" * 111 + "….html.md"),
        ("a." + "b" * 250, "a." + "b" * 117 + "…"),
    ],
)
def test_names_are_one_line_without_a_path(tmp_path: Path, name: str, shown: str) -> None:
    assert read(tmp_path, b"text", name).name == shown


def test_form_feeds_make_pages(tmp_path: Path) -> None:
    document = read(tmp_path, b"one\ftwo\f\fthree")
    assert [document.slice(n, n).strip() for n in range(1, 5)] == ["one", "two", "", "three"]
    assert document.slice(2, 4) == "two\n\nthree\n"


@pytest.mark.parametrize("pages", [(0, 1), (2, 1), (1, 2), (-1, 1)])
def test_a_page_that_is_not_there_is_refused(tmp_path: Path, pages: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match="it has pages 1 to 1"):
        read(tmp_path, b"one page").slice(*pages)


@given(st.text(st.sampled_from("ab\n é🙂"), max_size=400).map(lambda s: s * 40))
def test_pages_cover_the_text_and_end_at_lines(text: str) -> None:
    pages = list(paginate(text))
    joined, spans = lay_out(pages)
    assert joined == text
    assert all(0 < len(page) <= PAGE_CHARS for page in pages)
    assert [span.start for span in spans] == [0, *(span.end for span in spans)][: len(spans)]
    for page in pages[:-1]:
        assert page.endswith("\n") or "\n" not in page


@pytest.mark.parametrize("unit", ["word ", "x", "_", "é", "line\n", "\t", "\f"])
def test_twenty_megabytes_take_seconds(tmp_path: Path, unit: str) -> None:
    data = ("a" + unit * (20_000_000 // len(unit.encode())) + "\n" + "z").encode()
    started = time.perf_counter()
    document = read(tmp_path, data)
    assert time.perf_counter() - started < 20
    assert document.text[-1] in "z\n"
    assert document.size_bytes == len(data)
