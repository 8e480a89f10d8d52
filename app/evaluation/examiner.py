"""Asks a model many questions, through the engine as in use, and remembers what was answered."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app.engine.detokenize import Detokenizer
from app.engine.engine import Engine
from app.engine.generation import Generation
from app.engine.stats import CostModel
from app.engine.types import Done, Event, Failed, GenerationRequest, Mark, SamplingParams
from app.errors import OctavoError, UsageError
from app.model import OpenModel
from app.prompt import PromptBuilder
from models.files import json_object

_BUCKET = "examiner"  # its kept places take each other's place, and no chat's


class Stopped(OctavoError):
    """Somebody stopped the questions."""


class Examiner:
    """One model for many prompts; greedy answers. `engine` is the model's where it has one already.

    Prompts that begin the same are read once up to there: whoever is asked first names the place, and every later one
    starts from a fork of the cache. Windows are exact in prefill as everywhere, since it is the engine that reads.
    """

    def __init__(self, model: OpenModel, engine: Engine | None = None) -> None:
        self.model = model
        self.tokenizer = model.tokenizer
        self.prompts = PromptBuilder(model.tokenizer)
        self.settings = model.runner.describe()
        self.capacity = model.runner.capacity or 1 << 40
        self.read_tokens = 0  # really read, without what was forked
        self.stopped = False
        self.at: Event | None = None  # the newest of the question that is being asked
        self._stop_ids = model.eos_ids | model.tokenizer.eos_ids | self.prompts.end_ids
        self._engine = engine or Engine(
            model.runner, lambda stop: Detokenizer(model.tokenizer, stop), CostModel(model.quadratic_cost)
        )
        self._runner = model.runner
        self._asking: Generation | None = None

    def ask(self, ids: Sequence[int], most: int, shared: int = 0) -> str:
        """The answer to a prompt, of at most `most` tokens; its first `shared` tokens are kept for later prompts.

        Raises Stopped once `stop` was called, and UsageError where the model was opened with other settings meanwhile.
        """
        marks = (Mark(shared, "", _BUCKET),) if shared else ()
        request = GenerationRequest(tuple(ids), SamplingParams(max_new_tokens=most), self._stop_ids, None, marks)
        self.at = None
        self._asking = self._engine.submit(request)
        if self.stopped:
            self._asking.cancel()
        for event in self._asking:
            self.at = event
        if isinstance(self.at, Failed):
            raise self.at.error
        done = self.at
        assert isinstance(done, Done)
        if self.stopped:
            raise Stopped("Stopped.")
        if self._engine.runner is not self._runner:
            raise UsageError("The settings were changed meanwhile. Begin anew.")
        self.read_tokens += done.usage.prompt_tokens - done.usage.cached_tokens
        return done.text

    def stop(self) -> None:
        """Cancel what is being asked, and ask no more; from any thread."""
        self.stopped = True
        if self._asking is not None:
            self._asking.cancel()

    def close(self) -> None:
        """Let go of the model."""
        self._engine.close()


class Journal:
    """Results as they come, one JSON object a line, so that an evaluation which was stopped goes on where it was.

    `head` says what decides the answers; a file of another evaluation is refused. `score`: the field of every row that
    the result is made of, a number from 0 to 1, None where each has its own.
    """

    def __init__(self, file: Path, head: dict[str, Any], score: str | None = None) -> None:
        self._file = file
        self.rows: dict[str, dict[str, Any]] = {}
        head = json.loads(json.dumps(head))
        # What follows the last newline was cut off.
        lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
        lines = lines or [json.dumps(head).encode()]
        for number, line in enumerate(lines, 1):
            row = self._read(number, line)
            if number == 1:
                if differ := sorted(name for name in head | row if head.get(name) != row.get(name)):
                    told = ", ".join(differ)
                    raise UsageError(f"{file} is of another evaluation: {told} differ. Give another --out.")
                continue
            if not isinstance(key := row.get("key"), str):
                raise self._damaged(number, "key must be a text")
            result = row.get(score) if score else 0
            if not isinstance(result, int | float) or not 0 <= result <= 1:
                raise self._damaged(number, f"{score} must be a number from 0 to 1")
            self.rows[key] = row
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"".join(line + b"\n" for line in lines))

    def _read(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            return json_object(line)
        except ValueError as error:
            raise self._damaged(number, str(error)) from error

    def _damaged(self, number: int, why: str) -> UsageError:
        return UsageError(f"{self._file}, line {number} is damaged: {why}. Give another --out, or delete it.")

    def __contains__(self, key: str) -> bool:
        return key in self.rows

    def add(self, key: str, **row: Any) -> None:
        """Keep one result."""
        self.rows[key] = {"key": key, **row}
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(self.rows[key]) + "\n")
