"""Errors in the shape that OpenAI's clients expect: {"error": {message, type, param, code}}."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from app.errors import NotReady, OctavoError, describe

log = logging.getLogger("octavo.api")

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_NO_OBJECT = ("model_type", "model_attributes_type", "dict_type")  # pydantic's words for it
_RETRY_S = "5"  # clients wait this long and ask again


class ApiError(OctavoError):
    """A request that is refused; `param` names the field, `code` is for programs."""

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.http_status = status
        self.param = param
        self.code = code


def body_of(error: BaseException) -> tuple[dict[str, Any], int]:
    """The JSON body that tells an error, and its HTTP status."""
    message, status, _ = describe(error)
    param, code = (error.param, error.code) if isinstance(error, ApiError) else (None, None)
    if status >= 500 and not isinstance(error, NotReady):
        expected = status != 500  # a full disk, say: what to do is in the message
        log.error("A request failed: %s", message, exc_info=None if expected else error)
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}, status


def error_response(error: BaseException) -> JSONResponse:
    """An error as the answer to a request."""
    body, status = body_of(error)
    return JSONResponse(body, status, {"Retry-After": _RETRY_S} if status in (429, 503) else None)


class ApiRoute(APIRoute):
    """A route that tells every error itself: the framework closes the connection after one that it did not expect."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def told(request: Request) -> Response:
            try:
                return await handle(request)
            except (HTTPException, RequestValidationError):  # told by their handlers
                raise
            except ClientDisconnect:  # nobody is there to be answered
                return Response(status_code=400)
            except Exception as error:
                return error_response(error)

        return told


def add_handlers(app: FastAPI) -> None:
    """Every error of this app's own routes is told in OpenAI's shape."""

    async def on_error(request: Request, error: Exception) -> Response:
        return error_response(error)

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.__cause__ is not None:  # what the framework's parser broke on, which it does not tell
            return error_response(_unparsed(error.__cause__, error))
        return error_response(ApiError(str(error.detail), error.status_code))

    async def on_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(_first(error.errors()))

    app.add_exception_handler(OctavoError, on_error)
    app.add_exception_handler(Exception, on_error)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(RequestValidationError, on_validation)


def _unparsed(cause: BaseException, error: HTTPException) -> ApiError:
    """Why a body could not be parsed."""
    why = {
        UnicodeDecodeError: "The body is not UTF-8, which JSON is sent in.",
        RecursionError: "The body is no valid JSON: it is nested too deeply.",
        ValueError: f"The body is no valid JSON: a number has more than {sys.get_int_max_str_digits():,} digits.",
    }
    return ApiError(why.get(type(cause), str(error.detail)), error.status_code)


def _first(errors: Sequence[Any]) -> ApiError:
    """The first thing that is wrong with a body, naming the field as a client wrote it."""
    error = errors[0]
    if isinstance(cause := error.get("ctx", {}).get("error"), ApiError):
        return cause
    if error["type"] == "json_invalid":
        return ApiError(f"The body is no valid JSON: {error.get('ctx', {}).get('error', error['msg'])}.")
    if isinstance(error.get("input"), bytes) and len(error["loc"]) == 1:  # of another type the body is not parsed
        return ApiError("The body must be JSON, sent with the header Content-Type: application/json.")
    # Tags of unions are ours, not the client's.
    path = [part for part in error["loc"][1:] if not (isinstance(part, str) and part.startswith("as "))]
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    if error["type"] == "extra_forbidden":
        return ApiError(f"{param} is not supported.", param=param, code="unsupported_parameter")
    if error["type"] == "missing":
        return ApiError(f"{param or 'The body'} is missing.", param=param or None, code="missing_required_parameter")
    if error["type"] in _NO_OBJECT:
        return ApiError(f"{param or 'The body'} must be a JSON object.", param=param or None)
    message = error["msg"].removeprefix("Value error, ")
    return ApiError(f"{param or 'The body'}: {message[:1].lower()}{message[1:]}.", param=param or None)
