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
