"""What stays when the program ends: documents that were read, and chats."""

from app.library.library import Library, Owner, Shelved

__all__ = ["Library", "Owner", "Shelved"]
