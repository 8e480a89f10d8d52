"""What cannot be unpacked is told with the file's name and the member's, whichever reader asked for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.documents import read_document
from app.documents.archive import Locked
from app.errors import BadDocument
from tests.documents.build import archive

CONTAINER = '<container><rootfile full-path="c.opf"/></container>'
FILES = {
    "word/document.xml": {"word/document.xml": "<w/>"},
    "META-INF/container.xml": {"META-INF/container.xml": CONTAINER},
    "mimetype": {"mimetype": "application/vnd.oasis.opendocument.text", "content.xml": "<x/>"},
    "a.txt": {"a.txt": "words"},
}


def _marked(data: bytes, local: int, central: int, bits: int) -> bytes:
    """The archive with a byte of its first member's two headers changed."""
    out = bytearray(data)
    for mark, offset in ((b"PK\x03\x04", local), (b"PK\x01\x02", central)):
        out[out.index(mark) + offset] ^= bits
    return bytes(out)


@pytest.mark.parametrize("member", FILES)
@pytest.mark.parametrize(
    ("local", "central", "told"),
    [(6, 8, "is locked. Pack or save it again without a password"), (8, 10, "packed by a method not read here")],
    ids=["password", "deflate64"],
)
def test_a_locked_member_is_told_by_name(tmp_path: Path, member: str, local: int, central: int, told: str) -> None:
    path = tmp_path / "a.zip"
    path.write_bytes(_marked(archive(FILES[member]), local, central, 1))
    with pytest.raises(Locked, match=f"^a.zip: {member} .*{told}"):
        read_document(path)


@pytest.mark.parametrize("member", [member for member in FILES if member != "a.txt"])
def test_a_damaged_member_is_told_by_name(tmp_path: Path, member: str) -> None:
    path = tmp_path / "a.zip"
    path.write_bytes(_marked(archive(FILES[member]), 14, 16, 0xFF))  # a byte of the checksum
    with pytest.raises(BadDocument, match=f"^a.zip is a damaged [^:]*: {member}: Bad CRC-32"):
        read_document(path)


def test_a_locked_document_inside_costs_itself_alone(tmp_path: Path) -> None:
    (tmp_path / "locked.docx").write_bytes(_marked(archive(FILES["word/document.xml"]), 6, 8, 1))
    (tmp_path / "good.txt").write_text("All is well.")
    document = read_document(tmp_path)
    assert [file.path for file in document.files] == ["good.txt"]
    assert "1 binary or not readable" in document.warnings[0]


def _central(data: bytes, offset: int, value: bytes, first: bool = True) -> bytes:
    """The archive with bytes changed in the first, or every, entry of its central directory."""
    out, at = bytearray(data), data.index(b"PK\x01\x02")
    while at >= 0:
        out[at + offset : at + offset + len(value)] = value
        at = -1 if first else data.find(b"PK\x01\x02", at + 1)
    return bytes(out)


@pytest.mark.parametrize(
    ("offset", "value"), [(0, b"XX"), (28, b"\xff\xff"), (46, b"\xff")], ids=["mark", "length", "name"]
)
def test_a_wrong_central_directory_is_told_as_that(tmp_path: Path, offset: int, value: bytes) -> None:
    path = tmp_path / "a.zip"
    path.write_bytes(_central(archive({"\u00e9.txt": "words", "b.txt": "more"}), offset, value))
    with pytest.raises(BadDocument, match=r"^a.zip is a damaged ZIP .*: its list of members cannot be read \("):
        read_document(path)


@pytest.mark.parametrize(
    ("offset", "value"), [(42, b"\x07"), (16, b"\0\0\0\0"), (46, b"x")], ids=["place", "checksum", "name"]
)
def test_members_that_are_not_where_the_directory_says_are_damaged_not_binary(
    tmp_path: Path, offset: int, value: bytes
) -> None:
    path, files = tmp_path / "a.zip", {"a.txt": "words", "b.txt": "more"}
    path.write_bytes(_central(archive(files), offset, value))
    document = read_document(path)
    assert [file.path for file in document.files] == ["b.txt"]
    assert document.warnings == ("1 file skipped: 1 damaged in the archive. No answer knows them.",)
    path.write_bytes(_central(archive(files), offset, value, first=False))
    with pytest.raises(BadDocument, match="^a.zip holds no text: 2 damaged in the archive."):
        read_document(path)
