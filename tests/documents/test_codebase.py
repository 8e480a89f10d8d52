"""Folders and zip archives as one document: the tree, what is skipped, and where each line stands."""

from __future__ import annotations

import io
import os
import stat
import zipfile
from pathlib import Path

import pytest

from app.cli_ask import open_source
from app.config import Settings
from app.documents import Document, Limits, codebase, read_document
from app.errors import BadDocument, DocumentTooLarge
from app.local import LocalService
from tests.documents.build import archive, docx_xml, pdf

FILES: dict[str, str | bytes] = {
    "shop/README.md": "# Shop\n\nSells tea.\n",
    "shop/src/main.py": "import tea\n\n\ndef main():\n    tea.sell()\n",
    "shop/src/deep/er/tea.py": "PRICE = 3\n" + "# filler\n" * 900 + "SECRET = 'oolong'\n",
    "shop/src/empty.py": "",
    "shop/logo.png": b"\x89PNG\r\n\x1a\n" + b"\0" * 50,
    "shop/data.bin": bytes(range(256)) * 8,
    "shop/package-lock.json": "{}",
    "shop/poetry.lock": "x = 1",
    "shop/node_modules/left-pad/index.js": "module.exports = 1",
    "shop/.git/config": "[core]",
    "shop/app.min.js": "var a=1",
    "shop/inner.zip": archive({"a.txt": "hidden"}),
}


def read(tmp_path: Path, data: bytes, name: str = "shop.zip", limits: Limits | None = None) -> Document:
    path = tmp_path / "upload"
    path.write_bytes(data)
    return read_document(path, name, limits)


def unpacked(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        path = tmp_path / "disk" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return tmp_path / "disk" / "shop"


def check(document: Document, under: str) -> None:
    tree = document.slice(1, 1)
    for line in ("README.md", "src/", "  deep/", "    er/", "      tea.py", "  empty.py", "  main.py"):
        assert any(shown.strip() == line.strip() for shown in tree.splitlines()), line
    assert tree.count("src/\n") == 1  # each folder once
    for absent in ("png", "lock", "left-pad", ".git", "min.js", "hidden"):
        assert absent not in document.text
    names = [f"{under}README.md", f"{under}src/deep/er/tea.py", f"{under}src/main.py"]
    assert sorted(file.path for file in document.files) == sorted(names)
    for file in document.files:
        content = FILES["shop/" + file.path.removeprefix(under)]
        assert document.text[file.start : file.end].rstrip("\n") == str(content).rstrip("\n")
        assert document.text[: file.start].endswith(f"=== {file.path} ===\n\n")
    place = document.place(document.text.index("SECRET"))
    assert (place.file, place.line) == (f"{under}src/deep/er/tea.py", 902)
    assert "SECRET" in document.slice(place.page, place.page)
    place = document.place(document.text.index("tea.sell"))
    assert (place.file, place.line) == (f"{under}src/main.py", 5)
    assert document.place(0).file == document.name
    assert [page.start for page in document.pages[1:]] == [page.end for page in document.pages[:-1]]


def test_an_archive_is_a_tree_and_its_texts(tmp_path: Path) -> None:
    document = read(tmp_path, archive(FILES))
    assert document.kind == "code"
    check(document, "shop/")
    (warning,) = document.warnings
    assert warning.startswith("8 files skipped: ")
    for why in ("3 binary or not readable", "2 lock files", "2 in folders of tools", "1 generated"):
        assert why in warning


def test_a_folder_reads_like_its_archive(tmp_path: Path) -> None:
    document = read_document(unpacked(tmp_path))
    assert (document.name, document.kind) == ("shop", "code")
    check(document, "")
    assert document.warnings == read(tmp_path, archive(FILES)).warnings


def test_the_command_line_reads_a_folder(tmp_path: Path) -> None:
    source = open_source(LocalService(Settings()), str(unpacked(tmp_path)))
    check(source.document, "")


def test_links_in_folders_and_archives_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("private words")
    folder = unpacked(tmp_path)
    os.symlink(tmp_path / "secret.txt", folder / "link.txt")
    os.symlink(tmp_path, folder / "up")
    assert "private" not in read_document(folder).text
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        link = zipfile.ZipInfo("link.txt")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        file.writestr(link, "../../etc/passwd")
        file.writestr("a.txt", "words")
    document = read(tmp_path, out.getvalue())
    assert [file.path for file in document.files] == ["a.txt"]


def test_documents_in_an_archive_are_read_as_documents(tmp_path: Path) -> None:
    paper = docx_xml("<w:p><w:r><w:t>Words of Word.</w:t></w:r></w:p>")
    latin = "caf\xe9, na\xefve, cr\xe8me br\xfbl\xe9e, d\xe9j\xe0 vu".encode("cp1252")
    document = read(tmp_path, archive({"a.pdf": pdf("One.", "Two."), "b.docx": paper, "c.txt": latin}))
    assert [file.path for file in document.files] == ["a.pdf", "b.docx", "c.txt"]
    for words in ("One.", "Two.", "Words of Word.", "crème brûlée"):
        assert words in document.text
    assert any(warning.startswith("c.txt: Read as cp1252") for warning in document.warnings)


@pytest.mark.parametrize("packed", [True, False], ids=["archive", "folder"])
def test_what_is_named_as_a_binary_is_not_read_as_text(tmp_path: Path, packed: bool) -> None:
    binaries = ("a.png", "B.JPEG", "c.mp3", "d.mp4", "e.woff2", "f.exe", "lib/g.so", "h.safetensors", "i.gguf", "j.bin")
    texts = {"k.svg": "<svg>drawn</svg>", "l.ts": "const drawn = 1", "png": "drawn", ".png.txt": "drawn"}
    members: dict[str, str | bytes] = dict.fromkeys(binaries, "no picture") | texts  # type: ignore[assignment]
    if packed:
        document = read(tmp_path, archive(members))
    else:
        for name, content in members.items():
            (path := tmp_path / "folder" / name).parent.mkdir(parents=True, exist_ok=True)
            path.write_text(str(content))
        document = read_document(tmp_path / "folder")
    assert {file.path for file in document.files} == set(texts)
    assert "picture" not in document.text
    assert document.warnings[0].startswith("10 files skipped: 10 binary or not readable.")


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"a.png": b"\x89PNG\r\n\x1a\n" + b"\0" * 9}, "holds no text: 1 binary"),
        ({"a/": b""}, "it is empty"),
        ({"x.lock": "a", "node_modules/a.js": "b"}, "holds no text: 1 in folders of tools, 1 lock files"),
        ({"../up.txt": "x"}, "leads outside"),
        ({"/root.txt": "x"}, "leads outside"),
        ({"a\\..\\..\\up.txt": "x"}, "leads outside"),
    ],
)
def test_archives_without_use_say_why(tmp_path: Path, members: dict[str, str | bytes], words: str) -> None:
    with pytest.raises(BadDocument, match=words):
        read(tmp_path, archive(members))


