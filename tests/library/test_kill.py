"""What a kill leaves, and that the next start finds everything whole: real processes, really killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from app import scratch
from app.api.store import FileStore
from app.chat import Chat, Selection
from app.documents import read_document
from app.engine.snapshots import SnapshotStore
from app.library import Library
from models.cache.duo import DuoCache
from models.cache.pool import BlockPool
from models.cache.shape import CacheShape

ROOT = Path(__file__).parents[2]
STUCK = """
import sys, threading, time
from pathlib import Path
import models.files

def stuck(*_):  # everything is written, nothing has its name yet
    print("stuck", flush=True)
    threading.Event().wait()
"""


@contextmanager
def running(script: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process that has printed "stuck"; killed at the latest when the block ends."""
    body = textwrap.dedent(STUCK) + textwrap.dedent(script)
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    process = subprocess.Popen([sys.executable, "-c", body], stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "stuck"
        yield process
    finally:
        kill(process)


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


def parts(folder: Path) -> list[Path]:
    return list(folder.rglob("*.part"))


SNAPSHOT = """
from tests.library.test_kill import cache, SHAPE
from app.engine.snapshots import SnapshotStore
import numpy as np, torch
from models.cache.pool import BlockPool
store = SnapshotStore(Path(sys.argv[1] if len(sys.argv) > 1 else {folder!r}), "kind", 1 << 40)
pool = BlockPool(SHAPE, 40, torch.device("cpu"))
store.save(np.arange(1000), cache(pool, 1000), ("a",), wait=True)
store.flush()
models.files.os.fsync = stuck
store.save(np.arange(2000), cache(pool, 2000), ("b",), wait=True)
threading.Event().wait()
"""
SHAPE = CacheShape((1,), (1,), 1, 16, 4, 8, 4, torch.float16, torch.float32)


def cache(pool: BlockPool, length: int) -> DuoCache:
    made = DuoCache(pool)
    made.begin(length)
    made.attend(0, *torch.randn(3, length, 2, 16))
    made.commit()
    return made


def test_a_snapshot_is_whole_or_not_there(tmp_path: Path) -> None:
    with running(SNAPSHOT.format(folder=str(tmp_path))) as process:
        assert len(parts(tmp_path)) == 1
        beside = SnapshotStore(tmp_path, "kind", 1 << 40)  # another server, while the first one writes
        assert len(parts(tmp_path)) == 1
        assert beside.labels() == {"a"}
        beside.close()
        kill(process)
        again = SnapshotStore(tmp_path, "kind", 1 << 40)
    assert parts(tmp_path) == []
    assert [s.length for _, s in again.find(np.arange(3000))] == [1000]
    pool = BlockPool(SHAPE, 40, torch.device("cpu"))
    back = again.read(again.find(np.arange(3000)), pool, (), lambda tokens: None)
    assert back is not None and back.length == 1000
    again.close()


CHAT = """
from app.chat import Chat, Turn
from app.library import Library
chat = Chat(id="0" * 32)
chat.add(Turn("First?", (), tuple(range(700)), (1, 2), "One.", "stop"))
owner = Library(Path({folder!r})).owner("a secret")
owner.save_chat(chat)
chat.add(Turn("Second?", (), tuple(range(50)), (3,), "Two.", "stop"))
models.files.os.fsync = stuck
owner.save_chat(chat)
"""


def test_a_chat_is_as_it_was_saved_last(tmp_path: Path) -> None:
    with running(CHAT.format(folder=str(tmp_path))) as process:
        beside = Library(tmp_path)
        beside.tidy()
        assert len(parts(tmp_path)) == 1  # a living program's
        kill(process)
        library = Library(tmp_path)
        library.tidy()
    assert parts(tmp_path) == []
    owner = library.owner("a secret")
    back = owner.open_chat("0" * 32)
    assert back is not None
    assert [(t.question, t.answer, len(t.prompt_ids)) for t in back.turns] == [("First?", "One.", 700)]
    back.begin("Third?")
    owner.save_chat(back)  # ids that the killed one had written already do no harm
    again = Library(tmp_path).owner("a secret").open_chat("0" * 32)
    assert again is not None
    assert [len(turn.prompt_ids) for turn in again.path(again.head)] == [700, 0]


DOCUMENT = """
from app.documents import read_document
from app.library import Library
document = read_document(Path({path!r}))
models.files.os.fsync = stuck
Library(Path({folder!r})).owner("a secret").add(document, 3)
"""


def test_a_document_is_whole_or_not_there_and_unnamed_ones_go(tmp_path: Path) -> None:
    path, folder = tmp_path / "heron.txt", tmp_path / "library"
    path.write_text("The word is heron.")
    label = Selection.whole(read_document(path)).label
    with running(DOCUMENT.format(path=str(path), folder=str(folder))) as process:
        kill(process)
    library = Library(folder)
    library.tidy()
    assert parts(folder) == []
    assert library.owner("a secret").documents() == []
    assert library.documents.get(label) is None
    # Killed between the text and the list: it is old enough to be nobody's only later.
    library.documents.put(read_document(path))
    library.tidy()
    assert library.documents.has(label)
    stored = next((folder / "documents").glob("*.json"))
    os.utime(stored, (time.time() - 3600,) * 2)
    library.tidy()
    assert not library.documents.has(label)
    chat = Chat()
    chat.begin("What?", [Selection.whole(read_document(path))])
    library.owner("a secret").save_chat(chat)
    os.utime(next((folder / "documents").glob("*.json")), (time.time() - 3600,) * 2)
    library.tidy()
    assert library.documents.has(label)


FILE = """
from app.api.store import FileStore
store = FileStore(Path({folder!r}))
store.add(Path({path!r}), "a.txt", "user_data", "ann")
calls = []
def second(*_):
    calls.append(1)
    if len(calls) == {at}:
        stuck()
models.files.os.fsync = second
store.add(Path({path!r}), "b.txt", "user_data", "ann")
"""


@pytest.mark.parametrize("at", [1, 2])
def test_a_stored_file_is_whole_or_not_there(tmp_path: Path, at: int) -> None:
    path, folder = tmp_path / "a.txt", tmp_path / "files"
    path.write_text("words")
    with running(FILE.format(path=str(path), folder=str(folder), at=at)) as process:
        kill(process)
    store = FileStore(folder)
    store.tidy(time.time())
    assert [file.filename for file in store.files("ann")] == ["a.txt"]
    assert sorted(path.suffix for path in folder.iterdir()) == [".bin", ".json"]
    assert store.document(store.files("ann")[0].id, "ann").text == "words"


SERVER = """
import uvicorn
from app.config import Settings
from app.errors import UsageError
from app.local import LocalService
from app.ui.server import bind, create_app

def no_model(settings, progress):
    raise UsageError("no model here")

settings = Settings(cache_dir=Path({folder!r}))
app = create_app(LocalService(settings, no_model), settings)
sock = bind("127.0.0.1", 0)
Path({folder!r}, "port").write_text(str(sock.getsockname()[1]))
print("stuck", flush=True)
uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[sock])
"""


def _upload_half(port: int) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port))
    head = f"PUT /uploads HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nX-File-Name: a.txt\r\nContent-Length: 2000000\r\n\r\n"
    client.sendall(head.encode() + b"x" * 1_000_000)
    return client


