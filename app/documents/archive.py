"""ZIP archives, opened and read in one place: what zipfile says becomes a refusal that names file and member."""

from __future__ import annotations

import io
import lzma
import zipfile
import zlib
from dataclasses import dataclass

from app.errors import BadDocument

# bz2 tells damage by OSError; there is no disk behind an archive in memory.
_DAMAGED = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, ValueError)


class Locked(BadDocument):
    """An archive that asks for a password, or was packed in a way that is not known here: none of it can be read."""


@dataclass(frozen=True)
class Archive:
    """An open archive; `kind` and `advice` say what it is to be, and what to do where it is damaged."""

    file: zipfile.ZipFile
    name: str
    kind: str = "ZIP or Office file"
    advice: str = "Save it again."

    @property
    def names(self) -> list[str]:
        """The members' names, in the archive's order."""
        return self.file.namelist()

    def read(self, member: str | zipfile.ZipInfo) -> bytes:
        """A member's content; raises Locked, and BadDocument for one that is damaged or not there."""
        shown = member if isinstance(member, str) else member.filename
        try:
            return self.file.read(member)
        except KeyError as error:
            raise self.damaged(f"it has no {shown}") from error
        except NotImplementedError as error:  # raised by zipfile for a compression that it has not
            raise Locked(f"{self.name}: {shown} is packed by a method not read here. Pack it as ZIP again.") from error
        except RuntimeError as error:  # zipfile's word for a password
            raise Locked(f"{self.name}: {shown} is locked. Pack or save it again without a password.") from error
        except _DAMAGED as error:
            raise self.damaged(f"{shown}: {error}") from error

    def damaged(self, why: str) -> BadDocument:
        """What to raise for an archive that is not what it should be."""
        return BadDocument(f"{self.name} is a damaged {self.kind}: {why}. {self.advice}")


def open_archive(data: bytes, name: str) -> Archive:
    """The archive in `data`; raises BadDocument for a damaged one, and one in several parts."""
    try:
        return Archive(zipfile.ZipFile(io.BytesIO(data)), name)
    except (*_DAMAGED, NotImplementedError) as error:  # the latter is zipfile's for an archive in several parts
        raise BadDocument(
            f"{name} is a damaged ZIP or Office file: its list of members cannot be read ({error})."
            " Get it anew, or save it again."
        ) from error
