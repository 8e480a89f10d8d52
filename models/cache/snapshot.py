"""A cache on disk: one file a stretch of tokens, with everything that going on from its end needs.

A file holds the packed blocks that its stretch adds to its parent's, and the unpacked state at its end. A chain of
files, first to last, is a whole cache. Layout: magic, the blocks as `BlockPool.dump` gives them, the exact tensors, a
JSON footer with a CRC-32 of every piece, and the footer's own CRC-32, length and magic. Plain bytes, no pickle.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.cache.duo import DuoCache
from models.cache.pool import BlockPool
from models.errors import BadSnapshot
from models.files import writing

# Raise it when what a cache holds, or how it is stored, changes: older files are then read no more. A field of the
# footer that has a default may be added without, and a file may lack it.
VERSION = 3

_MAGIC = b"OCTAVOKV"
_END = struct.Struct("<II8s")
_PIECE = 16 << 20  # bytes read, checked and copied at a time
_READERS = min(16, max(8, os.cpu_count() or 8))  # a checksum takes 1 GB/s of one, a disk or its cache gives several


@dataclass(frozen=True)
class Snapshot:
    """A file's footer.

    key: of this state; parent: of the state it builds on, "" for none. Tokens `start` to `length` are this file's
    stretch, packed blocks `first` to `last` what it holds of them. `labels` say what ends here, `holds` what was
    read up to here, wholly or in part.
    """

    key: str
    parent: str
    kind: str
    start: int
    length: int
    first: int
    last: int
    block_bytes: int
    exact: tuple[int, ...]
    checksums: tuple[int, ...]
    labels: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """Size of the data."""
        return (self.last - self.first) * self.block_bytes + sum(self.exact)


def write_snapshot(path: Path, cache: DuoCache, about: dict[str, Any], go_on: Callable[[], bool]) -> Snapshot | None:
    """Write blocks `about["first"]` on and the exact state of a cache to a new file; None once `go_on()` is false.

    `about` gives the other fields of the footer. The file appears under `path` only when it is complete.
    """
    ids = cache.blocks[about["first"] :]
    checksums = []
    step = _step(cache.pool.block_bytes)
    try:
        with writing(path) as file:
            file.write(_MAGIC)
            for start in range(0, len(ids), step):
                if not go_on():
                    raise _GivenUp
                checksums.append(_put(file, cache.pool.dump(ids[start : start + step])))
            checksums += [_put(file, tensor) for tensor in cache.exact()]
            snapshot = Snapshot(
                **about,
                length=cache.length,
                last=about["first"] + len(ids),
                block_bytes=cache.pool.block_bytes,
                exact=tuple(tensor.nbytes for tensor in cache.exact()),
                checksums=tuple(checksums),
            )
            file.write(_footer(snapshot))
        return snapshot
    except _GivenUp:
        return None


def add_labels(path: Path, snapshot: Snapshot, labels: Sequence[str], holds: Sequence[str]) -> Snapshot:
    """Have a file say that more ends here. Its data stays as it is, for whoever reads it just now."""
    more = replace(
        snapshot,
        labels=tuple(dict.fromkeys((*snapshot.labels, *labels))),
        holds=tuple(dict.fromkeys((*snapshot.holds, *holds))),
    )
    with path.open("rb") as old, writing(path) as file:
        shutil.copyfileobj(old, file, _PIECE)
        file.seek(len(_MAGIC) + snapshot.bytes)
        file.truncate()
        file.write(_footer(more))
    return more


class _GivenUp(Exception):
    """What is written is wanted no more."""


def read_footer(path: Path) -> Snapshot:
    """What a file holds; raises BadSnapshot for one that is no snapshot, cut short, or of another version.

    Raises OSError where the disk does not give it, which says nothing about the file.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _END.size))
            crc, length, magic = _END.unpack(file.read(_END.size))
            at = size - _END.size - length
            if magic != _MAGIC or at < len(_MAGIC):
                raise BadSnapshot(f"{path.name} is no snapshot, or was cut short.")
            file.seek(at)
            footer = file.read(length)
    except struct.error as error:
        raise BadSnapshot(f"{path.name} is no snapshot, or was cut short.") from error
    if zlib.crc32(footer) != crc:
        raise BadSnapshot(f"The footer of {path.name} is damaged.")
    values: dict[str, Any] = json.loads(footer)
    known = {field.name: field.default is MISSING for field in fields(Snapshot)}  # and whether it must be there
    if not isinstance(values, dict) or not {name for name in known if known[name]} <= values.keys() <= known.keys():
        raise BadSnapshot(f"{path.name} is of another version.")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    snapshot = Snapshot(**values)
    if at != len(_MAGIC) + snapshot.bytes:
        raise BadSnapshot(f"{path.name} has {at} bytes of data where its footer says {snapshot.bytes}.")
    return snapshot


