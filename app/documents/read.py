"""One door for every file: find out what it is by its content, read it, refuse what is no document."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path, PurePath

from app.documents import codebase, docx, epub, html, notebook, odt, packed, pdf, rtf, text
from app.documents.archive import Archive, Locked, open_archive
from app.documents.document import Document, Extract, File, Limits, clean, lay_out, shortened
from app.errors import BadDocument, DocumentTooLarge
from app.words import plural

_TRY = "Save it as PDF, DOCX or plain text and upload that."
_ARCHIVE = "Unpack it and upload the files inside."

# Marks that turn the direction of writing: in a name they can make an ending look like another.
_BIDI = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_ZIP = (b"PK\x03\x04", b"PK\x05\x06")
_OFFICE = (".docx", ".xlsx", ".pptx", ".odt", ".ods", ".odp")
# Openings of common files that hold no text of their own: (offset, magic, what it is, what to do).
_MAGIC: tuple[tuple[int, bytes, str, str], ...] = (
    (0, b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an old or password-protected Office file", _TRY),
    (0, b"%!PS", "a PostScript file", _TRY),
    (0, b"\x89PNG\r\n\x1a\n", "a PNG picture", "Run text recognition (OCR) on it first."),
    (0, b"\xff\xd8\xff", "a JPEG picture", "Run text recognition (OCR) on it first."),
    (0, b"GIF8", "a GIF picture", "Run text recognition (OCR) on it first."),
    (0, b"II*\x00", "a TIFF picture", "Run text recognition (OCR) on it first."),
    (0, b"MM\x00*", "a TIFF picture", "Run text recognition (OCR) on it first."),
    (8, b"WEBP", "a WebP picture", "Run text recognition (OCR) on it first."),
    (0, b"\x28\xb5\x2f\xfd", "a Zstandard archive", _ARCHIVE),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive", _ARCHIVE),
    (0, b"Rar!\x1a\x07", "a RAR archive", _ARCHIVE),
    (0, b"LZIP", "an lzip archive", _ARCHIVE),
    (0, b"\x1f\x9d", "a compress archive", _ARCHIVE),
    (0, b"\x04\x22\x4d\x18", "an LZ4 archive", _ARCHIVE),
    (0, b"MSCF", "a cabinet archive", _ARCHIVE),
    (0, b"ITSF", "a compiled HTML help file (CHM)", "Export it as HTML or PDF."),
    (0, b"AT&TFORM", "a DjVu document", "Export its text, or convert it to a PDF with text."),
    (60, b"BOOKMOBI", "a Kindle book", "Convert it to EPUB or PDF."),
    (0, b"BM", "a BMP picture", "Run text recognition (OCR) on it first."),
    (0, b"8BPS", "a Photoshop picture", "Run text recognition (OCR) on it first."),
    (0, b"PAR1", "a Parquet table", "Export what you need as CSV."),
    (0, b"\x89HDF\r\n\x1a\n", "an HDF5 data set", "Export what you need as CSV."),
    (0, b"\x93NUMPY", "a NumPy array", "Export what you need as CSV."),
    (0, b"\x80\x04\x95", "a Python pickle, which is never opened", "Export what you need as JSON or CSV."),
    (0, b"\x00asm", "a WebAssembly program", "Upload a text."),
    (0, b"\xca\xfe\xba\xbe", "a Java or macOS program", "Upload a text."),
    (0, b"fLaC", "an audio file", "Upload a transcript."),
    (8, b"WAVE", "an audio file", "Upload a transcript."),
    (8, b"AVI ", "a video", "Upload a transcript."),
    (0, b"\x1aE\xdf\xa3", "a video", "Upload a transcript."),
    (0, b"\x7fELF", "a program", "Upload a text."),
    (0, b"MZ", "a Windows program", "Upload a text."),
    (0, b"SQLite format 3\x00", "an SQLite database", "Export what you need as CSV."),
    (0, b"GGUF", "a GGUF model", "Give it to --model instead."),
    (0, b"OggS", "an audio file", "Upload a transcript."),
    (0, b"ID3", "an audio file", "Upload a transcript."),
    (4, b"ftyp", "a video or audio file", "Upload a transcript."),
)


def read_document(path: Path, name: str = "", limits: Limits | None = None) -> Document:
    """Read the file at `path`, shown to people as `name` (default: the file's own).

    Raises DocumentTooLarge for a file over the limits, BadDocument for one that is no readable document.
    """
    limits = limits or Limits()
    name = display_name(name or path.resolve().name)
    if os.path.isdir(path):  # os.path: no error where a name is too long to be one
        extract = codebase.read_folder(path, name, limits, _inside(limits))
        data = "".join(extract.pages).encode()
    else:
        data = _load(path, name, limits)
        extract = _extract(data, name, limits)
    return _document(extract, name, data, limits)


def display_name(name: str) -> str:
    """The last part of a path, on one line: the name goes into the prompt and onto the page."""
    base = re.split(r"[/\\]", name.rstrip("/\\"))[-1]
    return shortened(" ".join(_BIDI.sub("", clean(base)[0]).split()), 120) or "document"


def _load(path: Path, name: str, limits: Limits) -> bytes:
    if not os.path.exists(path):
        raise BadDocument(f"{path}: there is no such file.")
    if not path.is_file():
        raise BadDocument(f"{path} is no regular file. Name a file or a folder.")
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size  # no room is asked for that the file does not need
            data = file.read(min(size, limits.max_bytes) + 1)
    except OSError as error:
        raise BadDocument(f"{path} cannot be opened: {error.strerror or error}.") from error
    if len(data) > limits.max_bytes:
        raise DocumentTooLarge(
            f"{name} has {size / (1 << 20):,.1f} MiB; the limit is {limits.max_bytes / (1 << 20):,.1f} MiB."
            " Split the file."
        )
    if not data.strip(b"\x00 \t\r\n\f"):
        raise BadDocument(f"{name} is empty.")
    return data


def _inside(limits: Limits) -> codebase.ReadFile:
    """Reads files inside a folder or archive; archives in archives are not opened."""

    def read(data: bytes, name: str) -> Extract:
        documents = (".docx", ".epub", ".odt")
        zipped = data.startswith(_ZIP) and PurePath(name).suffix.lower() not in documents
        if zipped or packed.is_packed(data) or packed.is_tar(data):
            raise BadDocument(f"{name} is an archive inside another.")
        try:
            return _extract(data, name, limits)
        except Locked as error:  # this document alone, not what it lies in
            raise BadDocument(str(error)) from error

    return read


def _extract(data: bytes, name: str, limits: Limits) -> Extract:
    suffix = PurePath(name).suffix.lower()
    # PDF readers accept up to 1,024 bytes before the header.
    if b"%PDF-" in data[:1024] and (suffix == ".pdf" or data[:1024].lstrip().startswith(b"%PDF-")):
        return pdf.read(data, name, limits)
    if data.startswith(_ZIP):
        return _read_zip(data, name, limits)
    if packed.is_tar(data):
        return packed.read_tar(data, name, limits, _inside(limits))
    if packed.is_packed(data):
        return packed.read_packed(data, name, limits, _inside(limits))
    if data.startswith(b"{\\rtf"):
        return rtf.read(data, name, limits)
    for offset, magic, what, advice in _MAGIC:
        # Two letters may open a text as well: "BM" and "MZ" count only where a binary goes on behind them.
        if data.startswith(magic, offset) and (len(magic) > 2 or 0 in data[:64]):
            raise BadDocument(f"{name} is {what}, which is not read. {advice}")
    if suffix in (".pdf", ".docx", ".epub", ".zip", ".odt", ".rtf", ".tar", ".tgz", ".gz", ".bz2", ".xz"):
        what = "an HTML page" if html.looks_like_html(data) else "no " + suffix[1:].upper() + " file"
        raise BadDocument(
            f"{name} is {what}, although its name ends in {suffix}."
            " The download may have saved a login or error page instead: open it and save the real file."
        )
    if suffix in (".html", ".htm", ".xhtml"):
        return html.read(data, name, limits)
    if suffix == ".ipynb":
        return notebook.read(data, name, limits)
    return text.read(data, name, limits)


def _read_zip(data: bytes, name: str, limits: Limits) -> Extract:
    archive = open_archive(data, name)
    _check_members(archive, name, limits)
    names = set(archive.names)
    if "word/document.xml" in names:
        return docx.read(archive, name, limits)
    if "xl/workbook.xml" in names:
        raise BadDocument(f"{name} is an Excel workbook, which is not read. Export its sheets as CSV.")
    if "ppt/presentation.xml" in names:
        raise BadDocument(f"{name} is a PowerPoint file, which is not read. Export it as PDF.")
    if "META-INF/container.xml" in names or PurePath(name).suffix.lower() == ".epub":
        return epub.read(archive, name, limits)
    if {"mimetype", "content.xml"} <= names:
        return _read_open_document(archive, name, limits)
    if (suffix := PurePath(name).suffix.lower()) in _OFFICE:
        raise BadDocument(f"{name} is a ZIP archive, although its name ends in {suffix}. Open it and save it again.")
    return codebase.read_archive(archive, name, limits, _inside(limits))


_ODF = b"application/vnd.oasis.opendocument."


def _read_open_document(archive: Archive, name: str, limits: Limits) -> Extract:
    kind = archive.read("mimetype")
    if kind.startswith(_ODF + b"text"):
        return odt.read(archive, name, limits)
    if kind.startswith(_ODF + b"spreadsheet"):
        raise BadDocument(f"{name} is an OpenDocument spreadsheet, which is not read. Export its sheets as CSV.")
    raise BadDocument(f"{name} is an OpenDocument presentation or drawing, which is not read. Export it as PDF.")


def _check_members(archive: Archive, name: str, limits: Limits) -> None:
    """Refuse what unpacks to too much, holds too many files or leads outside, before anything is unpacked."""
    members = archive.file.infolist()
    if len(members) > codebase.MAX_ENTRIES:
        most = codebase.MAX_ENTRIES
        raise DocumentTooLarge(f"{name} holds {len(members):,} files; {most:,} are the most. Add a part of it.")
    # zipfile gives no more than a member's stated size, so that the sum is a bound whatever the file says.
    unpacked = sum(member.file_size for member in members)
    if unpacked > limits.max_unpacked_bytes:
        raise DocumentTooLarge(
            f"{name} unpacks to {unpacked / (1 << 20):,.1f} MiB;"
            f" the limit is {limits.max_unpacked_bytes / (1 << 20):,.1f} MiB. Split the file."
        )
    for member in members:
        codebase.check_inside(member.filename.replace("\\", "/"), name)


def _document(extract: Extract, name: str, data: bytes, limits: Limits) -> Document:
    warnings = list(extract.warnings)
    pages, removed = [], 0
    for page in extract.pages:
        cleaned, found = clean(page)
        pages.append(cleaned)
        removed += found
    if removed:
        warnings.append(f"{plural(removed, 'control character')} removed.")
    content, spans = lay_out(pages)
    limits.check_chars(name, len(content))
    if not content.strip():
        raise BadDocument(f"{name} holds no text.")
    files = []
    for at, (path, first, ahead) in enumerate(extract.files):
        last = extract.files[at + 1][1] if at + 1 < len(extract.files) else len(spans)
        files.append(File(path, spans[first].start + ahead, spans[last - 1].end))
    digest = hashlib.sha256(data).hexdigest()
    return Document(name, extract.kind, content, spans, tuple(warnings), len(data), digest, tuple(files))
