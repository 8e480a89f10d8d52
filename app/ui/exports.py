"""Chats as files, for the browser that they belong to."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.library import Library
from app.ui.session import SECRET

_TYPES = {"md": "text/markdown", "json": "application/json"}


class Exports:
    """GET /exports/ID.md or .json; the browser's secret comes in `X-Octavo-Browser`, which no link can send."""

    def __init__(self, library: Library) -> None:
        self._library = library

    async def send(self, request: Request) -> Response:
        """The file, or 404 also for a chat that belongs to another browser."""
        chat_id, _, kind = request.path_params["name"].rpartition(".")
        secret = request.headers.get("x-octavo-browser", "")
        text = None
        if SECRET.fullmatch(secret) and kind in _TYPES:
            text = await asyncio.to_thread(self._library.owner(secret).export_chat, chat_id, kind)
        if text is None:
            return JSONResponse({"error": "This browser has no such chat."}, 404)
        return Response(text, media_type=f"{_TYPES[kind]}; charset=utf-8", headers={"Cache-Control": "no-store"})
