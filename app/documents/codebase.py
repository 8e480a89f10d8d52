"""Folders and archives as one document: a tree of what is in them, then every text under its path."""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from types import MappingProxyType

from app.documents.archive import Archive, Locked
from app.documents.document import Extract, Limits, clean, shortened
from app.errors import BadDocument, DocumentTooLarge
from app.words import plural

MAX_ENTRIES = 50_000
MAX_FILE_BYTES = 16 << 20  # of one file inside; data sets are no code
_TREE_LINES = 2_000

# Folders that tools fill, and files that only they read.
_TOOL_FOLDERS = frozenset(
    ".git .hg .svn .tox .nox .venv venv .idea .vscode .gradle .terraform .next .cache .eggs __pycache__ __MACOSX"
    " .mypy_cache .pytest_cache .ruff_cache .hypothesis node_modules bower_components".split()
)
_IN_TOOLS = "in folders of tools"
_LOCK_FILES = frozenset(
    "package-lock.json npm-shrinkwrap.json pnpm-lock.yaml bun.lockb go.sum Package.resolved packages.lock.json"
    " gradle.lockfile .terraform.lock.hcl pubspec.lock".split()
)
_GENERATED = (".min.js", ".min.css", ".js.map", ".css.map", ".pyc", ".DS_Store")
_BINARY = "binary or not readable"
_DAMAGED = "damaged in the archive"
# Names of pictures, sounds, videos, fonts, programs, weights and data: what is short or damaged may look like a text.
_BINARY_SUFFIXES = frozenset(
    ".png .jpg .jpeg .gif .bmp .tif .tiff .webp .ico .icns .heic .heif .avif .jxl .psd .xcf .cr2 .nef .dng"
    " .mp3 .wav .flac .ogg .oga .opus .m4a .aac .wma .aif .aiff .mid .midi"
    " .mp4 .m4v .mkv .webm .avi .mov .wmv .flv .mpg .mpeg .ogv .3gp"
    " .ttf .otf .ttc .woff .woff2 .eot .pfb"
    " .exe .dll .so .dylib .o .a .class .jar .war .wasm .pyd .pyo .msi .apk .dmg .iso .deb .rpm"
    " .safetensors .gguf .ggml .onnx .ckpt .tflite .bin .npy .npz .pkl .h5 .hdf5 .parquet .sqlite".split()
)

# Reads one file's content as a document of its own would be read; raises BadDocument for what is none.
ReadFile = Callable[[bytes, str], Extract]


@dataclass(frozen=True)
class Entry:
    """A file of a folder or archive: its path with slashes, its size in bytes, and how to read it."""

    path: str
    size: int
    load: Callable[[], bytes]


def read_archive(archive: Archive, name: str, limits: Limits, read_file: ReadFile) -> Extract:
    """A zip archive that is no document of another kind. Nothing of it is written to disk."""
    entries = []
    for member in archive.file.infolist():
        if not member.is_dir() and not stat.S_ISLNK(member.external_attr >> 16):
            path = member.filename.replace("\\", "/")
            entries.append(Entry(path, member.file_size, partial(archive.read, member)))
    return read_entries(entries, name, limits, read_file)


def read_folder(folder: Path, name: str, limits: Limits, read_file: ReadFile) -> Extract:
    """A folder on disk; links are not followed."""
    entries = []
    total, left_out = 0, Counter[str]()
    for path in _walk(folder, left_out):
        size = path.stat(follow_symlinks=False).st_size
        shown = path.relative_to(folder).as_posix()
        if _tools(shown) is None:
            total += min(size, MAX_FILE_BYTES)
        if total > limits.max_unpacked_bytes:
            raise DocumentTooLarge(f"{name} holds more than {limits.max_unpacked_bytes >> 20:,} MiB. Add a part of it.")
        entries.append(Entry(shown, size, path.read_bytes))
    return read_entries(entries, name, limits, read_file, left_out)


def _walk(folder: Path, left_out: Counter[str]) -> Iterator[Path]:
    """Files that may be read; those in folders of tools are only counted, as in an archive."""
    found = 0
    for place, folders, files in os.walk(folder):
        for tools in _TOOL_FOLDERS.intersection(folders):
            left_out[_IN_TOOLS] += sum(len(inside) for _, _, inside in os.walk(Path(place, tools)))
        folders[:] = sorted(name for name in folders if name not in _TOOL_FOLDERS)
        for file in sorted(files):
            path = Path(place, file)
            if path.is_file() and not path.is_symlink():
                found += 1
                if found > MAX_ENTRIES:
                    raise DocumentTooLarge(f"{folder.name} holds more than {MAX_ENTRIES:,} files. Add a part of it.")
                yield path


def _names_nothing(path: str) -> bool:
    """Whether a path has no part that is a name, as "." and "/" have none: it leads nowhere, and is left out."""
    return not PurePosixPath(path.lstrip("/")).parts


