"""Sample text for calibration: the user's own, or the small one that comes along."""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.documents.read import read_document
from app.errors import BadDocument, UsageError
from app.tokenizer import TextTokenizer

_SAMPLES = Path(__file__).parent / "samples"
_CODE = ("heapq", "textwrap", "json.decoder", "json.encoder")  # of Python's library: code that no change here changes
WINDOW = 2048  # tokens read in one piece


def sample_texts(source: Path | None, flag: str = "--calibration") -> tuple[list[str], str]:
    """Texts and their name: of a file, of every readable file below a directory, or (None) those that come along.

    `flag` is what named the source, for what is told of it.
    """
    if source is None:
        code = "\n\n".join(inspect.getsource(import_module(name)) for name in _CODE)
        return [*(file.read_text(encoding="utf-8") for file in sorted(_SAMPLES.glob("*.txt"))), code], "built-in"
    if os.path.isfile(source):  # os.path: no error where a name is too long to be one
        return [read_document(source).text], source.name
    if not os.path.isdir(source):
        if os.path.exists(source):
            raise UsageError(f"{flag} {source}: this is a device, a pipe or a socket. Name a file or a folder.")
        raise UsageError(f"{flag} {source}: there is no such file or directory.")
    texts = []
    for file in sorted(path for path in source.rglob("*") if path.is_file() and not path.name.startswith(".")):
        try:
            texts.append(read_document(file).text)
        except BadDocument:
            continue  # a folder of texts may hold a picture
    if not texts:
        raise UsageError(f"{flag} {source}: no file in there can be read as text.")
    return texts, source.name


def sample_windows(tokenizer: TextTokenizer, texts: Sequence[str], tokens: int) -> tuple[list[Tensor], dict[str, Any]]:
    """Up to `tokens` token ids in windows taken from each text in turn, and what the metadata says of them."""
    queues = []
    for text in texts:
        ids = torch.tensor(tokenizer.encode_text(text[: 8 * tokens]), dtype=torch.int64)
        queues.append([window for window in ids.split(WINDOW) if len(window) > 1])
    chosen: list[Tensor] = []
    left = tokens
    while left > 0 and any(queues):
        for queue in queues:
            if queue and left > 0:
                chosen.append(queue.pop(0)[:left])
                left -= len(chosen[-1])
    if not chosen:
        raise UsageError("The calibration text is empty.")
    used = torch.cat(chosen)
    digest = hashlib.sha256(used.numpy().astype("<i8").tobytes()).hexdigest()
    return chosen, {"tokens": len(used), "token_ids_sha256": digest}
