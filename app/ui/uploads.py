"""Files and folders on their way in: streamed to a private folder, handed over once, deleted when read."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import time
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO
from urllib.parse import unquote

from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from app import scratch
from app.documents.codebase import MAX_ENTRIES
from app.errors import DocumentTooLarge, OctavoError, UsageError

# A file that no chat has taken after this time belongs to a page that is gone.
ABANDONED_S = 600.0


@dataclass(frozen=True)
class Upload:
    """A received file or folder: where it lies, what the person calls it, when it came (monotonic seconds)."""

    path: Path
    name: str
    at: float

    def delete(self) -> None:
        """Delete it from the disk."""
        _delete(self.path)


class Uploads:
    """Receives one file or folder a request and keeps it under an unguessable id until `take`."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._folder = scratch.new_folder()
        self._waiting: dict[str, Upload] = {}

    async def receive(self, request: Request) -> Response:
        """PUT with the raw file as body and its percent-encoded name in `X-File-Name`; answers {"id": ...}.

        A folder comes as a form whose files have their paths for names. The header is one that other sites' pages
        cannot send without this server's leave.
        """
        name = unquote(request.headers.get("x-file-name", ""))
        if not name:
            return JSONResponse({"error": "The header X-File-Name is missing."}, 400)
        self._drop_abandoned()
        upload_id = secrets.token_urlsafe(16)
        path = self._folder / upload_id
        try:
            self._check_size(name, int(request.headers.get("content-length") or 0))
            if request.headers.get("content-type", "").startswith("multipart/form-data"):
                await _receive_folder(request, path)
            else:
                await self._receive_file(request, path, name)
        except OctavoError as error:
            _delete(path)
            return JSONResponse({"error": str(error)}, error.http_status, {"Connection": "close"})
        except HTTPException as error:  # a form that is none, or has too many parts
            _delete(path)
            return JSONResponse({"error": f"{name}: {error.detail}"}, error.status_code, {"Connection": "close"})
        except (ClientDisconnect, OSError) as error:
            _delete(path)
            why = getattr(error, "strerror", None)  # without the path, which is nobody's but this program's
            return JSONResponse({"error": f"{name} could not be stored: {why or 'the upload broke off'}."}, 507)
        self._waiting[upload_id] = Upload(path, name, time.monotonic())
        return JSONResponse({"id": upload_id})

    def take(self, upload_id: object) -> Upload:
        """The received file of this id, once; the caller deletes it."""
        upload = self._waiting.pop(upload_id, None) if isinstance(upload_id, str) else None
        if upload is None:
            raise UsageError("This upload is no longer here. Add the file again.")
        return upload

    def arrived(self, upload_id: object) -> float:
        """When the file of this id was whole (monotonic seconds); now where it is not here."""
        upload = self._waiting.get(upload_id) if isinstance(upload_id, str) else None
        return upload.at if upload is not None else time.monotonic()

    def close(self) -> None:
        """Delete everything that was not taken."""
        self._waiting.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _receive_file(self, request: Request, path: Path, name: str) -> None:
        size = 0
        with path.open("wb") as file:
            async for part in request.stream():
                size += len(part)
                self._check_size(name, size)
                file.write(part)

    def _check_size(self, name: str, size: int) -> None:
        if size > self.max_bytes:
            limit = self.max_bytes / (1 << 20)
            raise DocumentTooLarge(f"{name} is larger than {limit:,.0f} MiB, the limit for one file. Split it.")

    def _drop_abandoned(self) -> None:
        limit = time.monotonic() - ABANDONED_S
        for upload_id, upload in list(self._waiting.items()):  # threads take others meanwhile
            if upload.at < limit and self._waiting.pop(upload_id, None) is not None:
                upload.delete()


async def _receive_folder(request: Request, folder: Path) -> None:
    """Raises UsageError for a path that leads out of the folder."""
    folder.mkdir()
    async with request.form(max_files=MAX_ENTRIES, max_fields=0) as form:
        for _, file in form.multi_items():
            assert isinstance(file, UploadFile)
            parts = PurePosixPath((file.filename or "").replace("\\", "/")).parts
            outside = ".." in parts or "\0" in "".join(parts) or any(":" in part[:2] for part in parts)
            if not parts or outside or parts[0].startswith("/"):
                raise UsageError(f"The folder holds the path {file.filename!r}, which leads outside it.")
            path = folder.joinpath(*parts)
            path.parent.mkdir(parents=True, exist_ok=True)
            await asyncio.to_thread(_copy, file.file, path)


def _copy(file: BinaryIO, path: Path) -> None:
    with path.open("wb") as target:
        shutil.copyfileobj(file, target, 1 << 20)


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
