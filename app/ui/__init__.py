"""The page in the browser."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from app.config import Settings

# Read by gradio when it is imported: no usage reports.
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"

__all__ = ["serve"]


def serve(settings: Settings) -> None:
    """Serve the page until interrupted; raises UsageError when the port is taken."""
    from app.ui.server import serve as run

    run(settings)
