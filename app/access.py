"""Who may ask: this machine alone, or people with a password and programs with a key."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
_FREE_ATTEMPTS = 5  # wrong ones before there is a wait; it doubles from 1 s with each one more
_LONGEST_WAIT_S = 60.0
_REMEMBERED = 10_000  # addresses, names
_WRONG_REMEMBERED = 8  # wrong attempts from one address at one name, which count once however often they come
# Of one person's name from all addresses together, but for those where that person's password was right before.
_FREE_TOGETHER = 20
_PAUSE_TOGETHER_S = 5.0
_FORGOTTEN_S = 3600.0
_UPLOAD_ROOM = 1 << 20  # what a form adds to its file


class Access:
    """Passwords of people ("user:password") and keys of programs; with neither, everyone may ask."""

    def __init__(self, people: Sequence[str] = (), keys: Sequence[str] = ()) -> None:
        self._people = tuple(people)
        self._keys = tuple(keys)

    @staticmethod
    def claimed(headers: Headers) -> str | None:
        """Whose password, or that a key, is given; None where nothing is."""
        kind, _, value = headers.get("authorization", "").partition(" ")
        if not value.strip():
            return None
        return "user " + _decoded(value).partition(":")[0] if kind.lower() == "basic" else "key"

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

    def knows(self, claimed: str) -> bool:
        """Whether somebody has the name that `claimed` gave."""
        return any(claimed == "user " + person.partition(":")[0] for person in self._people)

    @property
    def asks_password(self) -> bool:
        """Whether people have passwords."""
        return bool(self._people)


def owner_of(request: Request) -> str:
    """Whoever sent a request, as Access named them."""
    return str(request.scope.get("octavo.owner", "everyone"))


@dataclass(frozen=True)
class _Failed:
    """How many attempts were wrong, until when the next one waits, and hashes of the last ones."""

    number: int = 0
    until: float = 0.0
    tried: tuple[int, ...] = ()


class Attempts:
    """Wrong passwords and keys by the address that they came from: after a few, each next one has to wait longer.

    Whoever else asks is not held up: other addresses, and other people's names from the same one. Keys have no names:
    wrong ones from one address wait together, and one that was wrong before counts once; a key that is right never
    waits. Many addresses that guess at one name share a short pause, which no address knows where that name's password
    was right before.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failed: OrderedDict[tuple[str, str], _Failed] = OrderedDict()
        self._together: OrderedDict[str, tuple[int, float]] = OrderedDict()  # by name: how many, when the last one was
        self._right: OrderedDict[tuple[str, str], None] = OrderedDict()

    def wait(self, address: str, claimed: str) -> float:
        """Seconds until another attempt is looked at; 0 for none."""
        place, now = (_network(address), claimed), self._clock()
        until = self._failed.get(place, _Failed()).until
        number, last = self._together.get(claimed, (0, 0.0))
        pause = last + _PAUSE_TOGETHER_S - now if number >= _FREE_TOGETHER and place not in self._right else 0.0
        return max(0.0, until - now, pause)

    def failed(self, address: str, claimed: str, given: str) -> None:
        """An attempt was wrong: `given` is the whole of it."""
        place, tried = (_network(address), claimed), hash(given)  # salted anew by each start of Python
        known = self._failed.pop(place, _Failed())
        if tried in known.tried:
            self._failed[place] = known
            return
        number = known.number + 1
        pause = min(_LONGEST_WAIT_S, 2.0 ** (number - _FREE_ATTEMPTS)) if number >= _FREE_ATTEMPTS else 0.0
        now = self._clock()
        self._failed[place] = _Failed(number, now + pause, (*known.tried, tried)[-_WRONG_REMEMBERED:])
        while len(self._failed) > _REMEMBERED:
            self._failed.popitem(last=False)
        if claimed.startswith("user "):  # one of somebody, else it is "nobody"
            before, last = self._together.pop(claimed, (0, now))
            self._together[claimed] = (before + 1 if now - last < _FORGOTTEN_S else 1), now
            while len(self._together) > _REMEMBERED:
                self._together.popitem(last=False)

    def succeeded(self, address: str, claimed: str) -> None:
        """An attempt was right: what was wrong before no longer counts."""
        place = (_network(address), claimed)
        self._failed.pop(place, None)
        self._right[place] = None
        self._right.move_to_end(place)
        while len(self._right) > _REMEMBERED:
            self._right.popitem(last=False)


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
        self.attempts = Attempts()

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
        if changes and origin is not None and _host_of(origin) != host:
            return _refuse(403, "Pages of other sites may not send anything here.", api)
        if path != _OPEN:
            address, claimed = (scope.get("client") or ("", 0))[0], self._counted(headers)
            right_key = claimed == "key" and self.access.owner(headers, api=True) is not None
            if claimed is not None and not right_key and (wait := self.attempts.wait(address, claimed)):
                return _too_often(wait, api)
            owner = self.access.owner(headers, api)
            if owner is None:
                if right_key:  # where keys open nothing
                    return _refuse(403, f"Keys open the API alone, which is under /v1; {path} is not.", api)
                if claimed is not None:
                    self.attempts.failed(address, claimed, headers["authorization"])
                return self._ask_for_credentials(api)
            if claimed not in (None, "key") and owner != "everyone":  # a right key beside them frees no wrong ones
                self.attempts.succeeded(address, claimed)
            if not self.local and owner == "everyone":
                return _refuse(
                    403,
                    "The page is served to people with a password only: start with --auth. The API is under /v1.",
                    api,
                )
            scope["octavo.owner"] = owner
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self._limit(path):
            return _refuse(413, f"The request is larger than {self._limit(path) >> 20} MiB, the limit.", api)
        return None

    def _counted(self, headers: Headers) -> str | None:
        """Under which name an attempt counts; names that nobody has share one, so that there are few."""
        claimed = self.access.claimed(headers)
        return claimed if claimed is None or claimed == "key" or self.access.knows(claimed) else "nobody"

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


def _host_of(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _network(address: str) -> str:
    """An address, or the network that one customer has of the newer kind: he could take any address in it."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        return str(ipaddress.ip_network((found, 64), strict=False))
    return address


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


def _too_often(wait: float, api: bool) -> Response:
    seconds = math.ceil(wait)
    response = _refuse(
        429, f"Too many wrong passwords or keys from this address. Wait {seconds} s, then try again.", api
    )
    response.headers["Retry-After"] = str(seconds)
    return response


def _refuse(status: int, message: str, api: bool) -> Response:
    if not api:
        return PlainTextResponse(message, status)
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error")
    code = {401: "invalid_api_key", 429: "too_many_attempts"}.get(status)
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": code}}, status)
