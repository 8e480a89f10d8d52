"""`python -m app eval KIND`: measures what a model does, or what settings cost; the work is in app/evaluation."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from app.config import Settings
from app.errors import UsageError
from app.evaluation.commands import CONTEXT_KINDS, add_context_kinds
from app.flags import TOKENS, whole
from app.writable import folder_to_write

_AddFlags = Callable[[argparse.ArgumentParser], None]


def add_kinds(parser: argparse.ArgumentParser, model_flags: _AddFlags, threads_flag: _AddFlags) -> None:
    """The flags of every kind; nothing is loaded for them."""
    kinds: Any = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    quality = kinds.add_parser(
        "quality",
        help="what quantisation and streaming heads cost on a text",
        description="Perplexity, KL divergence and top-1 agreement against bf16 with full attention, for W8A8, KV8, "
        "KV4 with and without rotation, streaming heads, and all together; and what 4 bits do to each head.",
    )
    quality.add_argument("--model", help="a hub id, a directory of safetensors, a .gguf file, or 'embedded'")
    quality.add_argument("--text", required=True, metavar="FILE", help="a file or directory of text")
    quality.add_argument(
        "--tokens", type=whole(2, TOKENS), default=32_768, metavar="N", help="tokens of it at most (default 32768)"
    )
    quality.add_argument(
        "--length",
        type=whole(2, TOKENS),
        action="append",
        metavar="N",
        help="window in tokens; may be repeated (default 1024, 8192)",
    )
    quality.add_argument("--setting", action="append", metavar="NAME", help="only this one; may be repeated")
    quality.add_argument("--kv-bits", type=float, metavar="B", help="budget of kv4 (default: the pattern's)")
    quality.add_argument("--reference", metavar="MODEL", help="compare with this unquantised model instead")
    quality.add_argument("--pattern", metavar="DIR", help="head pattern (default: the model's)")
    quality.add_argument("--json", action="store_true", help="print one JSON object")
    quality.add_argument("--debug", action="store_true", default=None, help=argparse.SUPPRESS)
    threads_flag(quality)
    add_context_kinds(kinds, model_flags, threads_flag)


def evaluate(settings: Settings, args: argparse.Namespace) -> int:
    """Run one kind; its exit code."""
    if args.kind == "quality":
        from app.evaluation.report import quality

        return quality(settings, args)
    folder_to_write("--out", args.out)
    for suffix in ("jsonl", "json", "png"):
        if (file := args.out / f"{args.kind}.{suffix}").is_dir():
            raise UsageError(f"--out: {file} is a directory. Give another --out, or delete it.")
    return CONTEXT_KINDS[args.kind](settings, args)
