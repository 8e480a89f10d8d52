"""Tar archives, and what gzip, bzip2 and xz packed; read in one pass, with limits, and never onto the disk."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import PurePath
from typing import IO, Any

from app.documents import codebase
from app.documents.document import Extract, Limits
from app.errors import BadDocument, DocumentTooLarge

_OPENERS: tuple[tuple[bytes, str, Callable[[IO[bytes]], Any]], ...] = (
    (b"\x1f\x8b", "gzip", lambda file: gzip.GzipFile(fileobj=file)),
    (b"BZh", "bzip2", bz2.BZ2File),
    (b"\xfd7zXZ\x00", "xz", lzma.LZMAFile),
)
_DAMAGED = (tarfile.TarError, OSError, EOFError, zlib.error, lzma.LZMAError, ValueError, OverflowError, UnicodeError)
_MAGIC_AT, _MAGIC = 257, b"ustar"
_SUFFIXES = {".tgz": ".tar", ".tbz2": ".tar", ".tbz": ".tar", ".txz": ".tar", ".gz": "", ".bz2": "", ".xz": ""}
_COPY = 1 << 20


def is_tar(data: bytes) -> bool:
    """Whether bytes are a tar archive as they are."""
    return data.startswith(_MAGIC, _MAGIC_AT)


def is_packed(data: bytes) -> bool:
    """Whether bytes begin as gzip, bzip2 or xz write them."""
    return any(data.startswith(magic) for magic, _, _ in _OPENERS)


def read_tar(data: bytes, name: str, limits: Limits, read_file: codebase.ReadFile) -> Extract:
    """A tar archive as a code base; links and devices are left out with a count."""
    return _members(_Bounded(io.BytesIO(data), name, limits), name, limits, read_file)


def read_packed(data: bytes, name: str, limits: Limits, read_file: codebase.ReadFile) -> Extract:
    """A packed tar archive as a code base, or a packed file as that file."""
    kind, opener = next((kind, opener) for magic, kind, opener in _OPENERS if data.startswith(magic))
    suffix = PurePath(name).suffix.lower()
    inner = name[: len(name) - len(suffix)] + _SUFFIXES[suffix] if suffix in _SUFFIXES else name
    try:
        head = _Bounded(opener(io.BytesIO(data)), name, limits).read(_MAGIC_AT + len(_MAGIC))
        whole = _Bounded(opener(io.BytesIO(data)), name, limits)
        if is_tar(head):
            return _members(whole, name, limits, read_file)
        parts = list(iter(lambda: whole.read(_COPY), b""))
    except _DAMAGED as error:
        raise BadDocument(f"{name} is a damaged {kind} file: {error}. Pack it again, or add what is inside.") from error
    try:
        return read_file(b"".join(parts), inner)
    except BadDocument as error:  # which names what is inside
        if inner == name:
            raise
        raise type(error)(f"{name}: {error}") from error


def _members(file: _Bounded, name: str, limits: Limits, read_file: codebase.ReadFile) -> Extract:
    entries: list[codebase.Entry] = []
    odd, count, total = 0, 0, 0
    try:
        # As a stream: nothing is looked for by jumping, so every byte that is unpacked counts.
        stream: Any = file
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                limits.check_time(name)
                count += 1
                if count > codebase.MAX_ENTRIES:
                    most = codebase.MAX_ENTRIES
                    raise DocumentTooLarge(
                        f"{name} holds more than {most:,} files; that is the most. Add a part of it."
                    )
                path = member.name.replace("\\", "/")
                codebase.check_inside(path, name)
                if not member.isreg():
                    odd += not member.isdir()
                    continue
                total += member.size  # a sparse file's too, however little of it is stored
                limits.check_unpacked(name, total)
                content = b""
                if codebase.is_read(path, member.size) and (source := archive.extractfile(member)) is not None:
                    content = source.read()
                entries.append(codebase.Entry(path, member.size, lambda content=content: content))  # type: ignore[misc]
        while file.read():  # to the checksum at the end of what is packed
            pass
    except _DAMAGED as error:
        raise BadDocument(f"{name} is a damaged tar archive: {error}. Pack it again.") from error
    extract = codebase.read_entries(entries, name, limits, read_file, {"links or devices": odd})
    if file.last.strip(b"\0"):  # an archive ends with empty blocks
        extract = replace(extract, warnings=(*extract.warnings, "The archive is cut short: its end is missing."))
    return extract


class _Bounded:
    """A file that gives no more than a document may unpack to, and watches the clock."""

    def __init__(self, file: Any, name: str, limits: Limits) -> None:
        self._file, self._name, self._limits = file, name, limits
        self._given = 0
        self.last = b""  # the last bytes

    def read(self, size: int = _COPY) -> bytes:
        data: bytes = self._file.read(min(size, _COPY) if size >= 0 else _COPY)
        self._given += len(data)
        self.last = (self.last + data)[-tarfile.BLOCKSIZE :] if data else self.last
        self._limits.check_time(self._name)
        self._limits.check_unpacked(self._name, self._given)
        return data
