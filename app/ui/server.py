"""The web server: one socket for the page, its uploads and the API."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from app.access import Access, Guard, is_local
from app.config import Settings
from app.documents import Limits
from app.errors import UsageError, describe

if TYPE_CHECKING:
    from app.service import ChatService

log = logging.getLogger("octavo.ui")

# What the page and the API wait for beside the event loop is mostly waiting itself (for a file to be read, for the
# engine); asyncio's own number, a few more than there are processors, would let a few slow files hold up everybody.
_THREADS = 64
_LOADER_S = 20.0  # loading ends at its next word of progress, which may be a layer away


_PROXIES = ["127.0.0.1", "::1"]  # whose word on who asks is believed, with --behind-proxy


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; UsageError in plain words when the address or port cannot be had."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise UsageError(f"--host {host} is no address of this machine ({error}). Try 127.0.0.1.") from error
    sock = socket.socket(family, kind, proto)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
        # Listening before the libraries are loaded lets an early browser wait instead of being turned away.
        sock.listen(128)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            why = f"Port {port} on {host} is in use. Stop the other program or choose another port with --port."
        elif error.errno == errno.EACCES:
            why = f"Port {port} is reserved for the system. Choose one from 1024 up with --port."
        else:
            why = f"{host}:{port} cannot be used: {error.strerror}. Choose another with --host and --port."
        raise UsageError(why) from error
    return sock


def create_app(service: ChatService, settings: Settings) -> FastAPI:
    """Page, uploads and API as an ASGI app, which loads the model behind them when it is started."""
    from app.api import add_api
    from app.ui.exports import Exports
    from app.ui.layout import mount_page
    from app.ui.session import Loading, Sessions
    from app.ui.streams import Streams
    from app.ui.uploads import Uploads

    loading = Loading()
    sessions = Sessions(service)
    uploads = Uploads(Limits().max_bytes)

    def load() -> None:
        service.load(loading)
        if service.load_error is not None:
            log.error("The model could not be loaded: %s", describe(service.load_error)[0], exc_info=settings.debug)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS, "octavo-page"))
        loader = threading.Thread(target=load, name="load-model", daemon=True)
        loader.start()
        attending = asyncio.create_task(sessions.attend())
        yield
        attending.cancel()
        uploads.close()
        service.close()
        # A thread that is in a library's own code when the interpreter ends takes the process down with an abort.
        await asyncio.to_thread(loader.join, _LOADER_S)

    app = FastAPI(title="Octavo", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.add_route("/uploads", uploads.receive, methods=["PUT"])
    app.add_route("/gradio_api/upload", _not_here, methods=["POST"])  # ahead of the page library's own, without limits
    app.add_route("/exports/{name}", Exports(service.library).send, methods=["GET"])
    add_api(app, service, settings.cache_dir / "files")
    app.add_middleware(Streams)
    access = Access(settings.auth, settings.api_key)
    app.add_middleware(Guard, local=is_local(settings.host), host=settings.host, access=access)
    return mount_page(app, sessions, loading, uploads)


async def _not_here(_: Request) -> Response:
    return PlainTextResponse("Files are added on the page, or with /v1/files.", 404)


def serve(settings: Settings) -> None:
    """Serve the page until interrupted; it is up at once while the model loads behind it.

    Raises UsageError when the port is taken, when others could reach the address without a password or key, and for a
    model that cannot be.
    """
    if not is_local(settings.host) and not (settings.auth or settings.api_key):
        raise UsageError(
            f"--host {settings.host} lets other machines in: say who may ask, with --auth USER:PASSWORD for people"
            " or --api-key KEY for programs."
        )
    from app.engines import open_service

    service = open_service(settings)
    sock = bind(settings.host, settings.port)
    try:
        app = create_app(service, settings)
        level = "info" if settings.debug else "warning"
        config = uvicorn.Config(
            app,
            log_level=level,
            access_log=settings.debug,
            timeout_graceful_shutdown=1,
            proxy_headers=settings.behind_proxy,
            forwarded_allow_ips=_PROXIES,
        )
        host, port = sock.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        print(f"Octavo is at http://{shown}:{port} - press Ctrl+C to stop.", flush=True)
        server = uvicorn.Server(config)
        if not settings.debug:
            # An open page keeps connections; that they are cut when the server is stopped is no error to tell.
            logging.getLogger("uvicorn.error").addFilter(lambda record: not server.should_exit)
        with suppress(KeyboardInterrupt):
            server.run(sockets=[sock])
    finally:
        sock.close()
        service.close()
