"""Files to text with a page map: one reader a format."""

from app.documents.apart import read_safely
from app.documents.document import Document, File, Limits, Page, Place, is_code
from app.documents.read import read_document

__all__ = ["Document", "File", "Limits", "Page", "Place", "is_code", "read_document", "read_safely"]
