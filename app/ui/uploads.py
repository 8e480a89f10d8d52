"""Files on their way in: streamed to a private folder, handed over once, deleted when read."""

from __future__ import annotations

import secrets
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from app.errors import DocumentTooLarge, UsageError

# A file that no chat has taken after this time belongs to a page that is gone.
ABANDONED_S = 600.0


@dataclass(frozen=True)
class Upload:
    """A received file: where it lies, what the person calls it, when it came (monotonic seconds)."""

    path: Path
    name: str
    at: float


class Uploads:
    """Receives one file a request and keeps it under an unguessable id until `take`."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._folder = Path(tempfile.mkdtemp(prefix="octavo-"))
        self._waiting: dict[str, Upload] = {}

    async def receive(self, request: Request) -> Response:
        """PUT with the raw file as body and its percent-encoded name in `X-File-Name`; answers {"id": ...}.

        The header is one that other sites' pages cannot send without this server's leave.
        """
        name = unquote(request.headers.get("x-file-name", ""))
        if not name:
            return JSONResponse({"error": "The header X-File-Name is missing."}, 400)
        self._drop_abandoned()
        upload_id = secrets.token_urlsafe(16)
        path = self._folder / upload_id
        size = 0
        try:
            self._check_size(name, int(request.headers.get("content-length") or 0))
            with path.open("wb") as file:
                async for part in request.stream():
                    size += len(part)
                    self._check_size(name, size)
                    file.write(part)
        except DocumentTooLarge as error:
            path.unlink(missing_ok=True)
            return JSONResponse({"error": str(error)}, error.http_status, {"Connection": "close"})
        except (ClientDisconnect, OSError) as error:
            path.unlink(missing_ok=True)
            return JSONResponse({"error": f"{name} could not be stored: {error or 'the upload broke off'}."}, 507)
        self._waiting[upload_id] = Upload(path, name, time.monotonic())
        return JSONResponse({"id": upload_id})

    def take(self, upload_id: object) -> Upload:
        """The received file of this id, once; the caller deletes it."""
        upload = self._waiting.pop(upload_id, None) if isinstance(upload_id, str) else None
        if upload is None:
            raise UsageError("This upload is no longer here. Add the file again.")
        return upload

    def close(self) -> None:
        """Delete everything that was not taken."""
        self._waiting.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _check_size(self, name: str, size: int) -> None:
        if size > self.max_bytes:
            limit = self.max_bytes / (1 << 20)
            raise DocumentTooLarge(f"{name} is larger than {limit:,.0f} MiB, the limit for one file. Split it.")

    def _drop_abandoned(self) -> None:
        limit = time.monotonic() - ABANDONED_S
        for upload_id in [key for key, upload in self._waiting.items() if upload.at < limit]:
            self._waiting.pop(upload_id).path.unlink(missing_ok=True)
