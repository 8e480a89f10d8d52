"""Files to text with a page map: one reader a format."""

from app.documents.document import Document, Limits, Page
from app.documents.read import read_document

__all__ = ["Document", "Limits", "Page", "read_document"]
