"""`eval needle`, `eval ruler` and `eval longbench`: how well a model uses a long context, at any setting."""

from __future__ import annotations

import hashlib
import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from app.config import Settings
from app.flags import TOKENS, whole
from app.status_line import StatusLine, TimeLeft

RULER_TASKS = ("multi-key", "multi-value", "variables", "common-words")  # a test holds them against ruler.py's
# What is read of a model's directory beside its config and weights.
_BESIDE = "tokenizer.json tokenizer_config.json chat_template.jinja generation_config.json heads.measured".split()


def add_context_kinds(kinds: Any, *common_flags: Callable[[ArgumentParser], None]) -> None:
    """The flags of every kind; nothing is loaded for them."""
    needle = kinds.add_parser(
        "needle",
        help="facts at every depth of texts of every length",
        description="Plant pass codes in long texts and ask for them: accuracy by length and depth, as JSON and PNG.",
    )
    needle.add_argument("--depths", type=whole(1), default=10, metavar="N", help="depths, evenly spread (default 10)")
    needle.add_argument("--trials", type=whole(1), default=1, metavar="N", help="questions a cell (default 1)")
    needle.add_argument("--multi", action="store_true", help="a needle at every depth of one text, each asked for")
    ruler = kinds.add_parser(
        "ruler",
        help="many keys, many values, variables, common words",
        description="Tasks in RULER's shapes, generated here: the share of what was asked for that was named.",
    )
    ruler.add_argument(
        "--task",
        action="append",
        choices=RULER_TASKS,
        metavar="NAME",
        help=f"only this one of {', '.join(RULER_TASKS)}; may be repeated",
    )
    ruler.add_argument("--samples", type=whole(1), default=10, metavar="N", help="of each task and length (default 10)")
    for kind in (needle, ruler):
        kind.add_argument(
            "--length", type=whole(1, TOKENS), action="append", metavar="N", help="tokens of a prompt; may be repeated"
        )
        kind.add_argument(
            "--haystack", type=Path, metavar="PATH", help="text, or a directory (default: Python's manual)"
        )
        kind.add_argument("--seed", type=int, default=0, metavar="S", help="default 0")
    longbench = kinds.add_parser(
        "longbench",
        help="LongBench's tasks from files on disk",
        description="LongBench's English and code tasks, from its jsonl files, with its metrics.",
    )
    longbench.add_argument(
        "--data", type=Path, required=True, metavar="PATH", help="directory of NAME.jsonl, or a file"
    )
    longbench.add_argument("--task", action="append", metavar="NAME", help="only this one; may be repeated")
    longbench.add_argument("--most", type=whole(1), metavar="N", help="items of each task (default: all)")
    for kind in (needle, ruler, longbench):
        kind.add_argument(
            "--out", type=Path, required=True, metavar="DIR", help="for results; a stopped run goes on there"
        )
        for add in common_flags:
            add(kind)


def _needle(settings: Settings, args: Namespace) -> int:
    import numpy as np

    from app.evaluation.haystack import Haystack, read_haystack
    from app.evaluation.needle import Grid, heat_map, needle

    def grid_of(capacity: int) -> Grid:
        usual = [n for n in (1024, 2048, 4096, 7500) if n + 64 < capacity]
        grid = Grid(tuple(dict.fromkeys(args.length or usual)), args.depths, args.trials, args.multi, args.seed)
        grid.check(capacity)
        return grid

    text = read_haystack(args.haystack)
    grid_of(_longest(settings))
    with _examiner(settings) as examiner, _told() as progress:
        grid = grid_of(examiner.capacity)
        lengths = grid.lengths
        head = {"lengths": lengths, "depths": args.depths, "trials": args.trials, "multi": args.multi}
        journal = _journal(examiner, settings, args, {**head, "haystack": _sha256(text)}, "hit")
        result = needle(examiner, Haystack.of(text, examiner.tokenizer), grid, journal, progress)
        result |= {"settings": examiner.settings}
    heat_map(np.array(result["hits"]), lengths, result["depths"], args.out / "needle.png")
    for length, hits in zip(lengths, result["hits"], strict=True):
        print(f"{length:>9,} tokens  " + " ".join(f"{hit:5.0%}" for hit in hits))
    print(f"found: {result['accuracy']:.1%}")
    return _write(args, result)


