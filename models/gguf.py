"""GGUF files: header, metadata and tensors, read through a memory map; nothing is decoded before it is asked for."""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from models.errors import BadCheckpoint, UnsupportedModel

_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_QUANTISED = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0", "MXFP4"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
)
SUPPORTED_TYPES = (*_PLAIN, *_QUANTISED)
# `dequantize` works in groups of 16 rows. Rows of about this many blocks keep a group in the second-level cache;
# the file's own short rows take 2.8 times as long (SmolLM2, 2 cores: 1.13 s against 0.41 s for the whole model).
_BLOCKS_PER_ROW = 256
_ROWS_PER_SLAB = 256


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in the file: shape as in PyTorch (rows first), GGML type name, place in bytes."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class _Array:
    item: int
    count: int
    offset: int


class Metadata(Mapping[str, Any]):
    """The file's key-value pairs. Arrays are decoded at each access: keep what you use more than once."""

    def __init__(self, buffer: mmap.mmap, values: dict[str, Any]) -> None:
        self._buffer = buffer
        self._values = values

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if not isinstance(value, _Array):
            return value
        cursor = _Cursor(self._buffer, value.offset)
        if value.item == _STRING:
            return [cursor.string() for _ in range(value.count)]
        return list(cursor.unpack(f"{value.count}{_SCALARS[value.item]}"))

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def count(self, key: str) -> int:
        """How many items the array under `key` has, without decoding it; 0 when there is none."""
        value = self._values.get(key)
        return value.count if isinstance(value, _Array) else 0