def test_an_upload_of_a_killed_server_goes_and_a_living_servers_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))

    def received() -> list[Path]:
        return [path for path in temporary.rglob("*") if path.is_file() and path.stat().st_size > 0]

    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    script = [SERVER.format(folder=str(folder)) for folder in folders]
    with running(script[0], TMPDIR=str(temporary)) as one, running(script[1], TMPDIR=str(temporary)):
        clients = [_upload_half(int((folder / "port").read_text())) for folder in folders]
        while len(received()) < 2:
            time.sleep(0.02)
        scratch.sweep()
        assert len(received()) == 2  # both live
        kill(one)
        stranger, young = temporary / "octavo-stranger", temporary / "octavo-young"
        for made in (stranger, young):  # not ours to judge: without a mark, or made just now
            made.mkdir()
        (temporary / "octavo-link").symlink_to(tmp_path)
        scratch.sweep()
        assert len(received()) == 1
        assert stranger.exists() and young.exists() and folders[0].exists()
        os.utime(stranger, (time.time() - 90_000,) * 2)
        scratch.sweep()
        assert not stranger.exists() and young.exists()
        for client in clients:
            client.close()
    scratch.sweep()
    assert received() == []


def test_what_is_told_of_an_answer_that_was_killed(tmp_path: Path) -> None:
    script = """
    from app.chat import Chat
    from app.library import Library
    chat = Chat(id="1" * 32)
    chat.begin("Still there?")
    Library(Path({folder!r})).owner("a secret").save_chat(chat)
    stuck()
    """
    with running(textwrap.dedent(script).format(folder=str(tmp_path))) as process:
        kill(process)
    back = Library(tmp_path).owner("a secret").open_chat("1" * 32)
    assert back is not None
    assert [(turn.question, turn.finish_reason) for turn in back.path(back.head)] == [("Still there?", "interrupted")]
    file = next((tmp_path / "owners").rglob("*.json"))
    assert json.loads(file.read_text())["turns"][0]["finish_reason"] == "running"
