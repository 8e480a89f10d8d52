"""Answers on their way to a client: events of the engine in an event loop, as one JSON or as server-sent events."""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from app.api.errors import ApiError, body_of
from app.engine.generation import Generation
from app.engine.types import Done, Event, Failed, FinishReason, Progress, Queued, Token, Usage

KEEP_ALIVE_S = 5.0  # proxies and clients give up on a silent connection, often after 30 s
_LOOK_S = 0.25  # how soon a client that has gone is noticed
# A client for which nothing could be sent for so long is taken for one that has gone. One that reads slowly makes room
# in steps, of megabytes in the system's buffers: a minute would cut it off.
STALLED_S = 600.0

# A loop is an answer cut short, which is what clients take "length" for.
_REASONS: dict[FinishReason, str] = {"stop": "stop", "length": "length", "loop": "length"}


class Events:
    """One answer's events in an event loop. A thread takes them, so that a slow client never holds the engine."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Event] = asyncio.Queue()
        self.looked_at = 0.0  # when it was last seen whether the client is there
        threading.Thread(target=self._pump, name="api-answer", daemon=True).start()

    async def next(self, timeout: float) -> Event | None:
        """The next event; None after `timeout` seconds without one."""
        try:
            return await asyncio.wait_for(self._queue.get(), timeout)
        except TimeoutError:
            return None

    def cancel(self) -> None:
        """End the answer at its next chunk or token."""
        self._generation.cancel()

    def _pump(self) -> None:
        try:
            for event in self._generation:
                self._loop.call_soon_threadsafe(self._queue.put_nowait, event)
        except RuntimeError:  # the loop is closed, and the answer cancelled by leaving its events
            pass


def usage_of(usage: Usage) -> dict[str, Any]:
    """Usage as OpenAI counts it; `cached_tokens` were in the cache already."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class Shape:
    """How one of the two routes writes its answers: `whole` is its object's name, `part` that of a chunk."""

    def __init__(self, model: str, whole: str, part: str, prefix: str, chat: bool) -> None:
        self._base = {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._whole, self._part, self._chat = whole, part, chat

    def answer(self, done: Done) -> dict[str, Any]:
        """The whole answer."""
        said = {"message": {"role": "assistant", "content": done.text}} if self._chat else {"text": done.text}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": _REASONS[done.finish_reason]}
        return {**self._base, "object": self._whole, "choices": [choice], "usage": usage_of(done.usage)}

    def chunk(self, delta: dict[str, str], reason: str | None = None) -> dict[str, Any]:
        """A piece of it: `delta` is a chat's, of which a text completion shows the content."""
        said = {"delta": delta} if self._chat else {"text": delta.get("content", "")}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": reason}
        return {**self._base, "object": self._part, "choices": [choice]}

    def last(self, done: Done) -> dict[str, Any]:
        """The chunk that tells the usage."""
        return {**self._base, "object": self._part, "choices": [], "usage": usage_of(done.usage)}


def chat_shape(model: str) -> Shape:
    return Shape(model, "chat.completion", "chat.completion.chunk", "chatcmpl", True)


def text_shape(model: str) -> Shape:
    return Shape(model, "text_completion", "text_completion", "cmpl", False)


class _Stream(StreamingResponse):
    """Ends its answer however the sending ends, also before its first line: the client may have gone by then.

    One that is still there and takes nothing would have the engine write for it alone, in endless mode for ever.
    """

    def __init__(self, events: Events, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(STALLED_S):
                await send(message)

        try:
            with suppress(TimeoutError, ClientDisconnect):  # whichever the one becomes on its way out
                await super().__call__(scope, receive, send_in_time)
        finally:
            self._events.cancel()


async def respond(
    request: Request, start: Callable[[], Generation], shape: Shape, stream: bool, with_usage: bool
) -> Response:
    """Start an answer and send it; raises what went wrong. A client that goes away ends it."""
    events = Events(await asyncio.to_thread(start))
    try:
        first = await _next(request, events)  # what fails at once is told by its status
        if isinstance(first, Failed):
            raise first.error
        if stream:
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            body = _sse(request, events, first, shape, with_usage)
            return _Stream(events, body, media_type="text/event-stream", headers=headers)
        event: Event | None = first
        while not isinstance(event, Done | Failed):
            event = await _next(request, events)
        return JSONResponse(shape.answer(_ended(event)))
    except BaseException:
        events.cancel()
        raise


async def _next(request: Request, events: Events) -> Event:
    while True:
        event = await events.next(_LOOK_S)
        if time.monotonic() - events.looked_at >= _LOOK_S:  # also where tokens come without a pause
            events.looked_at = time.monotonic()
            if await request.is_disconnected():
                raise ApiError("The client has gone.", 499)
        if event is not None:
            return event


def _ended(event: Event) -> Done:
    if isinstance(event, Failed):
        raise event.error
    assert isinstance(event, Done)
    if event.finish_reason == "cancelled":
        raise ApiError("The answer was stopped: the server is closing.", 503)
    return event


async def _sse(request: Request, events: Events, first: Event, shape: Shape, with_usage: bool) -> AsyncIterator[str]:
    def data(body: dict[str, Any]) -> str:
        if with_usage and "usage" not in body:
            body = {**body, "usage": None}
        return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"

    try:
        yield data(shape.chunk({"role": "assistant", "content": ""}))
        event: Event | None = first
        quiet_since = time.monotonic()
        while True:
            match event:
                case Token(text) if text:
                    yield data(shape.chunk({"content": text}))
                    quiet_since = time.monotonic()
                case Done() | Failed():
                    done = _ended(event)
                    yield data(shape.chunk({}, _REASONS[done.finish_reason]))
                    if with_usage:
                        yield data(shape.last(done))
                    yield "data: [DONE]\n\n"
                    return
                case _ if time.monotonic() - quiet_since >= KEEP_ALIVE_S:
                    yield _comment(event)
                    quiet_since = time.monotonic()
            event = await events.next(_LOOK_S)
            if event is None and await request.is_disconnected():
                return
    except Exception as error:  # too late for a status: clients raise on an error in the stream
        yield f"data: {json.dumps(body_of(error)[0])}\n\n"


def _comment(event: Event | None) -> str:
    """A line that clients skip, and people who watch the stream read."""
    if isinstance(event, Progress):
        return f": reading {event.done} of {event.total} tokens\n\n"
    if isinstance(event, Queued):
        return f": waiting, place {event.place}\n\n"
    return ": keep-alive\n\n"
