"""`python -m app eval quality`: the table of `Quality` for a model and a text."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from app.calibration import sample_texts
from app.config import Settings
from app.errors import UsageError
from app.evaluation.quality import Quality, Score, variants
from app.measured_heads import measured_heads
from app.model import choose_pattern, find_model
from app.status_line import StatusLine, TimeLeft
from app.tokenizer import Tokenizer
from models.checkpoint import open_checkpoint
from models.keys import key_warning

_LENGTHS = (1024, 8192)
_WORST = 5  # heads shown


def quality(settings: Settings, args: argparse.Namespace) -> int:
    """Print the report; 0 when it is done."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    files = find_model(settings)
    checkpoint = open_checkpoint(files.path)
    reference = None
    if args.reference is not None:
        reference = open_checkpoint(find_model(replace(settings, model=args.reference)).path)
    pattern, pattern_note = choose_pattern(files, settings)
    window = checkpoint.config.max_positions
    if args.length and max(args.length) > window:
        raise UsageError(f"--length is {max(args.length):,}; this model's window is {window:,} tokens.")
    chosen = {variant.name: variant for variant in variants(pattern, settings.kv_bits)}
    for name in args.setting or ():
        if name not in chosen:
            raise UsageError(f"--setting {name!r} is not one of: {', '.join(chosen)}.")
    texts, text_name = sample_texts(Path(args.text).expanduser(), "--text")
    text = "\n\n".join(texts)
    tokenizer = Tokenizer.of(checkpoint)
    ids = tokenizer.encode_text(text[: 12 * args.tokens])[: args.tokens]
    if len(ids) < 2:
        raise UsageError(f"--text {args.text} is {len(ids)} token long: give a text of two or more.")
    most = min(window, len(ids))  # of a text that is shorter than the usual windows all of it is one
    lengths = args.length or [n for n in _LENGTHS if n <= most] or [most]
    wanted = [variant for name, variant in chosen.items() if not args.setting or name in args.setting]
    status, left, settings_done = StatusLine(sys.stderr), TimeLeft(), 0

    def telling(stage: str, done: float) -> None:
        share = (settings_done + done) / (1 + len(wanted))  # the reference comes first
        status.show(f"Comparing: {stage} {share:.0%}{left.told(share)}")

    def measuring(done: float) -> None:
        status.show(f"Measuring the heads' keys, once {done:.0%}")

    try:
        measured = measured_heads(checkpoint, tokenizer, settings.cache_dir, device, measuring)
        bench = Quality(checkpoint, pattern, ids, lengths, device, reference, measured, telling)
        for variant in wanted:
            settings_done += 1
            bench.measure(variant)
    finally:
        status.clear()
    heads = list(bench.head_errors.rows())
    result = {
        "model": files.name,
        "reference": args.reference or files.name,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "text": text_name,
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "pattern": pattern_note,
        "warning": key_warning(checkpoint),
        "scores": [score.row() for score in bench.scores],
        "heads": heads,
    }
    if args.json:
        print(json.dumps(result))
        return 0
    print(table(bench.scores))
    print(f"\nHeads whose attention 4-bit keys blur most (error of a score), of {len(heads)}:")
    for row in sorted(heads, key=lambda row: -row["score_error"])[:_WORST]:
        print(
            f"  layer {row['layer']:>3}, KV head {row['kv_head']:>2}: {row['score_error']:.3f}, without rotation "
            f"{row['score_error_unrotated']:.3f}; keys {row['k_error']:.1%}, values {row['v_error']:.1%}"
        )
    if result["warning"]:
        print(f"\n{result['warning']}")
    return 0


def table(scores: list[Score]) -> str:
    """The scores as text."""
    width = max(len(score.variant) for score in scores)
    lines = [f"{'setting':{width}}  {'length':>6}  {'perplexity':>10}  {'above':>8}  {'KL':>8}  {'top-1':>7}"]
    lines += [
        f"{score.variant:{width}}  {score.length:>6}  {score.perplexity:>10.4f}  {score.above:>+8.2%}  {score.kl:>8.5f}"
        f"  {score.top1:>7.2%}"
        for score in scores
    ]
    return "\n".join(lines)