def check_inside(path: str, name: str) -> None:
    """Raise BadDocument for a path of an archive that leads outside it; slashes as on Unix."""
    if _names_nothing(path):
        return
    if ".." in PurePosixPath(path).parts or path.startswith("/") or re.match("[A-Za-z]:", path):
        raise BadDocument(f"{name} holds the path {path!r}, which leads outside it; it is refused.")


def is_read(path: str, size: int) -> bool:
    """Whether a file inside is looked into at all."""
    return _passed_over(path, size) is None


def read_entries(
    entries: list[Entry],
    name: str,
    limits: Limits,
    read_file: ReadFile,
    left_out: Mapping[str, int] = MappingProxyType({}),
) -> Extract:
    """One document of many files; `left_out` counts what is no entry, by why."""
    if len(entries) > MAX_ENTRIES:
        raise DocumentTooLarge(f"{name} holds {len(entries):,} files; {MAX_ENTRIES:,} are the most. Add a part of it.")
    skipped = Counter({why: number for why, number in left_out.items() if number})
    read: list[tuple[str, Extract]] = []
    notes: list[str] = []
    chars = 0
    for entry in sorted(entries, key=lambda entry: PurePosixPath(entry.path).parts):
        limits.check_time(name)
        path = _printable(entry.path)
        why = "without a name" if _names_nothing(path) else _passed_over(entry.path, entry.size)
        data = None
        try:
            data = b"" if why else entry.load()
            extract = None if why or not data.strip() else read_file(data, path)
        except (DocumentTooLarge, Locked):
            raise
        except BadDocument:
            why, extract = (_DAMAGED if data is None else _BINARY), None
        except OSError:
            why, extract = "not allowed to be opened", None
        except Exception as error:  # a reader broke on it; the others are read all the same
            why, extract = _BINARY, None
            notes.append(f"{path}: left out, its reader broke on it ({type(error).__name__}).")
        if why:
            skipped[why] += 1
            continue
        read.append((path, extract or Extract("text", [""])))
        if extract is not None:
            chars += sum(map(len, extract.pages))
            limits.check_chars(name, chars)
            notes += (f"{path}: {warning}" for warning in extract.warnings)
    if not any("".join(extract.pages).strip() for _, extract in read):
        raise BadDocument(f"{name} holds no text: {_told(skipped) or 'it is empty'}. Add the files that matter.")
    warnings = (
        [f"{plural(sum(skipped.values()), 'file')} skipped: {_told(skipped)}. No answer knows them."] if skipped else []
    )
    if len(notes) > 5:
        notes[5:] = [f"{len(notes) - 5:,} more such notes."]
    return _lay_out(name, read, (*warnings, *notes))


def _lay_out(name: str, read: list[tuple[str, Extract]], warnings: tuple[str, ...]) -> Extract:
    tree = list(_tree([path for path, _ in read]))
    shown = tree if len(tree) <= _TREE_LINES else [*tree[:_TREE_LINES], f"({len(tree) - _TREE_LINES:,} lines more)"]
    pages = [f"{name}: {plural(len(read), 'file')}\n\n" + "\n".join(shown) + "\n\n"]
    files: list[tuple[str, int, int]] = []
    for path, extract in read:
        if not "".join(extract.pages).strip():  # an empty file stands in the tree
            continue
        head = f"=== {path} ===\n\n"
        files.append((path, len(pages), len(head)))
        first, *others = extract.pages
        pages += [head + first, *others]
        pages[-1] = pages[-1].rstrip("\n") + "\n\n"
    return Extract("code", pages, warnings, tuple(files))


def _tree(paths: list[str]) -> Iterator[str]:
    """Lines that show folders and what is in them, each folder once."""
    open_folders: tuple[str, ...] = ()
    for path in paths:
        *folders, file = PurePosixPath(path).parts
        same = 0
        while same < min(len(folders), len(open_folders)) and folders[same] == open_folders[same]:
            same += 1
        for depth in range(same, len(folders)):
            yield "  " * depth + folders[depth] + "/"
        open_folders = tuple(folders)
        yield "  " * len(folders) + file


def _passed_over(path: str, size: int) -> str | None:
    return _tools(path) or ("larger than 16 MiB" if size > MAX_FILE_BYTES else None)


def _tools(path: str) -> str | None:
    """Why a file is not worth reading, by its path alone; None when it is."""
    *folders, file = PurePosixPath(path).parts or ("",)
    if _TOOL_FOLDERS.intersection(folders):
        return _IN_TOOLS
    if file in _LOCK_FILES or file.endswith((".lock", ".lockb")):
        return "lock files"
    if file.endswith(_GENERATED):
        return "generated"
    return _BINARY if PurePosixPath(file).suffix.lower() in _BINARY_SUFFIXES else None


def _printable(path: str) -> str:
    return shortened(" ".join(clean(path)[0].split()), 300)


def _told(skipped: Counter[str]) -> str:
    return ", ".join(f"{number:,} {why}" for why, number in skipped.most_common())
