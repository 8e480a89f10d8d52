"""`python -m app quantize MODEL OUT`: a W8A8 checkpoint that loads without calibration."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from app.calibration import sample_texts, sample_windows
from app.config import Settings
from app.engine.sizing import peak_bytes
from app.errors import OctavoError, UsageError, describe, said_by_disk
from app.gguf_tokenizer import spec_from_gguf
from app.model import PATTERN_FOLDER, ModelFiles, choose_pattern, find_model
from app.status_line import StatusLine, TimeLeft
from app.tokenizer import Tokenizer
from app.writable import folder_to_write
from models.checkpoint import open_checkpoint
from models.fingerprint import fingerprint
from models.quantize import PARTIAL, quantize_checkpoint
from quant import formats

TOKENS = 16_384  # of calibration: a gram matrix of a few thousand channels has more equations than unknowns
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.jinja", "generation_config.json"),
)
_ROUND_ONLY = "none"


def quantize(settings: Settings, model: str, out: Path, calibration: str | None, tokens: int, as_json: bool) -> int:
    """Write the checkpoint `out`; 0 when it is whole. `calibration`: a file, a directory, "none", or the built-in."""
    for path in (out, out.with_name(out.name + PARTIAL)):
        if os.path.lexists(path) and (path == out or not path.is_dir()):
            raise UsageError(f"{path} exists already. Choose another OUT, or delete it.")
    folder_to_write("OUT", out.parent)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    started = time.monotonic()
    files = find_model(replace(settings, model=model))
    checkpoint = open_checkpoint(files.path)
    tokenizer = Tokenizer.of(checkpoint)
    pattern, _ = choose_pattern(files, settings)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if calibration == _ROUND_ONLY:
        sample: list[torch.Tensor] = []
        about: dict[str, Any] = {"method": "none: nearest rounding"}
    else:
        texts, name = sample_texts(None if calibration is None else Path(calibration).expanduser())
        sample, counted = sample_windows(tokenizer, texts, tokens)
        about = {"method": "scales by measured error, GPTQ rounding", "text": name, **counted}
    about["embedding"] = settings.embedding
    hashed = None if pattern is None else pattern.hash()
    described = formats.metadata(files.name, _revision(files, settings.cache_dir), about, hashed)

    def finish(folder: Path) -> None:
        _save_tokenizer(files.path, folder)
        if pattern is not None:
            pattern.save(folder / PATTERN_FOLDER)

    status, left = StatusLine(sys.stderr), TimeLeft()
    try:
        quantize_checkpoint(
            checkpoint,
            out,
            sample,
            described,
            device,
            lambda stage, done: status.show(f"{stage} {done:.0%}{left.told(done)}"),
            finish,
            settings.embedding == "int8",
        )
    except OSError as error:
        said = said_by_disk(error) or describe(error)[0].rstrip(".") + "."
        raise OctavoError(f"{said} The same command then goes on from what is written.") from error
    finally:
        status.clear()
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    result = {
        "out": str(out),
        "bytes": size,
        "seconds": round(time.monotonic() - started, 1),
        "peak_memory_bytes": peak_bytes(torch.device("cpu")),
        **described,
    }
    if as_json:
        print(json.dumps(result))
    else:
        print(f"{out}: {size / 2**20:,.0f} MiB in {result['seconds']:,} s. Use it with --model {out}")
    return 0


def _revision(files: ModelFiles, cache_dir: Path) -> str:
    """The hub's commit, or a hash of config and weights: what a stopped run has written belongs to exactly these."""
    if files.hub_id is not None and files.path.parent.name == "snapshots":
        return files.path.name
    return f"fingerprint-{fingerprint(files.path, cache_dir / 'weights.json')[:32]}"


def _save_tokenizer(source: Path, folder: Path) -> None:
    """The tokenizer's files beside the weights."""
    if source.is_file():
        spec_from_gguf(source).save(folder)
        return
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
