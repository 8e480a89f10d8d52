"""`python -m app ask`: one question, the answer streamed to stdout, all else to stderr."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from types import FrameType
from typing import Any

from app.config import Settings
from app.documents import Document
from app.engine.generation import Generation
from app.engine.types import Done, Failed, Progress, Queued, SamplingParams, Token
from app.engines import open_service
from app.errors import UsageError
from app.evidence import Passage
from app.places import excerpt, told
from app.service import ChatService, MemoryBegins, Selection, check_request
from app.status_line import StatusLine, left

_SETTINGS = ("engine", "mode", "weights", "kv", "retrieval_ratio", "sink", "recent", "chunk", "backends")
_ENDS = {
    "length": "The answer stopped at its limit of tokens.",
    "loop": "The answer was stopped: it went in circles. --temperature 0.7 or --repetition-penalty 1.1 may help.",
    "cancelled": "Interrupted.",
}


def sampling_of(args: argparse.Namespace) -> SamplingParams:
    """Sampling parameters of the flags that were given."""
    given = {f.name: getattr(args, f.name) for f in fields(SamplingParams) if getattr(args, f.name) is not None}
    return SamplingParams(**given | ({"stop": tuple(given["stop"])} if "stop" in given else {}))


def ask(
    settings: Settings,
    question: str,
    documents: Sequence[str],
    sampling: SamplingParams,
    system: str | None = None,
    as_json: bool = False,
) -> int:
    """Print an answer as it comes; gives the exit code. `documents` are FILE or FILE:FIRST-LAST."""
    check_request(question, sampling, lambda name: f"--{name.replace('_', '-')}")
    service = open_service(settings)
    if (reconfigure := getattr(sys.stdout, "reconfigure", None)) is not None:
        reconfigure(errors="replace")  # a terminal may lack a character of the answer
    status = StatusLine(sys.stderr)
    try:
        sources = [open_source(service, name) for name in documents]
        for source in sources:
            for warning in source.document.warnings:
                print(f"octavo: {source.document.name}: {warning}", file=sys.stderr)
        service.load(lambda stage, fraction: status.show(f"{stage} {fraction:.0%}"), bool(sources))
        status.clear()
        chat = service.new_chat(system)
        done = stream(service.ask(chat, question, sources, sampling), status)
        if as_json:
            status_now = service.status(chat)
            settings_used, begins = status_now["settings"], status_now["memory_begins"]
            result: dict[str, Any] = done.as_dict() | {"settings": _named(settings_used)}
            turn = chat.turns[-1] if chat.turns else None
            result["evidence"] = [asdict(passage) for passage in turn.passages] if turn else []
            result["quotes"] = [asdict(quote) for quote in turn.quotes] if turn else []
            result["forgotten_tokens"] = begins["forgotten"] if begins else 0
            print(json.dumps(result), flush=True)
        else:
            if done.finish_reason in _ENDS:
                print(f"octavo: {_ENDS[done.finish_reason]}", file=sys.stderr)
            for passage in chat.turns[-1].passages[:2] if chat.turns else ():
                print(f"octavo: {_looked_at(passage, sources)}", file=sys.stderr)
            if (begins := service.memory_begins(chat)) is not None:
                print(f"octavo: {_forgotten(begins, chat.token_count)}", file=sys.stderr)
        return 128 + signal.SIGINT if done.finish_reason == "cancelled" else 0
    finally:
        status.clear()
        service.close()


def _looked_at(passage: Passage, sources: Sequence[Selection]) -> str:
    """One line that says where to look."""
    document = next((source.document for source in sources if source.label == passage.document), None)
    words = textwrap.shorten(excerpt(passage), 100, placeholder=" …")
    return f"{passage.strength:.0%} from {told(passage, document)}: {words}"


def _named(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: settings[key] for key in _SETTINGS if key in settings}


def open_source(service: ChatService, name: str) -> Selection:
    """Read FILE, or FILE:PAGE or FILE:FIRST-LAST where no file has that whole name."""
    pages = re.fullmatch(r"(.+):(\d{1,9})(?:-(\d{1,9}))?", name)
    if pages is None or os.path.exists(name):  # os.path: no error where a name is too long to be one
        file, colon, rest = name.rpartition(":")
        if colon and not os.path.exists(name) and os.path.isfile(file):
            shown = repr(rest[:40])
            raise UsageError(f"{shown} is no page range. Give FILE:PAGE or FILE:FIRST-LAST, such as book.pdf:10-25.")
        return Selection.whole(service.add_document(Path(name).expanduser()))
    document: Document = service.add_document(Path(pages[1]).expanduser())
    first, last = int(pages[2]), int(pages[3] or pages[2])
    if first > last:
        raise UsageError(f"Pages {first} to {last}: the first page comes after the last. Give FILE:FIRST-LAST.")
    document.slice(first, last)  # refuses pages that are not there before the model is loaded
    return Selection(document, first, last)


def stream(generation: Generation, status: StatusLine) -> Done:
    """Print the answer's text as it comes; raises what it failed with. Ctrl-C ends it after its last token."""
    last = ""
    with _cancelled_by_interrupt(generation):
        while (event := generation.next_event()) is not None:
            match event:
                case Queued(place):
                    status.show(f"Waiting, place {place}")
                case Progress():
                    status.show(_reading(event))
                case Token(text) if text:
                    status.clear()
                    last = text
                    sys.stdout.write(text)
                    sys.stdout.flush()
                case Failed(error):
                    raise error
                case Done():
                    status.clear()
                    if not last.endswith("\n"):
                        print(flush=True)
                    return event
    raise UsageError("The answer was read already.")


def _forgotten(begins: MemoryBegins, tokens: int) -> str:
    last = tokens - begins.forgotten - begins.sink
    return (
        f"Of {tokens:,} tokens, the {begins.forgotten:,} tokens between the first {begins.sink:,} and the last "
        f"{last:,} are forgotten."
    )


def _reading(event: Progress) -> str:
    rate = f", {event.tokens_per_s:,.0f}/s" if event.tokens_per_s else ""
    still = left(event.seconds_left) if event.done < event.total and event.seconds_left else ""
    return f"Reading {event.done:,} of {event.total:,} tokens{rate}{still}"


@contextmanager
def _cancelled_by_interrupt(generation: Generation) -> Iterator[None]:
    """The first Ctrl-C cancels the answer, a second one ends the program."""

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        generation.cancel()

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
