"""The command line: `python -m app COMMAND` (see `--help`); without a command it serves.

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted. Errors are one line unless --debug is given.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import re
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args

from app.cli_bench import benchmarks
from app.config import Embedding, EngineName, Kv, Mode, Settings, Weights
from app.errors import UsageError, describe
from app.flags import TOKENS, whole
from kernels import compiled

INTERRUPTED = 128 + signal.SIGINT


class _Parser(argparse.ArgumentParser):
    """Raises UsageError where argparse would print its usage and exit, and refuses values that are none.

    An empty path would be the current folder; what a shell passes for a variable that is not set is empty. Only
    arguments of type `str` may be.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register("type", None, _not_empty)
        self.register("type", Path, lambda text: Path(_not_empty(text)))
        self.register("type", float, _finite)

    def add_subparsers(self, **kwargs: Any) -> Any:
        action = super().add_subparsers(**kwargs)
        action.type = str  # all arguments behind a command pass through it
        return action

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument (\S+): is ", r"\1 is ", message)
        raise UsageError(f"{message[:1].upper()}{message[1:]}. See: {self.prog} --help")


def _not_empty(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty (was a variable not set?)")
    return text


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise argparse.ArgumentTypeError(f"must be a number, not {text}")
    return number


def build_parser() -> argparse.ArgumentParser:
    """All commands and flags. A flag that is not given is None, so that its default stays in `Settings`."""
    parser = _Parser(
        prog="./launch.sh",
        description="Chat with documents of up to several million tokens.",
        epilog="Without COMMAND the flags are those of serve. ./launch.sh test runs every check.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    serve = commands.add_parser("serve", help="the page in the browser", description="Serve the page.")
    _model_flags(serve)
    _answering_flags(serve)
    serve.add_argument("--host", help=f"address to listen on (default {Settings.host}: this machine only)")
    serve.add_argument("--port", type=int, help=f"port to listen on (default {Settings.port})")
    serve.add_argument(
        "--auth",
        action="append",
        metavar="USER:PASSWORD",
        help="who may open the page; may be repeated (or set OCTAVO_AUTH: other users of this machine see flags)",
    )
    serve.add_argument(
        "--api-key", action="append", metavar="KEY", help="a key for /v1; may be repeated (or set OCTAVO_API_KEY)"
    )
    serve.add_argument(
        "--behind-proxy",
        action="store_true",
        default=None,
        help="believe X-Forwarded-For of a proxy on this machine, so that wrong passwords count by who sent them",
    )

    ask = commands.add_parser("ask", help="one answer on the terminal", description="Answer one question.")
    ask.add_argument("question", type=str, metavar="QUESTION")
    ask.add_argument(
        "--document",
        action="append",
        default=[],
        metavar="FILE[:PAGES]",
        help="a file to read ahead of the question, whole or some pages (book.pdf:10-25); may be repeated",
    )
    ask.add_argument("--system", type=str, metavar="TEXT", help="instructions to the model ahead of everything")
    ask.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    _sampling_flags(ask)
    _model_flags(ask)
    _answering_flags(ask)

    plan = commands.add_parser(
        "plan",
        help="memory that a context needs",
        description="Tell the GPU memory that a model and a context need. Needs no weights and no GPU.",
    )
    plan.add_argument("--config", type=Path, metavar="FILE", help="a Hugging Face config.json, instead of --model")
    plan.add_argument(
        "--gpu-memory", metavar="SIZE", help="memory to fit into, such as 80GiB (default: this GPU's, else 80GiB)"
    )
    plan.add_argument("--json", action="store_true", help="print one JSON object")
    _model_flags(plan)

    quantize = commands.add_parser(
        "quantize",
        help="a checkpoint with 8-bit weights",
        description="Write MODEL as a W8A8 checkpoint, calibrated on text. A run that was stopped continues.",
    )
    quantize.add_argument(
        "source", metavar="MODEL", help="'embedded', a hub id, a directory of safetensors, or a .gguf file"
    )
    quantize.add_argument("out", metavar="OUT", type=Path, help="directory to write; --model OUT loads it")
    quantize.add_argument(
        "--calibration",
        metavar="TEXT",
        help="a file or directory of text like what the model will read, or 'none' (default: a small built-in sample)",
    )
    quantize.add_argument(
        "--calibration-tokens", type=whole(1, TOKENS), metavar="N", help="of TEXT to measure on (default 16,384)"
    )
    quantize.add_argument(
        "--embedding", choices=get_args(Embedding), help=f"how the embedding is kept (default {Settings.embedding})"
    )
    quantize.add_argument("--pattern", type=Path, metavar="DIR", help="head pattern to store with it")
    quantize.add_argument("--json", action="store_true", help="print one JSON object")
    _threads_flag(quantize)
    quantize.add_argument("--debug", action="store_true", default=None, help=argparse.SUPPRESS)

    identify = commands.add_parser(
        "identify",
        help="find a model's retrieval heads",
        description="Find the heads that need the whole history and write them as a head pattern.",
    )
    identify.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the pattern is written")
    identify.add_argument(
        "--haystack", type=Path, metavar="PATH", help="text, or a directory of it (default: Python's manual)"
    )
    identify.add_argument("--training-free", action="store_true", help="by attention alone, in minutes on a CPU")
    identify.add_argument("--steps", type=whole(1), default=240, metavar="N", help="of learning gates (default 240)")
    identify.add_argument(
        "--refine",
        type=whole(0),
        default=0,
        metavar="N",
        help="rounds of exchanging heads by measured divergence at --retrieval-ratio (default 0)",
    )
    identify.add_argument("--seed", type=int, default=0, metavar="S", help="of the passkeys (default 0)")
    _heads_flags(identify)
    _threads_flag(identify)

    heads = commands.add_parser(
        "heads",
        help="a model's head pattern and what each ratio costs",
        description="Show which heads keep everything, and what each retrieval ratio costs and saves.",
    )
    heads.add_argument("--plot", type=Path, metavar="FILE", help="also draw a PNG")
    heads.add_argument("--count", type=int, metavar="N", help="so many heads, instead of --retrieval-ratio")
    heads.add_argument("--threshold", type=float, metavar="T", help="heads that score so much, instead of a ratio")
    _format_flags(heads)

    from app.cli_eval import add_kinds

    add_kinds(commands.add_parser("eval", help="measure a model, or what settings cost"), _model_flags, _threads_flag)

    doctor = commands.add_parser(
        "doctor",
        help="versions, devices and kernels",
        description="Tell versions and devices, and for each kernel the backend chosen and why the others declined.",
    )
    doctor.add_argument("--debug", action="store_true", default=None, help=argparse.SUPPRESS)

    bench = commands.add_parser("bench", help="a benchmark of benchmarks/", description="Run a benchmark.")
    bench.add_argument("name", metavar="NAME", help=", ".join(benchmarks()))
    bench.add_argument("args", type=str, nargs=argparse.REMAINDER, metavar="ARGS", help="arguments of that benchmark")
    return parser


def _model_flags(parser: argparse.ArgumentParser) -> None:
    """Of the commands that run a model as it answers, or plan for that."""
    group = _format_flags(parser)
    group.add_argument(
        "--mode",
        choices=get_args(Mode),
        help="duo: retrieval heads keep everything; endless: every head keeps the first and the last tokens, and the"
        f" conversation never ends (default {Settings.mode})",
    )
    group.add_argument("--chunk", type=int, metavar="N", help="tokens read at a time")


def _format_flags(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """A model, its heads, and how weights and cache are held."""
    group = _heads_flags(parser)
    group.add_argument("--weights", choices=get_args(Weights), help=f"default {Settings.weights}")
    group.add_argument(
        "--embedding",
        choices=get_args(Embedding),
        help=f"embedding and output head; bf16 is fp32 on a CPU (default {Settings.embedding})",
    )
    group.add_argument("--kv", choices=get_args(Kv), help=f"cache of retrieval heads (default {Settings.kv})")
    group.add_argument(
        "--kv-bits",
        type=float,
        metavar="B",
        help="mean bits of kv4 with scales: heads that lose most by 4 bits get 8 in this budget, e.g. 5.25 a quarter "
        "of them where the head size is 128 (default: what the head pattern asks for, else 4 bits for all)",
    )
    group.add_argument(
        "--pattern", type=Path, metavar="DIR", help="head pattern: full_attention_heads.tsv, config.json"
    )
    return group


def _heads_flags(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """A model, and how many of its heads keep what."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        help="a hub id, a directory of safetensors, a .gguf file, or 'embedded'"
        " (default: Llama-3 8B with 4M tokens on an NVIDIA GPU, else the small embedded model)",
    )
    group.add_argument(
        "--retrieval-ratio",
        type=float,
        metavar="R",
        help=f"share of the heads that keep everything, where there is a pattern (default {Settings.retrieval_ratio})",
    )
    group.add_argument(
        "--sink-tokens",
        "--sink",
        dest="sink",
        type=int,
        metavar="N",
        help="first tokens that streaming heads keep (default: the pattern's, in endless mode 4)",
    )
    group.add_argument(
        "--recent",
        type=int,
        metavar="N",
        help="last tokens that streaming heads keep (default: the pattern's; endless mode: 2,044)",
    )
    group.add_argument("--context", type=int, metavar="N", help="tokens of context (default: the model's)")
    group.add_argument("--cache-dir", type=Path, metavar="DIR", help=argparse.SUPPRESS)
    parser.add_argument("--debug", action="store_true", default=None, help="log more; show where an error came from")
    return group


def _threads_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: the processors)")


def _answering_flags(parser: argparse.ArgumentParser) -> None:
    """Of the commands that answer questions."""
    _threads_flag(parser)
    parser.add_argument(
        "--library-quota",
        type=float,
        metavar="GB",
        help="disk space for what was read, to open it again at once; 0: none (default: a quarter of what is free)",
    )
    group = parser.add_argument_group("another server in place of the own engine")
    group.add_argument("--engine", choices=get_args(EngineName), help=f"default {Settings.engine}")
    group.add_argument(
        "--base-url",
        metavar="URL",
        help="where a server speaks OpenAI's API, such as vLLM or SGLang; its key is read from OPENAI_API_KEY",
    )


def _sampling_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help="longest answer (default: the context's end, if any)",
    )
    group.add_argument("--temperature", type=float, metavar="T", help="0 takes the likeliest token (default 0)")
    group.add_argument("--top-k", type=int, metavar="K")
    group.add_argument("--top-p", type=float, metavar="P")
    group.add_argument("--min-p", type=float, metavar="P")
    group.add_argument("--repetition-penalty", type=float, metavar="F", help="over the answer (default 1: none)")
    group.add_argument("--seed", type=int, metavar="S", help="makes a sampled answer repeatable")
    group.add_argument(
        "--stop", type=str, action="append", metavar="TEXT", help="end the answer at this text; may be repeated"
    )


def run(argv: Sequence[str]) -> int:
    """Parse and carry out; raises what goes wrong."""
    if not argv or (argv[0].startswith("-") and argv[0] not in ("-h", "--help")):
        argv = ["serve", *argv]
    args, unknown = build_parser().parse_known_args(argv)
    if unknown:
        command = " ".join(filter(None, (args.command, getattr(args, "kind", None))))
        raise UsageError(f"Unrecognized arguments: {' '.join(unknown)}. See: ./launch.sh {command} --help")
    if args.command == "bench":
        from app.cli_bench import bench

        compiled.keep_in(Settings().cache_dir / "kernels")
        return bench(args.name, args.args)
    debug = bool(args.debug)
    if not debug:  # read by the hub's library when it is imported: its retries are no news, its failure is told once
        os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    logging.basicConfig(level=logging.INFO if debug else logging.WARNING, format="%(name)s: %(message)s")
    settings = Settings.from_flags(args)
    compiled.keep_in(settings.cache_dir / "kernels")
    if args.command == "doctor":
        from app.cli_doctor import doctor

        return doctor()
    if args.command == "plan":
        from app.cli_plan import plan

        return plan(settings, args.config, args.gpu_memory, args.json)
    if args.command == "quantize":
        from app.cli_quantize import TOKENS, quantize

        tokens = TOKENS if args.calibration_tokens is None else args.calibration_tokens
        return quantize(settings, args.source, args.out, args.calibration, tokens, args.json)
    if args.command == "identify":
        from app.cli_identify import identify

        return identify(settings, args)
    if args.command == "heads":
        from app.cli_heads import heads

        return heads(settings, args)
    if args.command == "eval":
        from app.cli_eval import evaluate

        return evaluate(settings, args)
    if args.command == "ask":
        from app.cli_ask import ask, sampling_of

        return ask(settings, args.question, args.document, sampling_of(args), args.system, args.json)
    from app.ui import serve

    serve(settings)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; gives the exit code and prints errors to stderr in one line."""
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        return run(argv)
    except KeyboardInterrupt:
        print("octavo: interrupted.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of stdout is gone; what Python flushes at its end must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if "--debug" in argv:
            traceback.print_exc()
        message, _, exit_code = describe(error)
        print("octavo:", " ".join(message.split()), file=sys.stderr)
        return exit_code


def _end(number: int, frame: object) -> NoReturn:
    """Ends as Ctrl+C does: what is open is closed, temporary files are deleted. A second one ends at once."""
    signal.signal(number, signal.SIG_DFL)
    raise SystemExit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    sys.exit(main())
