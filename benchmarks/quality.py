"""What W8A8 and KV4 cost on the embedded model, over prose and code that ship with Python and its packages.

`python -m app bench quality`: minutes on a GPU. On two CPU cores `--bars-only` leaves out what no bar is about.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import math
import pydoc_data.topics
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.calibration import sample_texts, sample_windows
from app.cli_quantize import TOKENS
from app.config import EMBEDDED_MODEL, Settings
from app.evaluation.quality import Quality, Variant, variants
from app.evaluation.report import table
from app.measured_heads import measured_heads
from app.model import choose_pattern, find_model
from app.tokenizer import Tokenizer
from benchmarks._report import Bar, at_least, at_most, finish, parser_for
from kernels.kv4_pack import fragment_rows, native
from models.cache.shape import CacheShape
from models.cache.store import HeadStore
from models.checkpoint import Checkpoint, open_checkpoint
from models.measured import MeasuredHeads
from models.quantize import quantize_checkpoint
from quant import formats, kv4

_PACKAGES = (
    "gradio transformers fastapi huggingface_hub pydantic numpy httpx rich tokenizers psutil requests tqdm pillow "
    "typer pypdfium2 Jinja2 click"
).split()
_MODULES = (
    "argparse asyncio/base_events ast tarfile email/message typing subprocess http/server tempfile zipfile inspect"
).split()
_CHARS = {
    "manual": 145_000,
    "descriptions": 78_000,
    "code": 265_000,
}  # about a quarter, a quarter, a half of the tokens
_LENGTH = 8192


def corpus() -> str:
    """Python's manual, the descriptions of installed packages, and modules of the standard library."""
    manual = "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    described = []
    for name in _PACKAGES:
        try:
            about: Any = importlib.metadata.metadata(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        described.append(str(about.get_payload() or about.get("Description") or ""))
    library = Path(sysconfig.get_paths()["stdlib"])
    files = (library / f"{name}.py" for name in _MODULES)
    # zipfile is a package since Python 3.12
    code = "\n\n".join(
        (file if file.exists() else file.with_suffix("") / "__init__.py").read_text(encoding="utf-8") for file in files
    )
    parts = {"manual": manual, "descriptions": "\n\n".join(described), "code": code}
    return "\n\n".join(parts[name][:chars] for name, chars in _CHARS.items())


def differing_codes(device: torch.device) -> int:
    """Codes and scales that a way of packing on `device` stores otherwise than the reference, of 1.6 million each."""
    wrong = 0
    for d in (64, 128):
        shape = CacheShape((2,), (0,), 4, d, 1, 1, 4, torch.float16, torch.float16)
        generator = torch.Generator().manual_seed(d)
        size = (torch.rand(2, 32 * shape.block, 1, generator=generator) * 6).exp() * 0.01
        x = (torch.randn(2, 2, 32 * shape.block, d, generator=generator) * size).half()
        ids = list(range(32))
        table = torch.tensor(ids, dtype=torch.int32, device=device)
        for way in _ways(shape, device):
            store = HeadStore(shape, len(ids), device)
            way(store, table, x[0].to(device), x[1].to(device))
            stored = list(store.packed(slice(0, 2), table).runs())
            scales = torch.cat([run[2] for run in stored], 1).cpu()
            unpacked = (
                torch.cat([store.layout.unpack_keys(run[0], d) for run in stored], 1).cpu(),
                torch.cat([store.layout.unpack_values(run[1], d) for run in stored], 1).cpu(),
            )
            for at, (exact, codes) in enumerate(zip(x, unpacked, strict=True)):
                want, want_scales = kv4.quantize(exact, 4)
                wrong += int((want != codes).sum()) + int((want_scales != scales[..., 2 * at : 2 * at + 2]).sum())
    return wrong


def _ways(shape: CacheShape, device: torch.device) -> list[Callable[[HeadStore, Tensor, Tensor, Tensor], None]]:
    """How blocks come into a store [heads, blocks] here: a chunk's, by kernel and by torch, and a step's."""
    every, share = slice(None), kv4.step_share(shape.head_dim, shape.bits)

    def by_torch(store: HeadStore, table: Tensor, keys: Tensor, values: Tensor) -> None:
        store.write(every, table, keys, values)

    def in_c(store: HeadStore, table: Tensor, keys: Tensor, values: Tensor) -> None:
        store.write_in_c(every, table, keys, values)

    def in_rows(store: HeadStore, table: Tensor, keys: Tensor, values: Tensor) -> None:
        fragment_rows.store(store.packed(every, table), keys, values, share, *torch.empty(2, *keys.shape).to(keys))

    def in_steps(store: HeadStore, table: Tensor, keys: Tensor, values: Tensor) -> None:
        exact = keys.new_full((2, keys.shape[0], shape.exact_tokens, shape.width), math.nan)
        for place in range(len(table)):
            exact[:, :, shape.front :] = torch.stack((keys, values)).unflatten(2, (-1, shape.block))[:, :, place]
            store.pack_full(exact[0], exact[1], table, torch.tensor([place], dtype=torch.int32, device=device))

    if device.type == "cuda":
        return [by_torch, in_rows, in_steps]
    return [by_torch, in_steps, *([in_c] if native.declines(device, shape.width) is None else [])]


def stored_bits(device: torch.device) -> float:
    """Bits that a pool of 4-bit heads of size 128 holds for each element of keys and values, scales included."""
    shape, blocks = CacheShape((2,), (0,), 4, 128, 1, 1, 4, torch.float16, torch.float16), 3
    store = HeadStore(shape, blocks, device)
    return 8 * sum(kept.nbytes for kept, _ in store.stored()) / (2 * 2 * 128 * blocks * shape.block)


def main(argv: list[str]) -> int:
    """Measure, print the bars and write them."""
    parser = parser_for("quality", __doc__)
    parser.add_argument("--text", type=Path, metavar="FILE", help="another text (default: what `corpus` collects)")
    parser.add_argument("--write-text", type=Path, metavar="FILE", help="write the text and end")
    parser.add_argument("--tokens", type=int, default=114_688)
    parser.add_argument("--length", type=int, action="append", help=f"windows; bars are of the longest ({_LENGTH})")
    parser.add_argument("--bars-only", action="store_true", help="only the settings that a bar is about")
    args = parser.parse_args(argv)
    text = corpus() if args.text is None else args.text.read_text(encoding="utf-8")
    if args.write_text:
        args.write_text.write_text(text, encoding="utf-8")
        return 0
    started = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = Settings(model=Settings().model or EMBEDDED_MODEL)
    files = find_model(settings)
    checkpoint = open_checkpoint(files.path)
    tokenizer = Tokenizer.of(checkpoint)
    pattern, pattern_note = choose_pattern(files, settings)
    ids = tokenizer.encode_text(text)[: args.tokens]
    lengths = sorted(args.length or [_LENGTH])
    took: dict[str, float] = {}

    def lap(name: str) -> None:
        took[name] = round(time.monotonic() - started - sum(took.values()), 2)
        print(f"{took[name]:7.2f} s  {name}", flush=True)

    measured = measured_heads(checkpoint, tokenizer, settings.cache_dir, device)
    bench = Quality(checkpoint, pattern, ids, lengths, device, measured=measured)
    lap("bf16")

    def measure(variant: Variant, other: Checkpoint | None = None, heads: MeasuredHeads | None = None) -> None:
        scores = bench.measure(variant, other, heads)
        lap(variant.name)
        print(table(scores).split("\n", 1)[1], flush=True)

    with tempfile.TemporaryDirectory() as folder:
        texts, _ = sample_texts(None)
        sample, about = sample_windows(tokenizer, texts, TOKENS)
        out = Path(folder) / "out"
        quantize_checkpoint(checkpoint, out, sample, formats.metadata(files.name, "", about, None), device)
        lap("quantize")
        calibrated = open_checkpoint(out)
        heads = measured_heads(calibrated, tokenizer, Path(folder), device)
        measure(Variant("w8a8, calibrated", "w8a8"), calibrated, heads)
        measure(Variant("w8a8, calibrated + kv4", "w8a8", "kv4"), calibrated, heads)
    for variant in variants(pattern):
        if not args.bars_only or variant.name in ("w8a8", "kv4", "w8a8 + kv4"):
            measure(variant)
    print(table(bench.scores))
    found = {score.variant: score for score in bench.scores if score.length == lengths[-1]}

    def above(name: str) -> float:
        return 100 * found[name].above

    bars: list[Bar] = [
        at_most("W8A8 (quantize), perplexity above bf16", above("w8a8, calibrated"), "%", 0.5),
        at_most("W8A8 (as loaded), perplexity above bf16", above("w8a8"), "%", 0.5),
        at_most("KV4 (rotated), perplexity above bf16 KV", above("kv4"), "%", 1.0),
        at_least("KV4 (rotated), top-1 agreement", 100 * found["kv4"].top1, "%", 95),
        at_most("W8A8 (quantize) + KV4, perplexity above bf16", above("w8a8, calibrated + kv4"), "%", 1.5),
        at_most("W8A8 (as loaded) + KV4, perplexity above bf16", above("w8a8 + kv4"), "%", 1.5),
        at_most("KV4 bits per element at head_dim 128", stored_bits(device), "bits", 4.25),
        at_most("codes that differ from the reference", differing_codes(device), "codes", 0),
    ]
    details: dict[str, Any] = {
        "text": "Python's manual, package descriptions, standard library" if args.text is None else args.text.name,
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "tokens": len(ids) // lengths[-1] * lengths[-1],
        "pattern": pattern_note,
        "scores": [score.row() for score in bench.scores],
        "heads": list(bench.head_errors.rows()),
        "seconds": took,
    }
    finish("quality", argv, bars, details, args.json, torch.get_num_threads())
    return 0 if all(bar.holds for bar in bars) else 1