def _ruler(settings: Settings, args: Namespace) -> int:
    from app.evaluation.haystack import Haystack, read_haystack
    from app.evaluation.passkeys import PromptMaker
    from app.evaluation.ruler import check, ruler

    text = read_haystack(args.haystack)
    tasks, lengths = args.task or RULER_TASKS, args.length or [4096]
    check(tasks, lengths, _longest(settings))
    with _examiner(settings) as examiner, _told() as progress:
        maker = PromptMaker(examiner.tokenizer, Haystack.of(text, examiner.tokenizer))
        journal = _journal(examiner, settings, args, {"samples": args.samples, "haystack": _sha256(text)}, "score")
        scores = ruler(examiner, maker, tasks, lengths, args.samples, args.seed, journal, progress)
        result = {"scores": scores, "settings": examiner.settings}
    for task, row in scores.items():
        print(f"{task:<14}" + "".join(f"{int(length):>9,}: {score:6.1%}" for length, score in row.items()))
    return _write(args, result)


def _longbench(settings: Settings, args: Namespace) -> int:
    from app.evaluation.longbench import digest, longbench, read_items

    items = list(read_items(args.data, args.task or [], args.most))
    with _examiner(settings) as examiner, _told() as progress:
        journal = _journal(examiner, settings, args, {"data": digest(args.data)}, "score")
        result = {"scores": longbench(examiner, items, journal, progress), "settings": examiner.settings}
    for task, score in result["scores"].items():
        print(f"{task:<22}{score:6.2f}")
    return _write(args, result)


CONTEXT_KINDS: dict[str, Callable[[Settings, Namespace], int]] = {
    "needle": _needle,
    "ruler": _ruler,
    "longbench": _longbench,
}


@contextmanager
def _examiner(settings: Settings) -> Iterator[Any]:
    from app.evaluation.examiner import Examiner
    from app.model import open_model

    examiner = Examiner(open_model(replace(settings, library_quota=0.0), lambda stage, done: None))
    try:
        yield examiner
    finally:
        examiner.close()


def _longest(settings: Settings) -> int:
    """The most tokens that the context can hold, told before the weights are read; memory may allow less."""
    from app.model import find_model
    from models.checkpoint import open_checkpoint

    if settings.mode == "endless":
        return 1 << 40
    window = open_checkpoint(find_model(settings).path).config.max_positions
    return min(settings.context or window, window)


def _journal(examiner: Any, settings: Settings, args: Namespace, more: dict[str, Any], score: str) -> Any:
    from app.evaluation.examiner import Journal

    model = examiner.model
    pattern = None if model.heads is None else model.heads.pattern
    head = {
        "kind": args.kind,
        "model": model.name,
        "checkpoint": None if model.path is None else _checkpoint(model.path, settings.cache_dir),
        "pattern": None if pattern is None else pattern.hash(),
        "seed": getattr(args, "seed", 0),
        "settings": examiner.settings,
        **more,
    }
    return Journal(args.out / f"{args.kind}.jsonl", head, score)


def _checkpoint(path: Path, cache_dir: Path) -> str:
    """sha256 of all that is read of a model's directory or file."""
    from models.fingerprint import fingerprint

    beside = [path / name for name in _BESIDE if (path / name).is_file()]
    read = "".join(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()} " for file in beside)
    return _sha256(fingerprint(path, cache_dir / "weights.json") + read)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _write(args: Namespace, result: dict[str, Any]) -> int:
    (args.out / f"{args.kind}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{args.out / args.kind}.json")
    return 0


@contextmanager
def _told() -> Iterator[Callable[[int, int], None]]:
    """Takes how many of all questions are answered."""
    status, left = StatusLine(sys.stderr), TimeLeft()
    try:
        yield lambda done, total: status.show(f"{done:,} of {total:,} questions{left.told(done / total)}")
    finally:
        status.clear()
