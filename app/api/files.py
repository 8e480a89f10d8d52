"""/v1/files: store a document, so that a chat can ask about it by id."""

from __future__ import annotations

import asyncio
import base64
import shutil
from typing import Any

from fastapi import APIRouter, Request
from starlette.datastructures import UploadFile
from starlette.responses import FileResponse, JSONResponse, Response

from app import scratch
from app.access import owner_of
from app.api.errors import ApiError, ApiRoute
from app.api.schema import FileRef
from app.api.store import FileStore
from app.documents import Document, Limits, read_safely
from app.errors import DocumentTooLarge
from app.service import ChatService

_PURPOSES = ("user_data", "assistants")


def files_router(service: ChatService, store: FileStore) -> APIRouter:
    """The routes over a store; what `service` has read of a file goes with it."""
    router = APIRouter(prefix="/v1/files", route_class=ApiRoute)

    @router.post("")
    async def upload(request: Request) -> Response:
        if not request.headers.get("content-type", "").startswith("multipart/form-data"):
            raise ApiError("Send the file as multipart/form-data.", 415)
        async with request.form(max_files=1, max_fields=8) as form:
            for name in form:
                if name not in ("file", "purpose"):
                    raise ApiError(f"{name} is not supported.", param=name, code="unsupported_parameter")
            file, purpose = form.get("file"), form.get("purpose")
            if not isinstance(file, UploadFile) or not file.filename:
                raise ApiError("file is missing.", param="file", code="missing_required_parameter")
            if purpose not in _PURPOSES:
                raise ApiError(f"purpose is {purpose!r}; {' and '.join(_PURPOSES)} are supported.", param="purpose")
            stored = await asyncio.to_thread(_keep, store, file, str(purpose), owner_of(request))
        return JSONResponse(stored.as_object())

    @router.get("")
    async def listed(
        request: Request, purpose: str = "", limit: int = 10_000, after: str = "", order: str = "desc"
    ) -> Response:
        if not 1 <= limit <= 10_000:
            raise ApiError("limit must be from 1 to 10,000.", param="limit")
        if order not in ("asc", "desc"):
            raise ApiError("order must be asc or desc.", param="order")
        files = await asyncio.to_thread(store.files, owner_of(request))
        files = [file for file in files if purpose in ("", file.purpose)][:: -1 if order == "asc" else 1]
        if after:
            places = [at for at, file in enumerate(files) if file.id == after]
            if not places:
                raise ApiError(f"after: there is no file {after!r}.", param="after")
            files = files[places[0] + 1 :]
        shown = [file.as_object() for file in files[:limit]]
        first, last = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
        more = len(files) > limit
        return JSONResponse({"object": "list", "data": shown, "first_id": first, "last_id": last, "has_more": more})

    @router.get("/{file_id}")
    async def facts(request: Request, file_id: str) -> Response:
        return JSONResponse(store.get(file_id, owner_of(request)).as_object())

    @router.get("/{file_id}/content")
    async def content(request: Request, file_id: str) -> Response:
        stored = store.get(file_id, owner_of(request))
        # Never shown by a browser as a page of this server, whatever is in it.
        return FileResponse(
            store.path(file_id, stored.owner), media_type="application/octet-stream", filename=stored.filename
        )

    @router.delete("/{file_id}")
    async def delete(request: Request, file_id: str) -> Response:
        await asyncio.to_thread(_delete, service, store, file_id, owner_of(request))
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    return router


def _keep(store: FileStore, file: UploadFile, purpose: str, owner: str) -> Any:
    assert file.filename is not None
    with scratch.temporary_folder() as folder:
        path = folder / "upload"
        with path.open("wb") as target:
            shutil.copyfileobj(file.file, target, 1 << 20)
        return store.add(path, file.filename, purpose, owner)


def _delete(service: ChatService, store: FileStore, file_id: str, owner: str) -> None:
    label = store.get(file_id, owner).label
    store.delete(file_id, owner)
    if label:
        service.library.let_go(label, service.forget)


def open_document(store: FileStore, ref: FileRef, owner: str) -> Document:
    """The document that a message's part names or carries."""
    if ref.file_id is not None:
        return store.document(ref.file_id, owner)
    assert ref.file_data is not None
    head, comma, body = ref.file_data.partition(",")
    if comma and not (head.startswith("data:") and head.endswith(";base64")):
        raise ApiError("file_data must be base64, bare or as data:TYPE;base64,...", param="messages")
    body = body if comma else head
    limit = Limits().max_bytes
    if len(body) > limit * 4 // 3 + 4:
        raise DocumentTooLarge(f"file_data is larger than {limit >> 20} MiB. Store it with /v1/files, or split it.")
    try:
        data = base64.b64decode(body, validate=True)
    except ValueError as error:  # also for letters that are no ASCII
        raise ApiError(f"file_data is no base64: {error}.", param="messages") from error
    with scratch.temporary_folder() as folder:
        path = folder / "inline"
        path.write_bytes(data)
        return read_safely(path, ref.filename or "document")
