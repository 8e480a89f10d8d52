"""The OpenAI-compatible API under /v1, with /health and /metrics."""

from app.api.routes import add_api

__all__ = ["add_api"]
