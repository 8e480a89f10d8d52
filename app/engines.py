"""Which engine answers: the own one, or another server."""

from __future__ import annotations

from app.config import Settings
from app.local import LocalService
from app.model import check_model
from app.service import ChatService


def open_service(settings: Settings) -> ChatService:
    """The service that the settings ask for; nothing is loaded yet. Raises UsageError for a --model that cannot be."""
    if settings.engine == "openai":
        from app.remote import RemoteService

        return RemoteService(settings)
    check_model(settings.model)
    return LocalService(settings)
