"""Which prefixes a folder holds, each file building on another one: finding chains of them, deleting, making room."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from models.cache.snapshot import Snapshot, read_footer
from models.errors import BadSnapshot

_SUFFIX = ".kv"
_DISK_LEFT = 1 << 30  # bytes of the disk that are left alone


@dataclass(eq=False)
class Saved:
    """A snapshot's file, and when it was last used (seconds since the epoch)."""

    path: Path
    snapshot: Snapshot
    used: float

    @property
    def bytes(self) -> int:
        return self.snapshot.bytes


class SnapshotTree:
    """The snapshots of a folder by their keys; `note` is told what goes wrong. The caller sees to it that one thread
    at a time is in here.

    A key hashes its kind of cache and every token before its end, so equal prompts meet in equal files.
    """

    def __init__(self, folder: Path, note: Callable[[str], None]) -> None:
        self.folder = folder
        self.saved: dict[str, Saved] = {}
        self._note = note
        self.look()

    def path(self, key: str) -> Path:
        """Where a snapshot of this key is, or would be."""
        return self.folder / f"{key}{_SUFFIX}"

    def look(self) -> None:
        """Learn what is in the folder: other programs may write there, and make room, at the same time."""
        known = {saved.path.name: key for key, saved in self.saved.items()}
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
                self.saved[snapshot.key] = Saved(path, snapshot, path.stat().st_mtime)
            except BadSnapshot as error:
                self._note(f"A saved reading was damaged and is dropped: {error}")
                path.unlink(missing_ok=True)
            except FileNotFoundError:
                pass  # deleted just now
            except OSError as error:
                self._note(f"A saved reading cannot be used: {error}")
        for name in set(known) - found:
            self.delete(known[name], files=False)
        for key, saved in list(self.saved.items()):
            parent = saved.snapshot.parent
            if parent and parent not in self.saved:
                self.delete(key, files=not self.path(parent).exists())

    def add(self, path: Path, snapshot: Snapshot) -> None:
        """Take in a file that was just written; it goes where what it builds on was deleted meanwhile."""
        if snapshot.parent and snapshot.parent not in self.saved:
            path.unlink(missing_ok=True)
        else:
            self.saved[snapshot.key] = Saved(path, snapshot, time.time())

    def _children(self, key: str, kind: str) -> list[Saved]:
        found = [s for s in self.saved.values() if s.snapshot.parent == key and s.snapshot.kind == kind]
        return sorted(found, key=lambda saved: saved.snapshot.length)

    def longest(self, kind: str, ids: np.ndarray, most: int) -> list[Saved]:
        """The chain of snapshots to the longest prefix of `ids` that has at most `most` tokens; [] for none."""
        return max(self._chains(kind, ids, most), key=lambda chain: chain[-1].snapshot.length, default=[])

    def _chains(self, kind: str, ids: np.ndarray, most: int) -> Iterator[list[Saved]]:
        waiting: list[list[Saved]] = [[]]
        while waiting:
            chain = waiting.pop()
            parent, start = (chain[-1].snapshot.key, chain[-1].snapshot.length) if chain else ("", 0)
            digest, at = _begin(kind, parent), start
            for child in self._children(parent, kind):
                length = child.snapshot.length
                if child.snapshot.start != start or length > most:
                    continue
                digest.update(_bytes(ids[at:length]))
                at = length
                if digest.hexdigest() == child.snapshot.key:
                    waiting.append([*chain, child])
                    yield waiting[-1]

    def along(self, ids: np.ndarray) -> set[str]:
        """The keys of all snapshots, of whatever kind of cache, that lie on the way through these ids."""
        kinds = {saved.snapshot.kind for saved in self.saved.values()}
        return {chain[-1].snapshot.key for kind in kinds for chain in self._chains(kind, ids, len(ids))}

    def ancestry(self, key: str) -> list[str]:
        """A snapshot's key and those that it builds on."""
        keys = []
        while key in self.saved:
            keys.append(key)
            key = self.saved[key].snapshot.parent
        return keys

    def offspring(self, key: str) -> list[str]:
        """A snapshot's key and those that build on it."""
        keys = [key]
        for parent in keys:
            keys += [k for k, saved in self.saved.items() if saved.snapshot.parent == parent]
        return keys

    def shares(self) -> dict[str, str]:
        """For every file's key the label of the document that it counts for, "" for none."""
        order = sorted(self.saved.values(), key=lambda saved: (saved.snapshot.length, saved.snapshot.key))
        found = {saved.snapshot.key: min(saved.snapshot.labels, default="") for saved in order}
        for saved in reversed(order):  # a document's end takes in what was saved on the way to it
            parent = saved.snapshot.parent
            if found.get(parent) == "" and found[saved.snapshot.key]:
                found[parent] = found[saved.snapshot.key]
        for saved in order:
            last = saved.snapshot.holds[-1] if saved.snapshot.holds else found.get(saved.snapshot.parent, "")
            found[saved.snapshot.key] = found[saved.snapshot.key] or last
        return found

    def release(self, keys: set[str], wanted: Container[str]) -> None:
        """Delete those of `keys` that nothing builds on and where no wanted document ends, from the ends on."""
        while True:
            parents = {saved.snapshot.parent for saved in self.saved.values()}
            ends = [
                key
                for key in keys & self.saved.keys() - parents
                if not any(label in wanted for label in self.saved[key].snapshot.labels)
            ]
            if not ends:
                return
            for key in ends:
                self.delete(key)

    def delete(self, key: str, files: bool = True) -> None:
        """Forget a snapshot with all that builds on it, and delete the `files`."""
        for gone in reversed(self.offspring(key)):
            if (saved := self.saved.pop(gone, None)) is not None and files:
                saved.path.unlink(missing_ok=True)

    def make_room(self, need: int, quota: int, keep: Container[str], pinned: frozenset[str]) -> bool:
        """Delete what was not used for longest, ends of chains first, but none of the keys in `keep` and no document in
        `pinned`; whether `need` bytes fit into `quota`, and onto the disk, then."""
        self.look()
        while True:
            held = sum(saved.bytes for saved in self.saved.values())
            free = shutil.disk_usage(self.folder).free - _DISK_LEFT
            if held + need <= quota and need <= free:
                return True
            parents = {saved.snapshot.parent for saved in self.saved.values()}
            ends = [
                saved
                for key, saved in self.saved.items()
                if key not in parents and key not in keep and not pinned.intersection(saved.snapshot.labels)
            ]
            if not ends:
                return False
            self.delete(min(ends, key=lambda saved: saved.used).snapshot.key)


def key_after(kind: str, parent: str, ids: np.ndarray) -> str:
    """The key of a snapshot that holds `ids` behind the one whose key is `parent`, "" for the beginning."""
    digest = _begin(kind, parent)
    digest.update(_bytes(ids))
    return digest.hexdigest()


def _begin(kind: str, parent: str) -> hashlib.blake2b:
    return hashlib.blake2b(f"{kind}/{parent}/".encode(), digest_size=20)


def _bytes(ids: np.ndarray) -> bytes:
    return ids.astype("<i4").tobytes()
