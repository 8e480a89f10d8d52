"""Who may ask: this machine alone, or people with a password and programs with a key."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.documents import Limits

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
# What the API sends is data: even opened in a browser it loads and runs nothing.
_API_POLICY = {"Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; sandbox"}
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
_OPEN = "/health"  # for load balancers and supervisors, which have no key
_READS = ("GET", "HEAD", "OPTIONS")
MAX_BODY = 64 << 20  # of a request that is no upload: ten times a prompt of 4 million tokens is far less
_UPLOAD_ROOM = 1 << 20  # what a form adds to its file


class Access:
    """Passwords of people ("user:password") and keys of programs; with neither, everyone may ask."""

    def __init__(self, people: Sequence[str] = (), keys: Sequence[str] = ()) -> None:
        self._people = tuple(people)
        self._keys = tuple(keys)

    def owner(self, headers: Headers, api: bool) -> str | None:
        """A name for whoever sends these headers, under which files are kept; None when they may not ask.

        A password opens the page and the API, a key the API alone.
        """
        if not self._people and not self._keys:
            return "everyone"
        kind, _, value = headers.get("authorization", "").partition(" ")
        if kind.lower() == "basic" and (person := _matching(_decoded(value), self._people)) is not None:
            return "user " + person.partition(":")[0]
        if kind.lower() == "bearer" and api and (key := _matching(value.strip(), self._keys)) is not None:
            return "key " + hashlib.sha256(key.encode()).hexdigest()[:32]
        # On this machine keys guard the API alone, and the page stays as it was.
        return "everyone" if not api and not self._people else None

    @property
    def asks_password(self) -> bool:
        """Whether people have passwords."""
        return bool(self._people)


def owner_of(request: Request) -> str:
    """Whoever sent a request, as Access named them."""
    return str(request.scope.get("octavo.owner", "everyone"))


class Guard:
    """ASGI middleware around everything: who may ask, how much they may send, headers on every answer.

    `local`: only requests to this machine's own names are served; a foreign page whose host name points at 127.0.0.1
    would otherwise be same-origin with this one. Pages of other sites may change nothing here.
    """

    def __init__(self, app: ASGIApp, local: bool, host: str, access: Access | None = None) -> None:
        self.app = app
        self.local = local
        self.names = _LOCAL_NAMES | {host}
        self.access = access or Access()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        path = scope["path"]
        api = path.startswith("/v1/") or path in ("/v1", "/metrics", _OPEN)

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS | (_API_POLICY if api else {}))
            await send(message)

        refusal = self._refusal(scope, headers, path, api)
        if refusal is None:
            await self.app(scope, _limited(receive, self._limit(path)), send_guarded)
        elif scope["type"] == "http":
            await refusal(scope, receive, send_guarded)
        else:
            await send({"type": "websocket.close", "code": 1008, "reason": "Not allowed."})

    def _refusal(self, scope: Scope, headers: Headers, path: str, api: bool) -> Response | None:
        host = headers.get("host", "")
        if self.local and host.rsplit(":", 1)[0] not in self.names and host not in self.names:
            return _refuse(421, "This server answers to localhost only.", api)
        origin = headers.get("origin")
        changes = scope["type"] == "websocket" or scope["method"] not in _READS
        if changes and origin is not None and urlsplit(origin).netloc != host:
            return _refuse(403, "Pages of other sites may not send anything here.", api)
        if path != _OPEN:
            owner = self.access.owner(headers, api)
            if owner is None:
                return self._ask_for_credentials(api)
            if not self.local and owner == "everyone":
                return _refuse(403, "The page is served to people with a password only: start with --auth.", api)
            scope["octavo.owner"] = owner
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self._limit(path):
            return _refuse(413, f"The request is larger than {self._limit(path) >> 20} MiB, the limit.", api)
        return None

    def _ask_for_credentials(self, api: bool) -> Response:
        response = _refuse(401, "A key or a password is needed: Authorization: Bearer KEY, or Basic.", api)
        if not api or self.access.asks_password:
            response.headers["WWW-Authenticate"] = 'Basic realm="Octavo", charset="UTF-8"'
        return response

    @staticmethod
    def _limit(path: str) -> int:
        return Limits().max_bytes + _UPLOAD_ROOM if path in ("/uploads", "/v1/files") else MAX_BODY


def is_local(host: str) -> bool:
    """Whether an address is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _matching(given: str, known: Sequence[str]) -> str | None:
    """The one of `known` that was given; how long it takes tells nothing about them."""
    found = None
    for one in known:
        if hmac.compare_digest(given.encode("utf-8", "surrogatepass"), one.encode("utf-8", "surrogatepass")):
            found = one
    return found


def _decoded(value: str) -> str:
    try:
        return base64.b64decode(value.strip(), validate=True).decode()
    except (binascii.Error, ValueError):
        return ""


def _limited(receive: Receive, limit: int) -> Receive:
    """A body that does not tell its length is cut off where it passes the limit."""
    got = 0

    async def counted() -> Message:
        nonlocal got
        message = await receive()
        got += len(message.get("body", b""))
        if got > limit:
            raise HTTPException(413, f"The request is larger than {limit >> 20} MiB, the limit.")
        return message

    return counted


def _refuse(status: int, message: str, api: bool) -> Response:
    if not api:
        return PlainTextResponse(message, status)
    kind = "authentication_error" if status == 401 else "permission_error" if status == 403 else "invalid_request_error"
    code = "invalid_api_key" if status == 401 else None
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": code}}, status)
