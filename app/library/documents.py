"""Documents' texts and token ids on disk, by what they hold; who may see them is for `Owner` to say.

A document's file has two lines: the checksum of the second, and the document as JSON.
"""

from __future__ import annotations

import json
import logging
import re
import struct
import threading
import types
import typing
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from app.chat import Selection
from app.documents import Document
from app.library.files import names_in, parse_json, write_whole

log = logging.getLogger(__name__)

_LABEL = re.compile(r"[0-9a-f]{32}")
_LEAST_IDS = 4096  # fewer are made again sooner than a file is read
_CHECK = struct.Struct("<I")


class DocumentStore:
    """One JSON a document, named by `Selection.label`, and beside it the ids of the pages that were asked about."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._sound: dict[str, tuple[int, int]] = {}  # label: time and size of a file that was found undamaged
        self.naming = threading.RLock()  # held from a document's being put until a list or a chat names it

    def put(self, document: Document) -> str:
        """Keep a document, in place of a damaged copy too; gives its label."""
        label = Selection.whole(document).label
        if not self._is_sound(label):
            body = json.dumps(asdict(document), ensure_ascii=False).encode("utf-8", "surrogatepass")
            write_whole(self._path(label), _sum_line(body) + body)
        return label

    def has(self, label: str) -> bool:
        """Whether a document is kept."""
        return bool(_LABEL.fullmatch(label)) and self._path(label).is_file()

    def get(self, label: str) -> Document | None:
        """The document of a label; None when it is not kept, or damaged. Raises OSError where the disk does not say."""
        if not _LABEL.fullmatch(label):
            return None
        try:
            head, _, body = self._path(label).read_bytes().partition(b"\n")
        except FileNotFoundError:
            return None
        plain = parse_json(body) if head + b"\n" == _sum_line(body) else None
        try:
            document: Document | None = _build(Document, plain) if isinstance(plain, dict) else None
        except (TypeError, ValueError, KeyError):
            document = None
        if document is None or Selection.whole(document).label != label:
            log.warning("The text of a document was damaged and is not used: %s", self._path(label).name)
            return None
        return document

    def drop(self, label: str) -> None:
        """Delete a document and its ids."""
        if _LABEL.fullmatch(label):
            for path in (self._path(label), *self.folder.glob(f"{label}-*.ids")):
                path.unlink(missing_ok=True)

    def labels(self, before: float = float("inf")) -> set[str]:
        """The labels of all that is kept and was written before a time in seconds since 1970."""
        found = set()
        for path in names_in(self.folder, ".json") + names_in(self.folder, ".ids"):
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < before:
                    found.add(path.name[:32])
        return found

    def ids(self, name: str) -> tuple[int, ...] | None:
        """Token ids that `keep_ids` kept under a name; None when they are not there, or damaged: they are made anew."""
        try:
            data = (self.folder / f"{name}.ids").read_bytes()
        except OSError:
            return None
        if len(data) < _CHECK.size or zlib.crc32(data[_CHECK.size :]) != _CHECK.unpack_from(data)[0]:
            return None
        return tuple(np.frombuffer(data, dtype="<i4", offset=_CHECK.size).tolist())

    def keep_ids(self, name: str, ids: Sequence[int]) -> None:
        """Keep the ids of some pages of a document, where there are many; without room they are made again."""
        if len(ids) >= _LEAST_IDS:
            data = np.asarray(ids, dtype="<i4").tobytes()
            try:
                write_whole(self.folder / f"{name}.ids", _CHECK.pack(zlib.crc32(data)) + data)
            except OSError as error:
                log.warning("Token ids of a document are not kept: %s", error)

    def _is_sound(self, label: str) -> bool:
        """Whether a document is kept undamaged; looked at once for every state of its file."""
        try:
            facts = self._path(label).stat()
            state = facts.st_mtime_ns, facts.st_size
            if self._sound.get(label) != state and self.get(label) is not None:
                self._sound[label] = state
            return self._sound.get(label) == state
        except FileNotFoundError:
            return False

    def _path(self, label: str) -> Path:
        return self.folder / f"{label}.json"


def _sum_line(body: bytes) -> bytes:
    return b'{"crc32": %d}\n' % zlib.crc32(body)


def _build(kind: Any, plain: Any) -> Any:
    """A dataclass from what `asdict` and JSON made of it; fields that it has no more are left out."""
    if is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        make: Any = kind
        return make(**{f.name: _build(hints[f.name], plain[f.name]) for f in fields(kind) if f.name in plain})
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        inner = [arguments[0]] * len(plain) if arguments[1:] == (...,) else arguments
        return tuple(_build(one, value) for one, value in zip(inner, plain, strict=True))
    if origin in (list, Sequence):
        return [_build(arguments[0], value) for value in plain]
    if origin in (typing.Union, types.UnionType) and plain is not None:
        known = [one for one in arguments if is_dataclass(one) or typing.get_origin(one) is tuple]
        return _build(known[0], plain) if known else plain
    return plain
