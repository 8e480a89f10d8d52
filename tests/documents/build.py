"""Small files for the tests, built here so that the repository holds no binaries."""

from __future__ import annotations

import io
import zipfile

W = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"


def pdf(*pages: str, encrypted: bool = False) -> bytes:
    """A PDF with lines of Helvetica on each page; an empty string gives a page with a rectangle and no text."""
    streams = [
        b"BT /F1 12 Tf 72 700 Td 14 TL "
        + b" ".join(f"({line}) Tj T*".encode("latin-1") for line in text.split("\n"))
        + b" ET"
        if text
        else b"72 72 200 200 re f"
        for text in pages
    ]
    objects = [b"<< /Type /Catalog /Pages 2 0 R >>"]
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(len(pages)))
    objects.append(f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>".encode())
    objects.append(b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>")
    for i, stream in enumerate(streams):
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {5 + 2 * i} 0 R"
            " /Resources << /Font << /F1 3 0 R >> >> >>".encode()
        )
        objects.append(b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream))
    trailer = f"/Size {len(objects) + 1} /Root 1 0 R"
    if encrypted:  # made-up hashes: no password opens it
        objects.append(f"<< /Filter /Standard /V 1 /R 2 /P -4 /O <{'5a' * 32}> /U <{'a5' * 32}> >>".encode())
        trailer = f"/Size {len(objects) + 1} /Root 1 0 R /Encrypt {len(objects)} 0 R /ID [<{'00' * 16}> <{'00' * 16}>]"
    out, offsets = bytearray(b"%PDF-1.4\n"), []
    for number, body in enumerate(objects, 1):
        offsets.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    start = len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    out += b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    out += f"trailer << {trailer} >>\nstartxref\n{start}\n%%EOF\n".encode()
    return bytes(out)


def archive(members: dict[str, str | bytes]) -> bytes:
    """A ZIP file."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return out.getvalue()


def docx_xml(body: str, **parts: str) -> bytes:
    """A bare DOCX around a body's XML; `parts` are further members under word/, such as `footnotes`."""
    head = f'<?xml version="1.0"?><w:document xmlns:w="{W}"><w:body>{body}</w:body></w:document>'
    return archive({"word/document.xml": head} | {f"word/{name}.xml": text for name, text in parts.items()})
