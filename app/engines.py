"""Which engine answers: the own one, or another server."""

from __future__ import annotations

from app.config import Settings
from app.service import ChatService


def open_service(settings: Settings) -> ChatService:
    """The service that the settings ask for; nothing is loaded yet."""
    if settings.engine == "openai":
        from app.remote import RemoteService

        return RemoteService(settings)
    return ChatService(settings)
