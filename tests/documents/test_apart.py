"""Reading in a process of its own: the same document, and every way in which it can go wrong."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from app.documents import Document, Limits, apart, read_document, read_safely
from app.errors import BadDocument, DocumentTooLarge
from tests.documents.build import archive, pdf


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (pdf("Page one.", "", "Ünïcödé ©"), "a.pdf"),
        (archive({"x/a.py": "print('🙂')\n", "b.lock": "x", "c.txt": "\x00nul"}), "b.zip"),
        (b"<html><body><p>words \xf0\x9f\x99\x82</p></body></html>", "c.html"),
        (b"plain \xe9t\xe9", "d.txt"),
    ],
)
def test_the_document_is_the_same(tmp_path: Path, data: bytes, name: str) -> None:
    path = tmp_path / "upload"
    path.write_bytes(data)
    assert read_safely(path, name) == read_document(path, name)


PAGE = b"<html><body><p>words</p></body></html>"
CELLS = b'{"cells": [{"cell_type": "markdown", "source": "words"}], "nbformat": 4, "metadata": {}}'


@pytest.mark.parametrize("read", [read_document, read_safely])
@pytest.mark.parametrize(
    ("data", "suffix", "kind"),
    [
        (PAGE, ".html", "html"),
        (CELLS, ".ipynb", "notebook"),
        (gzip.compress(PAGE), ".html.gz", "html"),
        (pdf("words"), ".pdf", "pdf"),
    ],
    ids=["html", "ipynb", "html.gz", "pdf"],
)
def test_a_long_name_is_shown_shorter_and_read_as_what_it_is(
    tmp_path: Path, read: Callable[[Path, str], Document], data: bytes, suffix: str, kind: str
) -> None:
    path = tmp_path / "upload"
    path.write_bytes(data)
    long, short = read(path, "A long title " * 15 + suffix), read(path, "short" + suffix)
    assert (long.kind, long.text) == (short.kind, short.text)
    assert long.kind == kind
    assert len(long.name) <= 120 and long.name.endswith("…" + suffix)


def test_a_long_path_in_an_archive_is_shown_shorter_and_read_as_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "upload"
    path.write_bytes(archive({f"{'deep/' * 70}page.html": PAGE, f"{'deep/' * 70}a.py": "a = 1\n"}))
    document = read_document(path, "a.zip")
    assert "words" in document.text and "<p>" not in document.text
    assert [Path(file.path).suffix for file in document.files] == [".py", ".html"]
    assert all(len(file.path) <= 300 for file in document.files)


def test_a_folder_is_read_apart(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("words")
    assert read_safely(tmp_path) == read_document(tmp_path)


def test_a_few_are_read_at_once_and_the_others_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running, most, lock = 0, 0, threading.Lock()

    def run(*args: object, **options: object) -> subprocess.CompletedProcess[bytes]:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.05)
        with lock:
            running -= 1
        return subprocess.CompletedProcess([], 1, b"", b"")

    def refused(path: Path) -> bool:
        with pytest.raises(BadDocument, match="its reader broke"):
            read_safely(path)
        return True

    monkeypatch.setattr(subprocess, "run", run)
    path = tmp_path / "a.html"
    path.write_text("<html>words</html>")
    with ThreadPoolExecutor(12) as pool:
        assert all(pool.map(refused, [path] * 12))
    assert most == 4


def test_refusals_come_back_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "upload"
    path.write_bytes(pdf("", ""))
    with pytest.raises(BadDocument, match=r"a\.pdf has 2 pages and no text"):
        read_safely(path, "../a.pdf")
    path.write_bytes(pdf("many words " * 99))
    with pytest.raises(DocumentTooLarge, match="more than 10 characters"):
        read_safely(path, "a.pdf", Limits(max_chars=10))
    with pytest.raises(BadDocument, match="no such file"):
        read_safely(tmp_path / "gone.pdf")
    with pytest.raises(BadDocument, match="no such file"):
        read_safely(tmp_path / ("long" * 100))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.txt"
    os.mkfifo(pipe)
    code = "import sys; from pathlib import Path; from app.documents import read_safely; read_safely(Path(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(pipe)]  # apart: it can be ended where it waits
    done = subprocess.run(command, cwd=apart._ROOT, capture_output=True, text=True, timeout=30, check=False)
    assert "is no regular file" in done.stderr


def _reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> Path:
    """Puts a reader that misbehaves in place of the real one, in the other process."""
    root = tmp_path / "root"
    (root / "app" / "documents").mkdir(parents=True)
    (root / "app" / "documents" / "apart.py").write_text(body)
    monkeypatch.setattr(apart, "_ROOT", root)
    path = tmp_path / "a.pdf"
    path.write_bytes(pdf("words"))
    return path


def test_a_reader_that_crashes_harms_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _reader(tmp_path, monkeypatch, "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    with pytest.raises(BadDocument, match=r"a\.pdf cannot be read: its reader broke on it \(code -11\)"):
        read_safely(path)


def test_a_reader_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _reader(tmp_path, monkeypatch, "import time; time.sleep(600)")
    monkeypatch.setattr(apart, "_GRACE_S", 0.5)
    before = time.monotonic()
    with pytest.raises(DocumentTooLarge, match="takes longer than 1 s"):
        read_safely(path, limits=Limits(max_seconds=1))
    assert time.monotonic() - before < 10


def test_a_reader_has_no_more_memory_than_allowed() -> None:
    body = "from app.documents import apart, Limits\napart._bound(Limits())\nbytearray(%s << 30)\nprint('had it')"
    for size, has_it in (("1", True), ("9", False)):
        command = [sys.executable, "-c", body % size]
        done = subprocess.run(command, capture_output=True, text=True, cwd=apart._ROOT, check=False)
        assert ("had it" in done.stdout) == has_it, done.stderr
        assert ("MemoryError" in done.stderr) != has_it


def test_odd_pdfs_are_refused_or_read_in_time(tmp_path: Path) -> None:
    good = pdf("words on a page", "and another")
    for number, data in enumerate(
        (
            good[: len(good) // 2],
            good.replace(b"/Count 2", b"/Count 999999999"),
            good.replace(b"/Kids [4 0 R 6 0 R]", b"/Kids [2 0 R 2 0 R]"),  # pages that hold themselves
            good.replace(b"/Parent 2 0 R", b"/Parent 4 0 R"),
            good.replace(b"startxref\n", b"startxref\n99999999"),
            b"%PDF-1.7\n" + b"<<" * 100_000,
            b"%PDF-1.7\n1 0 obj\n" + b"[" * 500_000,
        )
    ):
        path = tmp_path / f"{number}.pdf"
        path.write_bytes(data)
        before = time.monotonic()
        try:
            read_safely(path, limits=Limits(max_seconds=20))
        except BadDocument:
            pass
        assert time.monotonic() - before < 30, number
