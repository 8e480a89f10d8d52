"""Saved caches: which prefixes are on disk, finding the longest, writing beside the engine, a quota."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from models.cache.duo import DuoCache
from models.cache.pool import BlockPool
from models.cache.snapshot import Snapshot, read_chain, read_footer, write_snapshot
from models.errors import BadSnapshot
from models.files import sweep

log = logging.getLogger(__name__)

LEAST_TOKENS = 512  # a shorter stretch is read again sooner than its windows are written
WAITING = 2  # caches that wait to be written, beside the one that is
_SUFFIX = ".kv"
_PATIENCE_S = 30.0  # for a file that is written while it is to be deleted
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
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        sweep(folder)
        self._look()
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
                    self._delete(key, files=False)
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

    def forget(self, label: str, wanted: Container[str]) -> None:
        """Delete what was read of a document and what builds on it, where no other document in `wanted` does."""
        self._give_up(lambda job: label in job.labels)
        with self._changed:
            keys: set[str] = set()
            for key in [key for key, saved in self._saved.items() if label in saved.snapshot.labels]:
                keys.update(self._ancestry(key), self._offspring(key))
            self._release(keys, wanted)

    def forget_paths(
        self, paths: Iterable[Sequence[int]], others: Iterable[Sequence[int]], wanted: Container[str]
    ) -> None:
        """Delete what was saved along some token ids, where neither `others` go there nor a document in `wanted`."""
        own = [np.asarray(path, dtype=np.int64) for path in paths]
        self._give_up(lambda job: any(_begins(path, job.ids) for path in own))
        with self._changed:
            keys = set().union(*map(self._along, own))
        for path in others:  # read from the disk, while nobody waits for the lock
            with self._changed:
                keys -= self._along(np.asarray(path, dtype=np.int64))
        with self._changed:
            self._release(keys, wanted)

    def drop(self, which: Callable[[Snapshot], bool]) -> None:
        """Delete snapshots and all that builds on them."""
        with self._changed:
            for key in [key for key, saved in self._saved.items() if which(saved.snapshot)]:
                self._delete(key)

    def bytes_of(self, label: str | None = None) -> int:
        """Bytes on disk of what was read of a document; of everything without a label.

        Every file counts for one document: the one that ends in it, else the next that builds on it, else the last
        that it builds on. So documents that share a beginning are not counted twice.
        """
        with self._changed:
            if label is None:
                return sum(saved.bytes for saved in self._saved.values())
            return sum(self._saved[key].bytes for key, owner in self._shares().items() if owner == label)

    def labels(self) -> frozenset[str]:
        """The labels of snapshots that fit this model."""
        with self._changed:
            own = [saved.snapshot for saved in self._saved.values() if saved.snapshot.kind == self.kind]
        return frozenset(label for snapshot in own for label in snapshot.labels)

    # ---- the tree

    def _look(self) -> None:
        """Learn what is in the folder: other programs may write there, and make room, at the same time."""
        known = {saved.path.name: key for key, saved in self._saved.items()}
        found = set()
        for path in self.folder.iterdir():
            if path.suffix != _SUFFIX:
                continue
            found.add(path.name)
            if path.name in known:
                continue
            try:
                snapshot = read_footer(path)
                if path.stem != snapshot.key:
                    raise BadSnapshot(f"{path.name} is the snapshot {snapshot.key}.")
                self._saved[snapshot.key] = _Saved(path, snapshot, path.stat().st_mtime)
            except BadSnapshot as error:
                self._note(f"A saved reading was damaged and is dropped: {error}")
                path.unlink(missing_ok=True)
            except FileNotFoundError:
                pass  # deleted just now
            except OSError as error:
                self._note(f"A saved reading cannot be used: {error}")
        for name in set(known) - found:
            self._delete(known[name], files=False)
        for key, saved in list(self._saved.items()):
            parent = saved.snapshot.parent
            if parent and parent not in self._saved:
                self._delete(key, files=not (self.folder / f"{parent}{_SUFFIX}").exists())

    def _children(self, key: str, kind: str) -> list[_Saved]:
        found = [s for s in self._saved.values() if s.snapshot.parent == key and s.snapshot.kind == kind]
        return sorted(found, key=lambda saved: saved.snapshot.length)

    def _chains(self, prompt: np.ndarray, most: int, kind: str = "") -> Iterator[list[_Saved]]:
        """Every chain of snapshots that is a prefix of the prompt, of at most `most` tokens."""
        kind = kind or self.kind
        waiting: list[list[_Saved]] = [[]]
        while waiting:
            chain = waiting.pop()
            parent, start = (chain[-1].snapshot.key, chain[-1].snapshot.length) if chain else ("", 0)
            digest, at = _begin(kind, parent), start
            for child in self._children(parent, kind):
                length = child.snapshot.length
                if child.snapshot.start != start or length > most:
                    continue
                digest.update(_bytes(prompt[at:length]))
                at = length
                if digest.hexdigest() == child.snapshot.key:
                    waiting.append([*chain, child])
                    yield waiting[-1]

    def _along(self, ids: np.ndarray) -> set[str]:
        """The keys of all snapshots, of whatever kind of cache, that lie on the way through these ids."""
        kinds = {saved.snapshot.kind for saved in self._saved.values()}
        return {chain[-1].snapshot.key for kind in kinds for chain in self._chains(ids, len(ids), kind)}

    def _ancestry(self, key: str) -> list[str]:
        keys = []
        while key in self._saved:
            keys.append(key)
            key = self._saved[key].snapshot.parent
        return keys

    def _offspring(self, key: str) -> list[str]:
        keys = [key]
        for parent in keys:
            keys += [k for k, saved in self._saved.items() if saved.snapshot.parent == parent]
        return keys

    def _shares(self) -> dict[str, str]:
        """For every file's key the label of the document that it counts for, "" for none."""
        order = sorted(self._saved.values(), key=lambda saved: (saved.snapshot.length, saved.snapshot.key))
        found = {saved.snapshot.key: min(saved.snapshot.labels, default="") for saved in order}
        for saved in reversed(order):  # a document's end takes in what was saved on the way to it
            parent = saved.snapshot.parent
            if found.get(parent) == "" and found[saved.snapshot.key]:
                found[parent] = found[saved.snapshot.key]
        for saved in order:
            found[saved.snapshot.key] = found[saved.snapshot.key] or found.get(saved.snapshot.parent, "")
        return found

    def _release(self, keys: set[str], wanted: Container[str]) -> None:
        """Delete those of `keys` that nothing builds on and where no wanted document ends, from the ends on."""
        while True:
            parents = {saved.snapshot.parent for saved in self._saved.values()}
            ends = [
                key
                for key in keys & self._saved.keys() - parents
                if not any(label in wanted for label in self._saved[key].snapshot.labels)
            ]
            if not ends:
                return
            for key in ends:
                self._delete(key)

    def _give_up(self, which: Callable[[_Job], bool]) -> None:
        """Take jobs out of the line; one that is written just now is waited for, and found like any other."""
        with self._changed:
            for job in [job for job in self._jobs if which(job)]:
                self._jobs.remove(job)
                job.cache.release()
            writing = self._writing
            if writing is not None and which(writing):
                self._changed.wait_for(lambda: self._writing is not writing, _PATIENCE_S)

    def _delete(self, key: str, files: bool = True) -> None:
        """Forget a snapshot with all that builds on it, and delete the `files`."""
        for gone in reversed(self._offspring(key)):
            if (saved := self._saved.pop(gone, None)) is not None and files:
                saved.path.unlink(missing_ok=True)

    def _make_room(self, need: int, keep: set[str]) -> bool:
        """Delete what was not used for longest, ends of chains first; whether `need` bytes fit then."""
        pinned = self.pinned()
        with self._changed:
            self._look()
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
        digest = _begin(self.kind, parent.key if parent else "")
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


def _begin(kind: str, parent: str) -> hashlib.blake2b:
    return hashlib.blake2b(f"{kind}/{parent}/".encode(), digest_size=20)


def _begins(path: np.ndarray, ids: np.ndarray) -> bool:
    return len(ids) <= len(path) and np.array_equal(path[: len(ids)], ids)


def _bytes(ids: np.ndarray) -> bytes:
    return ids.astype("<i4").tobytes()


def _touch(path: Path, now: float) -> None:
    try:
        os.utime(path, (now, now))
    except OSError:
        pass  # gone, or not ours: it only counts as older than it is
