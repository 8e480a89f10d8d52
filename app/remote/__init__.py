"""Another server that speaks OpenAI's API, in place of the own engine."""

from app.remote.service import RemoteService

__all__ = ["RemoteService"]
