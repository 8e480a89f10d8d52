"""Streams to pages that are gone: ended, not broken."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Streams:
    """Ends what a page hears of its events where its session is not known any more.

    A page that is being left asks once more for the stream that its own leaving has cut. Gradio 6.31 tells it so in the
    stream and then raises behind the answer's beginning: the connection would break in the middle of it, with an error
    in the browser and another in the log.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not (scope["type"] == "http" and scope["path"].endswith("/queue/data")):
            await self.app(scope, receive, send)
            return
        begun = False

        async def send_noted(message: Message) -> None:
            nonlocal begun
            begun = begun or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, send_noted)
        except Exception as error:
            gone = error if isinstance(error, HTTPException) else error.__cause__
            if not (begun and isinstance(gone, HTTPException) and gone.status_code == 404):
                raise
            await send({"type": "http.response.body", "body": b"", "more_body": False})
