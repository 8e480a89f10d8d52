"""The API's routes together: models, completions, files, health and metrics."""

from __future__ import annotations

import time
from pathlib import Path

from fastapi import APIRouter, FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from app.api.completions import completions_router
from app.api.errors import ApiError, ApiRoute, add_handlers
from app.api.files import files_router
from app.api.metrics import metrics_text
from app.api.store import FileStore
from app.library.library import YOUNG_S
from app.service import ChatService

_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


def add_api(app: FastAPI, service: ChatService, folder: Path) -> None:
    """Put the API onto an app, ahead of the page that is mounted at its root; stored files lie in `folder`."""
    store = FileStore(folder)
    service.library.also_named = store.labels
    store.tidy(time.time() - YOUNG_S)
    add_handlers(app)
    app.include_router(_models_router(service))
    app.include_router(completions_router(service, store))
    app.include_router(files_router(service, store))
    app.include_router(_operations_router(service))

    @app.api_route("/v1", methods=_METHODS)
    @app.api_route("/v1/{path:path}", methods=_METHODS)
    async def unknown(request: Request) -> Response:
        raise ApiError(f"There is no {request.method} {request.url.path}.", 404, code="unknown_url")


def _models_router(service: ChatService) -> APIRouter:
    router = APIRouter(prefix="/v1/models", route_class=ApiRoute)
    since = int(time.time())

    def model() -> dict[str, object]:
        status = service.status()
        facts = {"id": status["model"], "object": "model", "created": since, "owned_by": "octavo"}
        return facts | {"context_length": status["context_capacity"]}

    @router.get("")
    async def listed() -> Response:
        return JSONResponse({"object": "list", "data": [model()]})

    @router.get("/{name:path}")
    async def one(name: str) -> Response:
        facts = model()
        if name != facts["id"]:
            raise ApiError(f"There is no model {name!r} here.", 404, "model", "model_not_found")
        return JSONResponse(facts)

    return router


def _operations_router(service: ChatService) -> APIRouter:
    router = APIRouter(route_class=ApiRoute)

    @router.get("/health")
    async def health() -> Response:
        """200 when questions can be asked, else 503; tells nothing that is anybody's."""
        if service.ready:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "loading" if service.load_error is None else "failed"}, 503)

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(metrics_text(service), media_type=CONTENT_TYPE_LATEST)

    return router
