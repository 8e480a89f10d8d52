"""The web server around the page: one socket, security headers, uploads, nothing from elsewhere."""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.config import Settings
from app.documents import Limits
from app.errors import UsageError, describe

if TYPE_CHECKING:
    from app.service import ChatService

log = logging.getLogger("octavo.ui")

# The page compiles small templates at run time, hence unsafe-eval; nothing may come from or go to another host,
# so a picture in an answer or a document cannot call home.
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline';"
        " img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; worker-src 'self' blob:;"
        " object-src 'none'; form-action 'none'; frame-ancestors 'none'; base-uri 'self'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


class Guard:
    """ASGI middleware: security headers on every answer; when `local`, only requests to this machine's own names.

    The names matter: a foreign page whose host name points at 127.0.0.1 would otherwise be same-origin with this one.
    """

    def __init__(self, app: ASGIApp, local: bool, host: str) -> None:
        self.app = app
        self.local = local
        self.names = _LOCAL_NAMES | {host}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        host = Headers(scope=scope).get("host", "")
        if self.local and host.rsplit(":", 1)[0] not in self.names and host not in self.names:
            await PlainTextResponse("This server answers to localhost only.", 421)(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await self.app(scope, receive, send_guarded)


def is_local(host: str) -> bool:
    """Whether an address is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


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
    """The page and its uploads as an ASGI app, which loads the model behind the page when it is started."""
    from app.ui.layout import mount_page
    from app.ui.session import Loading
    from app.ui.uploads import Uploads

    loading = Loading()
    uploads = Uploads(Limits().max_bytes)

    def load() -> None:
        service.load(loading)
        if service.load_error is not None:
            log.error("The model could not be loaded: %s", describe(service.load_error)[0], exc_info=settings.debug)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        threading.Thread(target=load, name="load-model", daemon=True).start()
        yield
        uploads.close()

    app = FastAPI(title="Octavo", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.add_route("/uploads", uploads.receive, methods=["PUT"])
    app.add_middleware(Guard, local=is_local(settings.host), host=settings.host)
    return mount_page(app, service, loading, uploads)


def serve(settings: Settings) -> None:
    """Serve the page until interrupted; it is up at once while the model loads behind it.

    Raises UsageError when the port is taken.
    """
    sock = bind(settings.host, settings.port)
    from app.service import ChatService

    service = ChatService(settings)
    try:
        app = create_app(service, settings)
        level = "info" if settings.debug else "warning"
        config = uvicorn.Config(app, log_level=level, access_log=settings.debug, timeout_graceful_shutdown=1)
        host, port = sock.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        print(f"Octavo is at http://{shown}:{port} - press Ctrl+C to stop.", flush=True)
        if not is_local(settings.host):
            print("Anyone who can reach this address can use it and read along.", file=sys.stderr, flush=True)
        server = uvicorn.Server(config)
        if not settings.debug:
            # An open page keeps connections; that they are cut when the server is stopped is no error to tell.
            logging.getLogger("uvicorn.error").addFilter(lambda record: not server.should_exit)
        with suppress(KeyboardInterrupt):
            server.run(sockets=[sock])
    finally:
        sock.close()
        service.close()
