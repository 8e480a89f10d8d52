"""The own engine, with a model in this process, behind the service."""

from app.local.service import LocalService

__all__ = ["LocalService"]