@dataclass(frozen=True)
class GgufFile:
    """An open GGUF file; the memory map lives as long as this object."""

    path: Path
    metadata: Metadata
    tensors: dict[str, TensorInfo]
    _buffer: mmap.mmap

    def load(self, name: str) -> torch.Tensor:
        """One tensor, copied: as stored if F32, F16 or BF16, else dequantised to float32."""
        info = self.tensors[name]
        raw = np.frombuffer(self._buffer, np.uint8, info.nbytes, info.offset)
        if info.type_name in _PLAIN:
            return torch.from_numpy(raw.copy()).view(_PLAIN[info.type_name]).reshape(info.shape)
        kind = GGMLQuantizationType[info.type_name]
        block_bytes = GGML_QUANT_SIZES[kind][1]
        row = math.gcd(info.nbytes // block_bytes, _BLOCKS_PER_ROW) * block_bytes
        rows = raw.reshape(-1, row)
        values = np.empty((len(rows), math.prod(info.shape) // len(rows)), np.float32)
        # In slabs, because `dequantize` holds its result twice: gigabytes for a large embedding.
        for start in range(0, len(rows), _ROWS_PER_SLAB):
            slab = slice(start, start + _ROWS_PER_SLAB)
            values[slab] = dequantize(rows[slab], kind)
        return torch.from_numpy(values).reshape(info.shape)


def read_gguf(path: Path) -> GgufFile:
    """Read the header. Raises BadCheckpoint (damaged, cut short) or UnsupportedModel (names what it cannot read)."""
    try:
        with path.open("rb") as file:
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise BadCheckpoint(f"{path.name} is empty. Download it again.") from error
    try:
        return _parse(path, buffer)
    except (_Damaged, UnicodeDecodeError) as error:
        told = error if isinstance(error, _Damaged) else "a text in its header is not UTF-8"
        raise BadCheckpoint(f"{path.name} is damaged or cut short: {told}. Download it again.") from error


class _Damaged(Exception):
    """What is wrong, and where; the file's name is told by whoever reads it."""


class _Cursor:
    """Reads little-endian values one after another; _Damaged past the end."""

    def __init__(self, buffer: mmap.mmap, position: int = 0) -> None:
        self.buffer = buffer
        self.position = position

    def unpack(self, layout: str) -> tuple[Any, ...]:
        start = self.position
        self.skip(struct.calcsize("<" + layout))
        return struct.unpack_from("<" + layout, self.buffer, start)

    def string(self) -> str:
        (length,) = self.unpack("Q")
        return self.take(length).decode("utf-8")

    def take(self, length: int) -> bytes:
        start = self.position
        self.skip(length)
        return self.buffer[start : self.position]

    def skip(self, length: int) -> None:
        self.position += length
        if self.position > len(self.buffer):
            raise _Damaged(f"the file ends too early, at byte {len(self.buffer):,}; it needs {self.position:,} or more")

    def skip_strings(self, count: int) -> None:
        # 100,000 strings in a vocabulary: worth a tight loop
        unpack, buffer, position = struct.Struct("<Q").unpack_from, self.buffer, self.position
        try:
            for _ in range(count):
                position += 8 + unpack(buffer, position)[0]
        except (struct.error, OverflowError):
            position += 8  # past the end, which is told below
        self.position = position
        self.skip(0)

    def value(self) -> Any:
        (kind,) = self.unpack("I")
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.unpack(_SCALARS[kind])[0]
        if kind != _ARRAY:
            raise _Damaged(f"unknown kind {kind} of value at byte {self.position:,}")
        item, count = self.unpack("IQ")
        array = _Array(item, count, self.position)
        if item == _STRING:
            self.skip_strings(count)
        elif item in _SCALARS:
            self.skip(count * struct.calcsize("<" + _SCALARS[item]))
        else:
            raise _Damaged(f"unknown kind {item} of array at byte {self.position:,}")
        return array


def _parse(path: Path, buffer: mmap.mmap) -> GgufFile:
    cursor = _Cursor(buffer)
    if cursor.take(4) != b"GGUF":
        raise BadCheckpoint(f"{path.name} is not a GGUF file: it does not begin with GGUF.")
    (version,) = cursor.unpack("I")
    if version not in _VERSIONS:
        raise UnsupportedModel("GGUF version", version, "2 and 3, little-endian")
    tensor_count, pair_count = cursor.unpack("QQ")
    values: dict[str, Any] = {}
    for _ in range(pair_count):
        key = cursor.string()
        values[key] = cursor.value()
    if values.get("split.count", 1) not in (0, 1):
        raise UnsupportedModel("split.count", values["split.count"], "one file: join the parts first")
    records = [_tensor_record(cursor) for _ in range(tensor_count)]
    alignment = values.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise BadCheckpoint(f"general.alignment = {alignment!r} in {path.name} must be a whole number above 0.")
    start = -(-cursor.position // alignment) * alignment
    tensors = {}
    for name, shape, type_id, offset in records:
        info = _tensor_info(name, shape, type_id, start + offset)
        if name in tensors:
            raise BadCheckpoint(f"{path.name} holds tensor {name} twice.")
        if info.offset + info.nbytes > len(buffer):
            raise BadCheckpoint(
                f"{path.name} is cut short: {name} ends at byte {info.offset + info.nbytes:,}, the file at "
                f"{len(buffer):,}. Download it again."
            )
        tensors[name] = info
    return GgufFile(path, Metadata(buffer, values), tensors, buffer)


def _tensor_record(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    (rank,) = cursor.unpack("I")
    if not 1 <= rank <= 4:
        raise _Damaged(f"tensor {name!r} has {rank} dimensions")
    shape = cursor.unpack(f"{rank}Q")[::-1]
    type_id, offset = cursor.unpack("IQ")
    return name, shape, type_id, offset


def _tensor_info(name: str, shape: tuple[int, ...], type_id: int, offset: int) -> TensorInfo:
    known = {kind.value: kind for kind in GGMLQuantizationType}
    kind = known.get(type_id)
    if kind is None or kind.name not in SUPPORTED_TYPES:
        raise UnsupportedModel(f"type of {name}", kind.name if kind else type_id, ", ".join(SUPPORTED_TYPES))
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block or 0 in shape:
        raise BadCheckpoint(f"{name} has shape {shape}: its rows must be whole blocks of {block} for {kind.name}.")
    return TensorInfo(name, shape, kind.name, offset, math.prod(shape) // block * block_bytes)
