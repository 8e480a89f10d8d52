"""Saved caches: which prefixes are on disk, finding the longest, writing beside the engine, a quota."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import torch

from models.cache.duo import DuoCache
from models.cache.pool import BlockPool
from models.cache.snapshot import Snapshot, read_chain, read_footer, write_snapshot
from models.errors import BadSnapshot

log = logging.getLogger(__name__)

LEAST_TOKENS = 512  # a shorter stretch is read again sooner than its windows are written
WAITING = 2  # caches that wait to be written, beside the one that is
_SUFFIX = ".kv"
_DISK_LEFT = 1 << 30  # bytes of the disk that are left alone


@dataclass(eq=False)
class _Saved:
    path: Path
    snapshot: Snapshot
    used: float

    @property
    def bytes(self) -> int:
        return self.snapshot.bytes


@dataclass(frozen=True, eq=False)
class _Job:
    ids: np.ndarray
    cache: DuoCache
    labels: tuple[str, ...]
    ready: torch.cuda.Event | None


class SnapshotStore:
    """A tree of saved prefixes under one folder, shared by all models; `kind` says which of them a cache fits.

    A snapshot's key hashes its kind and every token before its end, so equal prompts meet in equal files. Reading is
    for the engine's thread; writing has a thread of its own; everything else may come from any thread.
    """

    def __init__(self, folder: Path, kind: str, quota: int) -> None:
        self.folder = folder
        self.kind = kind
        self.quota = quota
        self.pinned: Callable[[], frozenset[str]] = frozenset
        self.notes: deque[str] = deque(maxlen=20)
        self._saved: dict[str, _Saved] = {}
        self._jobs: deque[_Job] = deque()
        self._writing: _Job | None = None
        self._dropping = False
        self._closed = False
        self._changed = threading.Condition()
        folder.mkdir(parents=True, exist_ok=True)
        self._scan()
        self._thread = threading.Thread(target=self._work, name="octavo-snapshots", daemon=True)
        self._thread.start()

    def find(self, prompt: np.ndarray, beyond: int = 0) -> list[tuple[Path, Snapshot]]:
        """The chain of files to the longest saved prefix that leaves a token to read; [] when not past `beyond`."""
        best: list[_Saved] = []
        with self._changed:
            for chain in self._chains(prompt, len(prompt) - 1):
                if not best or chain[-1].snapshot.length > best[-1].snapshot.length:
                    best = chain
        if not best or best[-1].snapshot.length <= beyond:
            return []
        return [(saved.path, saved.snapshot) for saved in best]

    def length(self, ids: np.ndarray) -> int:
        """How many of `ids`, from the first on, are on disk."""
        with self._changed:
            return max((chain[-1].snapshot.length for chain in self._chains(ids, len(ids))), default=0)

    def read(
        self,
        chain: Sequence[tuple[Path, Snapshot]],
        pool: BlockPool,
        shared: Sequence[int],
        tell: Callable[[int], None],
    ) -> DuoCache | None:
        """The cache of a chain; None when a file of it is damaged, which is dropped with all that builds on it."""
        try:
            cache = read_chain(chain, pool, shared, tell)
        except BadSnapshot as error:
            self._note(f"A saved reading was damaged and is dropped: {error}")
            damaged = {snapshot.key for path, snapshot in chain if path.name in str(error)}
            self.drop(lambda snapshot: snapshot.key in damaged)
            return None
        now = time.time()
        with self._changed:
            for path, snapshot in chain:
                if saved := self._saved.get(snapshot.key):
                    saved.used = now
                    _touch(path, now)
        return cache

    def save(self, ids: np.ndarray, cache: DuoCache, labels: Sequence[str] = (), wait: bool = False) -> None:
        """Write `cache`, which holds exactly `ids`, as far as it is not on disk; takes the cache over.

        A newer one replaces waiting ones without labels. When too many wait this one is let go, unless `wait`.
        """
        ready = None
        if cache.pool.device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record()
        job = _Job(ids, cache, tuple(labels), ready)
        with self._changed:
            for old in [old for old in self._jobs if not old.labels]:
                self._jobs.remove(old)
                old.cache.release()
            while wait and len(self._jobs) >= WAITING and not self._closed:
                self._changed.wait()
            if len(self._jobs) >= WAITING or self._closed:
                cache.release()
                return
            self._jobs.append(job)
            self._changed.notify_all()

    def drop_jobs(self) -> bool:
        """Give up what is not written yet, so that its blocks are free; False when there is nothing."""
        with self._changed:
            jobs = list(self._jobs)
            self._jobs.clear()
            for job in jobs:
                job.cache.release()
            had = bool(jobs) or self._writing is not None
            self._dropping = self._writing is not None
            while self._writing is not None:
                self._changed.wait()
            self._dropping = False
            return had

    def flush(self, seconds: float | None = None) -> None:
        """Wait until everything is written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._jobs and self._writing is None, seconds)

    def close(self) -> None:
        """Write what waits, then end."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def drop(self, which: Callable[[Snapshot], bool]) -> None:
        """Delete snapshots and all that builds on them."""
        with self._changed:
            for key in [key for key, saved in self._saved.items() if which(saved.snapshot)]:
                self._delete(key)

    def bytes_of(self, label: str | None = None) -> int:
        """Bytes on disk of what carries a label, its ancestors included; of everything without one."""
        with self._changed:
            if label is None:
                return sum(saved.bytes for saved in self._saved.values())
            keys: set[str] = set()
            for saved in self._saved.values():
                if label in saved.snapshot.labels:
                    keys |= set(self._ancestry(saved.snapshot.key))
            return sum(self._saved[key].bytes for key in keys)

    def labels(self) -> frozenset[str]:
        """The labels of snapshots that fit this model."""
        with self._changed:
            own = [saved.snapshot for saved in self._saved.values() if saved.snapshot.kind == self.kind]
        return frozenset(label for snapshot in own for label in snapshot.labels)

    # ---- the tree

    def _scan(self) -> None:
        for path in self.folder.glob("*.part"):
            writer = path.name.split(".")[-2]
            if not writer.isdigit() or not psutil.pid_exists(int(writer)) or int(writer) == os.getpid():
                path.unlink(missing_ok=True)
        for path in self.folder.glob(f"*{_SUFFIX}"):
            try:
                snapshot = read_footer(path)
                if path.stem != snapshot.key:
                    raise BadSnapshot(f"{path.name} is the snapshot {snapshot.key}.")
            except BadSnapshot as error:
                self._note(f"A saved reading was damaged and is dropped: {error}")
                path.unlink(missing_ok=True)
                continue
            self._saved[snapshot.key] = _Saved(path, snapshot, path.stat().st_mtime)
        for key in [key for key, saved in self._saved.items() if saved.snapshot.parent not in self._saved]:
            if key in self._saved and self._saved[key].snapshot.parent:
                self._delete(key)

    def _children(self, key: str) -> list[_Saved]:
        found = [s for s in self._saved.values() if s.snapshot.parent == key and s.snapshot.kind == self.kind]
        return sorted(found, key=lambda saved: saved.snapshot.length)

    def _chains(self, prompt: np.ndarray, most: int) -> Iterator[list[_Saved]]:
        """Every chain of snapshots that is a prefix of the prompt, of at most `most` tokens."""
        waiting: list[list[_Saved]] = [[]]
        while waiting:
            chain = waiting.pop()
            parent, start = (chain[-1].snapshot.key, chain[-1].snapshot.length) if chain else ("", 0)
            digest, at = self._begin(parent), start
            for child in self._children(parent):
                length = child.snapshot.length
                if child.snapshot.start != start or length > most:
                    continue
                digest.update(_bytes(prompt[at:length]))
                at = length
                if digest.hexdigest() == child.snapshot.key:
                    waiting.append([*chain, child])
                    yield waiting[-1]

    def _begin(self, parent: str) -> hashlib.blake2b:
        return hashlib.blake2b(f"{self.kind}/{parent}/".encode(), digest_size=20)

    def _ancestry(self, key: str) -> list[str]:
        keys = []
        while key in self._saved:
            keys.append(key)
            key = self._saved[key].snapshot.parent
        return keys

    def _delete(self, key: str) -> None:
        for child in [k for k, saved in self._saved.items() if saved.snapshot.parent == key]:
            self._delete(child)
        if (saved := self._saved.pop(key, None)) is not None:
            saved.path.unlink(missing_ok=True)

    def _make_room(self, need: int, keep: set[str]) -> bool:
        """Delete what was not used for longest, ends of chains first; whether `need` bytes fit then."""
        pinned = self.pinned()
        with self._changed:
            while True:
                held = sum(saved.bytes for saved in self._saved.values())
                free = shutil.disk_usage(self.folder).free - _DISK_LEFT
                if held + need <= self.quota and need <= free:
                    return True
                parents = {saved.snapshot.parent for saved in self._saved.values()}
                ends = [
                    saved
                    for key, saved in self._saved.items()
                    if key not in parents and key not in keep and not pinned.intersection(saved.snapshot.labels)
                ]
                if not ends:
                    return False
                self._delete(min(ends, key=lambda saved: saved.used).snapshot.key)

    # ---- writing

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._jobs) or self._closed)
                if not self._jobs:
                    return
                job = self._writing = self._jobs.popleft()
                self._changed.notify_all()
            try:
                self._write(job)
            except Exception as error:  # a full or broken disk costs the saving, never the answer
                self._note(f"What was read could not be saved: {error}")
                log.debug("A snapshot could not be written.", exc_info=error)
            finally:
                job.cache.release()
                del job
                with self._changed:
                    self._writing = None
                    self._changed.notify_all()

    def _write(self, job: _Job) -> None:
        with self._changed:
            chain = max(self._chains(job.ids, len(job.ids)), key=lambda c: c[-1].snapshot.length, default=[])
        parent = chain[-1].snapshot if chain else None
        start = parent.length if parent else 0
        new = len(job.ids) - start
        if len(job.ids) < LEAST_TOKENS or new < (1 if job.labels else LEAST_TOKENS):
            return
        first, blocks = parent.last if parent else 0, len(job.cache.blocks)
        need = (blocks - first) * job.cache.pool.block_bytes + sum(tensor.nbytes for tensor in job.cache.exact())
        if not self._make_room(need, {saved.snapshot.key for saved in chain}):
            self._note(
                f"The library is full: {need / 1e9:.1f} GB more do not fit into {self.quota / 1e9:.1f} GB, or the disk "
                "is. Unpin a document, remove one, or raise --library-quota."
            )
            return
        digest = self._begin(parent.key if parent else "")
        digest.update(_bytes(job.ids[start:]))
        about = {
            "key": digest.hexdigest(),
            "parent": parent.key if parent else "",
            "kind": self.kind,
            "start": start,
            "first": first,
            "labels": job.labels,
        }
        path = self.folder / f"{about['key']}{_SUFFIX}"
        if job.ready is None:
            snapshot = write_snapshot(path, job.cache, about, self._go_on)
        else:  # a stream of its own: the engine's steps do not wait for these copies
            stream = torch.cuda.Stream(job.cache.pool.device)
            stream.wait_event(job.ready)
            with torch.cuda.stream(stream):
                snapshot = write_snapshot(path, job.cache, about, self._go_on)
        if snapshot is not None:
            with self._changed:
                self._saved[snapshot.key] = _Saved(path, snapshot, time.time())

    def _go_on(self) -> bool:
        return not self._dropping

    def _note(self, text: str) -> None:
        log.warning("%s", text)
        self.notes.append(text)


def _bytes(ids: np.ndarray) -> bytes:
    return ids.astype("<i4").tobytes()


def _touch(path: Path, now: float) -> None:
    try:
        os.utime(path, (now, now))
    except OSError:
        pass  # gone, or not ours: it only counts as older than it is