def read_chain(
    chain: Sequence[tuple[Path, Snapshot]], pool: BlockPool, shared: Sequence[int], tell: Callable[[int], None]
) -> DuoCache:
    """A cache from a chain of files, first to last; its first blocks are `shared`, which the pool has already.

    `tell(tokens)` hears how far it is and may raise. Raises BadSnapshot, OSError where the disk does not give a file,
    and PoolExhausted; after any of them nothing is taken from the pool.
    """
    cache = DuoCache.empty(pool, chain[-1][1].length, shared)
    try:
        for path, snapshot in chain:
            _check(path, snapshot, cache)
            end = path == chain[-1][0]
            for at, ids, data in _pieces(path, snapshot, cache, len(shared), end):
                if ids:
                    pool.fill(ids, data.view(-1, snapshot.block_bytes)[-len(ids) :])
                    tell(at)
                else:
                    tensor = cache.exact()[at]
                    tensor.copy_(data.view(tensor.dtype).view(tensor.shape))
        if pool.device.type == "cuda":
            torch.cuda.synchronize(pool.device)
        return cache
    except BaseException:
        cache.release()
        raise


def _footer(snapshot: Snapshot) -> bytes:
    footer = json.dumps(asdict(snapshot)).encode()
    return footer + _END.pack(zlib.crc32(footer), len(footer), _MAGIC)


def _step(block_bytes: int) -> int:
    return max(1, _PIECE // max(1, block_bytes))


def _put(file: Any, tensor: Tensor) -> int:
    data = tensor.contiguous().flatten().view(torch.uint8).cpu().numpy().data
    file.write(data)
    return zlib.crc32(data)


def _check(path: Path, snapshot: Snapshot, cache: DuoCache) -> None:
    exact = tuple(tensor.nbytes for tensor in cache.exact())
    if (snapshot.block_bytes, snapshot.exact) != (cache.pool.block_bytes, exact):
        raise BadSnapshot(f"{path.name} was written for a cache of another shape.")


def _pieces(
    path: Path, snapshot: Snapshot, cache: DuoCache, known: int, end: bool
) -> Iterator[tuple[int, list[int], Tensor]]:
    """Checked pieces on the pool's device, in order: (tokens so far, block ids, data); then (index, [], exact tensor).

    Threads read and check ahead. On a GPU they read into pinned memory, from which copies run beside them.
    """
    step, size = _step(snapshot.block_bytes), snapshot.block_bytes
    wanted: list[tuple[int, int, int, int, list[int]]] = []  # offset, bytes, checksum, what it is, block ids
    blocks = cache.blocks
    places = range(snapshot.first, snapshot.last, step)
    for number, place in enumerate(places):
        upto = min(place + step, snapshot.last)
        if upto > known:  # a piece that is partly known is read as a whole, as its checksum covers all of it
            offset = len(_MAGIC) + (place - snapshot.first) * size
            tokens, new = cache.shape.front + upto * cache.shape.block, blocks[max(place, known) : upto]
            wanted.append((offset, (upto - place) * size, snapshot.checksums[number], tokens, new))
    if end:
        offset = len(_MAGIC) + (snapshot.last - snapshot.first) * size
        for index, length in enumerate(snapshot.exact):
            wanted.append((offset, length, snapshot.checksums[len(places) + index], index, []))
            offset += length
    gpu = cache.pool.device.type == "cuda"

    def read(offset: int, length: int, checksum: int) -> Tensor:
        buffer = torch.empty(length, dtype=torch.uint8, pin_memory=gpu)
        view = buffer.numpy().data
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            at = 0
            while at < length:
                count = file.readinto(view[at:])
                if not count:
                    raise BadSnapshot(f"{path.name} was cut short.")
                at += count
        if zlib.crc32(view) != checksum:
            raise BadSnapshot(f"{path.name} is damaged: a checksum does not match.")
        return buffer

    with ThreadPoolExecutor(_READERS, "read-snapshot") as readers:
        ahead: deque[Future[Tensor]] = deque()
        try:
            for number, (_, _, _, what, ids) in enumerate(wanted):
                while len(ahead) < _READERS + 2 and number + len(ahead) < len(wanted):
                    ahead.append(readers.submit(read, *wanted[number + len(ahead)][:3]))
                data = ahead.popleft().result()
                yield what, ids, data.to(cache.pool.device, non_blocking=True)
        finally:
            for waiting in ahead:
                waiting.cancel()
