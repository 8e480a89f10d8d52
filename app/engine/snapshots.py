"""Saved caches: opened from disk, written beside the engine, deleted with what they were read of."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from app.engine.snapshot_tree import SnapshotTree, key_after
from app.words import size
from models.cache.duo import DuoCache
from models.cache.pool import BlockPool
from models.cache.snapshot import Snapshot, add_labels, read_chain, write_snapshot
from models.errors import BadSnapshot
from models.files import sweep

log = logging.getLogger(__name__)

LEAST_TOKENS = 512  # a shorter stretch is read again sooner than its windows are written
WAITING = 2  # caches that wait to be written, beside the one that is
_PATIENCE_S = 30.0  # for a file that is written while it is to be deleted


@dataclass(frozen=True, eq=False)
class _Job:
    ids: np.ndarray
    cache: DuoCache
    labels: tuple[str, ...]
    holds: tuple[str, ...]
    ready: torch.cuda.Event | None


class SnapshotStore:
    """A tree of saved prefixes under one folder, shared by all models; `kind` says which of them a cache fits.

    Reading is for the engine's thread; writing has a thread of its own; everything else may come from any thread.
    """

    def __init__(self, folder: Path, kind: str, quota: int) -> None:
        self.kind = kind
        self.quota = quota
        self.pinned: Callable[[], frozenset[str]] = frozenset
        self.notes: deque[str] = deque(maxlen=20)
        self._jobs: deque[_Job] = deque()
        self._writing: _Job | None = None
        self._dropping = False
        self._closed = False
        self._forgotten: set[str] = set()  # labels; requests that hold these documents may still run
        self._changed = threading.Condition()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        sweep(folder)
        self._tree = SnapshotTree(folder, self._note)
        self._thread = threading.Thread(target=self._work, name="octavo-snapshots", daemon=True)
        self._thread.start()

    def find(self, prompt: np.ndarray, beyond: int = 0) -> list[tuple[Path, Snapshot]]:
        """The chain of files to the longest saved prefix that leaves a token to read; [] when not past `beyond`."""
        with self._changed:
            best = self._tree.longest(self.kind, prompt, len(prompt) - 1)
        if not best or best[-1].snapshot.length <= beyond:
            return []
        return [(saved.path, saved.snapshot) for saved in best]

    def length(self, ids: np.ndarray) -> int:
        """How many of `ids`, from the first on, are on disk."""
        with self._changed:
            chain = self._tree.longest(self.kind, ids, len(ids))
        return chain[-1].snapshot.length if chain else 0

    def read(
        self,
        chain: Sequence[tuple[Path, Snapshot]],
        pool: BlockPool,
        shared: Sequence[int],
        tell: Callable[[int], None],
    ) -> DuoCache | None:
        """The cache of a chain; None when a file of it cannot be used, and the text must be read again.

        A damaged file is deleted with all that builds on it; one that the disk does not give stays where it is.
        """
        try:
            cache = read_chain(chain, pool, shared, tell)
        except BadSnapshot as error:
            self._note(f"A saved reading was damaged and is dropped; the text is read again: {error}")
            damaged = {snapshot.key for path, snapshot in chain if path.name in str(error)}
            self.drop(lambda snapshot: snapshot.key in damaged)
            return None
        except OSError as error:
            gone = isinstance(error, FileNotFoundError)  # another program needed the room
            if not gone:
                self._note(f"A saved reading cannot be used; the text is read again: {error}")
            with self._changed:
                for key in [s.key for path, s in chain if not gone or not path.exists()]:
                    self._tree.delete(key, files=False)
            return None
        now = time.time()
        with self._changed:
            for path, snapshot in chain:
                if saved := self._tree.saved.get(snapshot.key):
                    saved.used = now
                    _touch(path, now)
        return cache

    def save(
        self,
        ids: np.ndarray,
        cache: DuoCache,
        labels: Sequence[str] = (),
        wait: bool = False,
        holds: Sequence[str] = (),
    ) -> None:
        """Write `cache`, which holds exactly `ids`, as far as it is not on disk; takes the cache over.

        `labels` name the documents that end in it, `holds` all those that it holds something of, in their order.
        A newer one replaces waiting ones without labels. When too many wait this one is let go, unless `wait`.
        """
        ready = None
        if cache.pool.device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record()
        job = _Job(ids, cache, tuple(labels), tuple(holds), ready)
        with self._changed:
            for old in [old for old in self._jobs if not old.labels]:
                self._jobs.remove(old)
                old.cache.release()
            while wait and len(self._jobs) >= WAITING and not self._closed:
                self._changed.wait()
            if len(self._jobs) >= WAITING or self._closed or self._forgotten.intersection(job.holds):
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

    def expect(self, labels: Iterable[str]) -> None:
        """Somebody asks about documents: what is read of them is kept again, where they were forgotten before."""
        with self._changed:
            self._forgotten.difference_update(labels)

    def forget(self, label: str, wanted: Container[str]) -> None:
        """Delete what was read of a document, also a part, and what builds on it, where no other in `wanted` does."""
        with self._changed:
            self._forgotten.add(label)
        self._give_up(lambda job: _is_of(job, label))
        with self._changed:
            keys: set[str] = set()
            for key in [key for key, saved in self._tree.saved.items() if _is_of(saved.snapshot, label)]:
                keys.update(self._tree.ancestry(key), self._tree.offspring(key))
            self._tree.release(keys, wanted)

    def forget_paths(
        self, paths: Iterable[Sequence[int]], others: Iterable[Sequence[int]], wanted: Container[str]
    ) -> None:
        """Delete what was saved along some token ids, where neither `others` go there nor a document in `wanted`."""
        own = [np.asarray(path, dtype=np.int64) for path in paths]
        self._give_up(lambda job: any(_begins(path, job.ids) for path in own))
        with self._changed:
            keys = set().union(*map(self._tree.along, own))
        for path in others:  # read from the disk, while nobody waits for the lock
            with self._changed:
                keys -= self._tree.along(np.asarray(path, dtype=np.int64))
        with self._changed:
            self._tree.release(keys, wanted)

    def drop(self, which: Callable[[Snapshot], bool]) -> None:
        """Delete snapshots and all that builds on them."""
        with self._changed:
            for key in [key for key, saved in self._tree.saved.items() if which(saved.snapshot)]:
                self._tree.delete(key)

    def bytes_of(self, label: str | None = None) -> int:
        """Bytes on disk of what was read of a document; of everything without a label.

        Every file counts for one document: the one that ends in it, else the next that builds on it, else the last
        that it holds or builds on. So documents that share a beginning are not counted twice.
        """
        with self._changed:
            if label is None:
                return sum(saved.bytes for saved in self._tree.saved.values())
            return sum(self._tree.saved[key].bytes for key, owner in self._tree.shares().items() if owner == label)

    def labels(self) -> frozenset[str]:
        """The labels of snapshots that fit this model."""
        with self._changed:
            own = [saved.snapshot for saved in self._tree.saved.values() if saved.snapshot.kind == self.kind]
        return frozenset(label for snapshot in own for label in snapshot.labels)

    def _give_up(self, which: Callable[[_Job], bool]) -> None:
        """Take jobs out of the line; one that is written just now is waited for, and found like any other."""
        with self._changed:
            for job in [job for job in self._jobs if which(job)]:
                self._jobs.remove(job)
                job.cache.release()
            writing = self._writing
            if writing is not None and which(writing):
                self._changed.wait_for(lambda: self._writing is not writing, _PATIENCE_S)

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
            chain = self._tree.longest(self.kind, job.ids, len(job.ids))
        parent = chain[-1].snapshot if chain else None
        start = parent.length if parent else 0
        new = len(job.ids) - start
        if parent and not new and not set(job.labels) <= set(parent.labels):  # the same pages of another document
            path = chain[-1].path
            self._add(path, add_labels(path, parent, job.labels, job.holds))
            return
        if len(job.ids) < LEAST_TOKENS or new < (1 if job.labels else LEAST_TOKENS):
            return
        first, blocks = parent.last if parent else 0, len(job.cache.blocks)
        need = (blocks - first) * job.cache.pool.block_bytes + sum(tensor.nbytes for tensor in job.cache.exact())
        pinned = self.pinned()
        with self._changed:
            fits = self._tree.make_room(need, self.quota, {saved.snapshot.key for saved in chain}, pinned)
        if not fits:
            self._note(
                f"The library is full: {size(need)} more do not fit into {size(self.quota)}, or the disk "
                "is. Unpin a document, remove one, or raise --library-quota."
            )
            return
        behind = parent.key if parent else ""
        key = key_after(self.kind, behind, job.ids[start:])
        about = {
            "key": key,
            "parent": behind,
            "kind": self.kind,
            "start": start,
            "first": first,
            "labels": job.labels,
            "holds": job.holds,
        }
        path = self._tree.path(key)
        if job.ready is None:
            snapshot = write_snapshot(path, job.cache, about, self._go_on)
        else:  # a stream of its own: the engine's steps do not wait for these copies
            stream = torch.cuda.Stream(job.cache.pool.device)
            stream.wait_event(job.ready)
            with torch.cuda.stream(stream):
                snapshot = write_snapshot(path, job.cache, about, self._go_on)
        if snapshot is not None:
            self._add(path, snapshot)

    def _add(self, path: Path, snapshot: Snapshot) -> None:
        with self._changed:
            self._tree.add(path, snapshot)

    def _go_on(self) -> bool:
        return not self._dropping

    def _note(self, text: str) -> None:
        log.warning("%s", text)
        self.notes.append(text)


def _is_of(read: _Job | Snapshot, label: str) -> bool:
    """Whether what was read holds something of a document."""
    return label in read.holds or label in read.labels  # files of before `holds` was written have labels only


def _begins(path: np.ndarray, ids: np.ndarray) -> bool:
    return len(ids) <= len(path) and np.array_equal(path[: len(ids)], ids)


def _touch(path: Path, now: float) -> None:
    try:
        os.utime(path, (now, now))
    except OSError:
        pass  # gone, or not ours: it only counts as older than it is
