"""How much memory `quantize` takes on a model in the shape of Llama-3 8B, with calibration.

Weights are random bf16 and are written first: 2 GiB, and 0.4 GiB a layer. Layers are alike, so a few of them show the
peak of all 32. `--folder` keeps everything, and a run that was stopped goes on there.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks._llama_8b import LLAMA_8B
from benchmarks._report import Bar, at_most, finish, parser_for
from models.config import ModelConfig

_SYMBOLS = ["Ċ", "Ġ", *map(chr, range(0x21, 0x7F))]  # bytes of plain text, a token each
_PEAKS = "peaks.json"  # of every run in the folder, one that was stopped included


def write_model(folder: Path, layers: int) -> ModelConfig:
    """The checkpoint, a file a layer, and a tokenizer; what is there already stays."""
    data = LLAMA_8B | {"num_hidden_layers": layers, "max_position_embeddings": 8192, "rope_theta": 5e5}
    config = ModelConfig.from_hf(data)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(data))
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {text: i for i, text in enumerate(_SYMBOLS)}, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    groups: dict[str, list[str]] = {}
    for name in config.tensor_shapes():
        groups.setdefault(name.split(".")[2] if ".layers." in name else name.split(".")[-2], []).append(name)
    for group, names in groups.items():
        file = folder / f"part-{group}.safetensors"
        if file.exists():
            continue
        generator = torch.Generator().manual_seed(len(group))
        tensors = {}
        for name in names:
            shape = config.tensor_shapes()[name]
            weight = torch.empty(shape, dtype=torch.bfloat16)
            if len(shape) == 1:
                weight.fill_(1)
            else:
                weight.normal_(0, shape[-1] ** -0.5, generator=generator)
            tensors[name] = weight
        part = file.with_suffix(".part")
        save_file(tensors, part)
        part.replace(file)
    return config


def measure(folder: Path, layers: int, tokens: int | None, limit: float) -> dict[str, Any]:
    """Runs `quantize` as a process of its own and tells its peak; `done` is false where it was stopped."""
    model, out = folder / "model", folder / "out"
    write_model(model, layers)
    flags = [] if tokens is None else ["--calibration-tokens", str(tokens)]
    started = time.monotonic()
    command = [sys.executable, "-m", "app", "quantize", str(model), str(out), *flags]
    child = subprocess.Popen(command)
    try:
        done = child.wait(limit) == 0
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        done = False
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    runs = json.loads((folder / _PEAKS).read_text()) if (folder / _PEAKS).exists() else []
    runs.append({"seconds": round(time.monotonic() - started, 1), "peak_bytes": peak, "done": done})
    (folder / _PEAKS).write_text(json.dumps(runs))
    return {"done": done, "runs": runs}


def main(argv: list[str]) -> int:
    """Measure, print the bar and write it."""
    parser = parser_for("quantize", __doc__)
    parser.add_argument("--layers", type=int, default=3, help="of 32, all alike (default 3)")
    parser.add_argument("--tokens", type=int, help="of calibration (default: what `quantize` takes)")
    parser.add_argument("--folder", type=Path, help="keep model and result here, and go on with what is there")
    parser.add_argument("--limit", type=float, default=1e6, metavar="S", help="kill it after so many seconds")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        told = measure(args.folder or Path(temporary), args.layers, args.tokens, args.limit)
    if not told["done"]:
        print(f"Stopped: {told['runs'][-1]}. The same command goes on.")
        return 1
    peak = max(run["peak_bytes"] for run in told["runs"])
    bars: list[Bar] = [at_most("peak memory of quantize, 8B model, calibrated", peak / 2**30, "GiB", 6)]
    details: dict[str, Any] = {"layers": args.layers, "of": 32, "runs": told["runs"]}
    finish("quantize", argv, bars, details, args.json, torch.get_num_threads())
    return 0 if all(bar.holds for bar in bars) else 1
