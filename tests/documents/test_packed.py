"""Tar archives and packed files: read like a zip archive, within limits, and never beyond their own folder."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from app.documents import Document, Limits, codebase, read_document, read_safely
from app.errors import BadDocument, DocumentTooLarge
from tests.documents.build import archive

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".tar": bytes,
    ".tar.gz": gzip.compress,
    ".tgz": gzip.compress,
    ".tar.bz2": bz2.compress,
    ".tar.xz": lzma.compress,
}
FILES = {
    "shop/src/main.py": b"import tea\n\ntea.sell()\n",
    "shop/README.md": b"# Shop\n",
    "shop/a.png": b"\x89PNG\r\n\x1a\n",
}


def tar(files: dict[str, bytes], *odd: tarfile.TarInfo, form: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as file:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
        for info in odd:
            file.addfile(info)
    return out.getvalue()


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def read(tmp_path: Path, data: bytes, name: str = "shop.tar", limits: Limits | None = None) -> Document:
    path = tmp_path / "upload"
    path.write_bytes(data)
    return read_document(path, name, limits)


@pytest.mark.parametrize("suffix", PACKERS)
def test_a_packed_archive_reads_like_a_zip_of_the_same(tmp_path: Path, suffix: str) -> None:
    document = read(tmp_path, PACKERS[suffix](tar(FILES)), "shop" + suffix)
    assert read_safely(tmp_path / "upload", "shop" + suffix) == document
    zipped = read(tmp_path, archive(dict(FILES)), "shop" + suffix)
    assert (document.kind, document.text, document.files) == ("code", zipped.text, zipped.files)
    assert document.warnings == zipped.warnings == ("1 file skipped: 1 binary or not readable. No answer knows them.",)


def test_a_packed_text_is_that_text(tmp_path: Path) -> None:
    for pack, name in (
        (gzip.compress, "notes.txt.gz"),
        (bz2.compress, "notes.txt.bz2"),
        (lzma.compress, "notes.txt.xz"),
    ):
        document = read(tmp_path, pack("Über Reiher.\n".encode()), name)
        assert (document.kind, document.text, document.name) == ("text", "Über Reiher.\n", name)
    page = read(tmp_path, gzip.compress(b"<html><body><p>words</p></body></html>"), "page.html.gz")
    assert (page.kind, page.text) == ("html", "words\n")


def test_links_and_devices_are_left_out_with_a_count(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("private words")
    odd = (
        special("soft.txt", tarfile.SYMTYPE, str(secret)),
        special("hard.txt", tarfile.LNKTYPE, "shop/README.md"),
        special("up.txt", tarfile.LNKTYPE, "../../etc/passwd"),
        special("zero", tarfile.CHRTYPE),
        special("disk", tarfile.BLKTYPE),
        special("pipe", tarfile.FIFOTYPE),
    )
    document = read(tmp_path, tar(FILES, *odd))
    assert "private" not in document.text
    assert {file.path for file in document.files} == {"shop/src/main.py", "shop/README.md"}
    assert "6 links or devices" in document.warnings[0]
    assert [path.name for path in tmp_path.iterdir()].count("upload") == 1 and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("path", ["../up.txt", "a/../../up.txt", "/etc/up.txt", "..\\up.txt", "C:/up.txt"])
def test_paths_that_lead_out_are_refused(tmp_path: Path, path: str) -> None:
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        with pytest.raises(BadDocument, match="leads outside"):
            read(tmp_path, tar({path: b"evil", **FILES}, form=form))


@pytest.mark.parametrize("path", [".", "./", "\\", "\\.\\", "/", "//", "/./.", "\x01"])
@pytest.mark.parametrize("pack", [tar, archive])
def test_a_path_that_names_nothing_is_left_out(
    tmp_path: Path, pack: Callable[[dict[str, bytes]], bytes], path: str
) -> None:
    for content in (b"words", b""):
        document = read(tmp_path, pack({path: content, **FILES}))
        assert {file.path for file in document.files} == {"shop/src/main.py", "shop/README.md"}
        assert "words" not in document.text


def test_a_file_that_names_nothing_is_counted(tmp_path: Path) -> None:
    for data in (archive({"\\": b"words", **FILES}), tar({".": b"words", **FILES})):
        assert read(tmp_path, data).warnings[0].startswith("2 files skipped: 1 without a name, 1 binary")


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
@pytest.mark.parametrize("bomb", ["file", "tar", "header"])
def test_bombs_end_at_the_limit(tmp_path: Path, pack: Callable[[bytes], bytes], bomb: str) -> None:
    zeros = b"\0" * (64 << 20)
    if bomb == "header":  # an extended header of 64 MiB, which is read before any file
        head = special("././@LongLink", tarfile.GNUTYPE_LONGNAME)
        head.size = len(zeros)
        data = head.tobuf(tarfile.GNU_FORMAT) + zeros
    else:
        data = tar({"zeros.txt": zeros}) if bomb == "tar" else zeros
    packed = pack(data)
    del data, zeros
    assert len(packed) < 400_000
    path = tmp_path / "upload"
    path.write_bytes(packed)
    tracemalloc.start()
    with pytest.raises(DocumentTooLarge, match=r"unpacks to more than 4\.0 MiB"):
        read_document(path, "bomb.tar.gz", Limits(max_unpacked_bytes=4 << 20))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 << 20


def test_limits_of_count_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DocumentTooLarge, match="longer than 0 s"):
        read(tmp_path, tar(FILES), limits=Limits(max_seconds=0))
    monkeypatch.setattr(codebase, "MAX_ENTRIES", 5)
    with pytest.raises(DocumentTooLarge, match="more than 5 files"):
        read(tmp_path, tar({f"{n}.txt": b"x" for n in range(6)}))
    huge = special("sparse.txt", tarfile.REGTYPE)
    huge.size = 1 << 40  # it says so; nothing of it is there
    with pytest.raises(DocumentTooLarge, match="unpacks to more than"):
        read(tmp_path, huge.tobuf() + b"\0" * 1024)


def test_archives_in_archives_are_not_opened(tmp_path: Path) -> None:
    inner = gzip.compress(tar({"hidden.txt": b"hidden"}))
    document = read(tmp_path, tar({"a.txt": b"words", "inner.tgz": inner, "inner.tar": tar({"b.txt": b"hidden"})}))
    assert "hidden" not in document.text
    assert "2 binary or not readable" in document.warnings[0]
    with pytest.raises(BadDocument, match=r"^twice\.gz: twice is an archive inside another"):
        read(tmp_path, gzip.compress(inner), "twice.gz")
    with pytest.raises(BadDocument, match=r"^twice is an archive inside another"):
        read(tmp_path, gzip.compress(inner), "twice")
    with pytest.raises(BadDocument, match=r"^photo\.png\.gz: photo\.png is a PNG picture"):
        read(tmp_path, gzip.compress(b"\x89PNG\r\n\x1a\n"), "photo.png.gz")


@pytest.mark.parametrize("suffix", PACKERS)
def test_damaged_ones_are_refused_and_never_cut_in_silence(tmp_path: Path, suffix: str) -> None:
    files = {f"{n}.txt": bytes(f"File {n}. " * 200, "ascii") for n in range(30)}
    whole = PACKERS[suffix](tar(files))
    for size in range(300, len(whole), max(1, len(whole) // 40)):
        try:
            document = read(tmp_path, whole[:size], "cut" + suffix)
        except BadDocument:
            continue
        assert suffix == ".tar"  # packed ones have a checksum at their end
        told = any("cut short" in warning for warning in document.warnings)
        assert told or len(document.files) == len(files), size
    with pytest.raises(BadDocument, match="although its name ends in"):
        read(tmp_path, b"<html>Log in</html>", "page.tar")
