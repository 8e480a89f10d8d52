"""Jupyter notebooks (ipynb): cells in order, a page each, with the text of their outputs."""

from __future__ import annotations

import json
from typing import Any

from app.documents.document import Extract, Limits
from app.errors import BadDocument
from models.files import json_fault

_OUTPUT_CHARS = 4000  # of one output; logs and tables beyond that say little
_SHOWN = ("text/markdown", "text/plain")  # the better one first; pictures and HTML are left out


def read(data: bytes, name: str, limits: Limits) -> Extract:
    """Markdown as it is, code and its outputs in fences."""
    try:
        book = json.loads(data)
    except (ValueError, RecursionError) as error:
        why = json_fault(error)
        raise BadDocument(f"{name} is a damaged notebook: {why}. Open it in Jupyter and save it again.") from error
    if not isinstance(book, dict) or not isinstance(cells := _cells(book), list):
        raise BadDocument(f"{name} is no notebook: it has no cells. Open it in Jupyter and save it again.")
    metadata = book.get("metadata")
    spec = metadata.get("kernelspec") if isinstance(metadata, dict) else None
    language = _text(spec.get("language")) if isinstance(spec, dict) else ""
    pages, chars = [], 0
    for cell in cells:
        page = _cell(cell, language) if isinstance(cell, dict) else ""
        chars += len(page)
        limits.check_chars(name, chars)
        pages.append(page + "\n\n")
    return Extract("notebook", pages)


def _cells(book: dict[str, Any]) -> Any:
    sheets = book.get("worksheets")  # before version 4
    if "cells" not in book and isinstance(sheets, list) and sheets and isinstance(sheets[0], dict):
        return sheets[0].get("cells")
    return book.get("cells")


def _cell(cell: dict[str, Any], language: str) -> str:
    source = _text(cell.get("source", cell.get("input", ""))).rstrip()
    if cell.get("cell_type") != "code":
        return source
    parts = [f"```{language}\n{source}\n```"]
    outputs = cell.get("outputs")
    for output in outputs if isinstance(outputs, list) else []:
        shown = _output(output).rstrip() if isinstance(output, dict) else ""
        if len(shown) > _OUTPUT_CHARS:
            shown = shown[:_OUTPUT_CHARS] + "\n..."
        if shown:
            parts.append(f"Output:\n```\n{shown}\n```")
    return "\n".join(parts)


def _output(output: dict[str, Any]) -> str:
    if output.get("output_type") == "error" or "ename" in output:
        return f"{_text(output.get('ename'))}: {_text(output.get('evalue'))}"
    data = output.get("data")
    if isinstance(data, dict):
        return next((_text(data[kind]) for kind in _SHOWN if kind in data), "")
    return _text(output.get("text", ""))


def _text(value: Any) -> str:
    parts = value if isinstance(value, list) else [value]
    return "".join(part for part in parts if isinstance(part, str))
