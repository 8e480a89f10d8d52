"""/v1/chat/completions and /v1/completions."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.access import owner_of
from app.api.errors import ApiError, ApiRoute
from app.api.files import open_document
from app.api.schema import ChatMessage, ChatRequest, CompletionRequest, FilePart
from app.api.store import FileStore
from app.api.stream import chat_shape, respond, text_shape
from app.chat import Selection
from app.conversation import Message
from app.engine.generation import Generation
from app.errors import ContextTooLong, UsageError
from app.service import ChatService

MAX_WAITING = 64  # requests in line; more would wait for hours


def completions_router(service: ChatService, store: FileStore) -> APIRouter:
    """The two routes over a service and the stored files."""
    router = APIRouter(prefix="/v1", route_class=ApiRoute)

    @router.post("/chat/completions")
    async def chat(request: Request, body: ChatRequest) -> Response:
        _check(service, body.model)
        owner = owner_of(request)

        def start() -> Generation:
            messages = [_message(at, message, store, owner) for at, message in enumerate(body.messages)]
            return _naming("messages", lambda: service.converse(messages, body.sampling(), _bucket(owner, body.bucket)))

        usage = body.stream_options is not None and body.stream_options.include_usage
        return await respond(request, start, chat_shape(body.model), body.stream, usage)

    @router.post("/completions")
    async def text(request: Request, body: CompletionRequest) -> Response:
        _check(service, body.model)
        prompt, bucket = body.text_or_ids, _bucket(owner_of(request), body.bucket)

        def start() -> Generation:
            return _naming("prompt", lambda: service.complete(prompt, body.sampling(), bucket))

        usage = body.stream_options is not None and body.stream_options.include_usage
        return await respond(request, start, text_shape(body.model), body.stream, usage)

    return router


def _check(service: ChatService, model: str) -> None:
    status = service.status()
    if model != status["model"]:
        raise ApiError(
            f"There is no model {model!r} here; {status['model']!r} is loaded.", 404, "model", "model_not_found"
        )
    if status["waiting"] >= MAX_WAITING:
        raise ApiError(f"{MAX_WAITING} requests wait already. Try again later.", 429, code="queue_full")


def _bucket(owner: str, key: str) -> str:
    return f"{owner} {key}" if key else ""


def _naming(param: str, ask: Callable[[], Generation]) -> Generation:
    try:
        return ask()
    except ContextTooLong as error:  # OpenAI's own status and code: clients shorten the prompt on them
        raise ApiError(str(error), param=param, code="context_length_exceeded") from error
    except UsageError as error:
        raise ApiError(str(error), param=param) from error


def _message(at: int, message: ChatMessage, store: FileStore, owner: str) -> Message:
    role = "system" if message.role == "developer" else message.role
    if isinstance(message.content, str):
        return Message(role, message.content)
    texts, sources = [], []
    for part in message.content:
        if not isinstance(part, FilePart):
            texts.append(part.text)
        elif role == "user":
            sources.append(Selection.whole(open_document(store, part.file, owner)))
        else:
            raise ApiError("Files belong into messages of the user.", param=f"messages[{at}].content")
    return Message(role, "\n\n".join(texts), tuple(sources))
