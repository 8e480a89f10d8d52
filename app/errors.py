"""Typed errors of the app and how each is told: a message, an HTTP status, an exit code."""

import errno

from models.errors import DoesNotFit, ModelError, PoolExhausted, UnsupportedModel


class OctavoError(Exception):
    """Base of the app's errors; the text says what was wrong, the limit, and what to do."""

    http_status = 400
    exit_code = 1


class UsageError(OctavoError):
    """A flag, setting or request field is wrong."""

    exit_code = 2


class ContextTooLong(OctavoError):
    """A prompt needs more tokens than the context holds: `need` and `limit` in tokens."""

    http_status = 413

    def __init__(self, need: int, limit: int, advice: str = "Choose fewer pages or a shorter document.") -> None:
        super().__init__(f"This needs {need:,} tokens; the context holds {limit:,}. {advice}")
        self.need = need
        self.limit = limit


class BadDocument(OctavoError):
    """A file cannot be read as a document; says what the file is and what to do."""

    http_status = 415


class DocumentTooLarge(BadDocument):
    """A file is over the size limit; names both sizes."""

    http_status = 413


class Cancelled(OctavoError):
    """Work without a result yet was stopped on request: tokenising, or loading."""


class NotReady(OctavoError):
    """The model is still loading or failed to load."""

    http_status = 503


_DISK = {
    errno.ENOSPC: "The disk is full: make room, then try again.",
    errno.EDQUOT: "The disk's quota is used up: make room, then try again.",
    errno.EIO: "The disk failed to read or write (I/O error): look after it, then try again.",
    errno.EROFS: "The disk is read-only: make it writable, or set OCTAVO_CACHE to another folder.",
    errno.EACCES: "Octavo's folder may not be read or written: give leave, or set OCTAVO_CACHE to another folder.",
}


def said_by_disk(error: BaseException) -> str | None:
    """What a disk that refused means, and what to do; None for any other error."""
    return _DISK.get(error.errno or 0) if isinstance(error, OSError) else None


def describe(error: BaseException) -> tuple[str, int, int]:
    """(message, HTTP status, exit code) for any error; unknown ones give a general message with their type."""
    if isinstance(error, OctavoError):
        return str(error), error.http_status, error.exit_code
    if isinstance(error, (DoesNotFit, PoolExhausted)):
        return str(error), 413, 1
    if isinstance(error, ModelError):
        if isinstance(error, UnsupportedModel) and error.key.startswith("--"):  # a flag, not the checkpoint, is wrong
            return str(error), 422, UsageError.exit_code
        return str(error), 422, 1
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "Out of memory while answering. Shorten the context or free memory, then ask again.", 507, 1
    if (said := said_by_disk(error)) is not None:
        return f"{said} Nothing is changed.", 507, 1
    if isinstance(error, ModuleNotFoundError):
        return f"This Python lacks {error.name}. Start Octavo with ./launch.sh, which installs all it needs.", 500, 1
    return f"Unexpected {type(error).__name__}: {error}", 500, 1