def test_archives_have_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DocumentTooLarge, match=r"unpacks to 64\.0 MiB; the limit is 4\.0 MiB"):
        read(tmp_path, archive({"zeros.txt": b"0" * (64 << 20)}), limits=Limits(max_unpacked_bytes=4 << 20))
    with pytest.raises(DocumentTooLarge, match="characters"):
        read(tmp_path, archive({f"{n}.txt": "word " * 100 for n in range(9)}), limits=Limits(max_chars=1000))
    with pytest.raises(DocumentTooLarge, match="longer than 0 s"):
        read(tmp_path, archive({"a.txt": "x"}), limits=Limits(max_seconds=0))
    monkeypatch.setattr(codebase, "MAX_ENTRIES", 5)
    with pytest.raises(DocumentTooLarge, match="holds 6 files; 5 are the most"):
        read(tmp_path, archive({f"{n}.txt": "x" for n in range(6)}))
    folder = tmp_path / "many"
    folder.mkdir()
    for n in range(6):
        (folder / f"{n}.txt").write_text("x")
    with pytest.raises(DocumentTooLarge, match="more than 5 files"):
        read_document(folder)


def test_a_member_that_lies_about_its_size_is_not_believed(tmp_path: Path) -> None:
    data = bytearray(archive({"a.txt": b"A" * 100_000, "b.txt": "good"}))
    for at in range(len(data) - 4):  # both headers of a.txt say 10 bytes
        if data[at : at + 4] == (100_000).to_bytes(4, "little"):
            data[at : at + 4] = (10).to_bytes(4, "little")
    document = read(tmp_path, bytes(data))
    assert [file.path for file in document.files] == ["b.txt"]
    assert "1 damaged in the archive" in document.warnings[0]


def test_a_locked_archive_is_refused(tmp_path: Path) -> None:
    data = bytearray(archive({"a.txt": "secret"}))
    for mark, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(mark) + offset] |= 1
    with pytest.raises(BadDocument, match="without a password"):
        read(tmp_path, bytes(data))
