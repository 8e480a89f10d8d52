"""A model that answers: its engine, how it spells prompts, and what it does before the first question."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Sequence
from dataclasses import replace

from app.engine.detokenize import Detokenizer
from app.engine.engine import Engine
from app.engine.snapshots import SnapshotStore
from app.engine.stats import CostModel
from app.engine.types import GenerationRequest, SamplingParams, Timings
from app.library.documents import DocumentStore
from app.model import OpenModel
from app.probe import build_probe
from app.prompt import PromptBuilder
from app.token_ids import TokenIds

_WARM_UP_TOKENS = 256


class Loaded:
    """A model that is ready: engine, prompts and the ids that end an answer."""

    def __init__(self, model: OpenModel, documents: DocumentStore) -> None:
        self.model = model
        self.prompts = PromptBuilder(model.tokenizer)
        self.stop_ids = model.eos_ids | model.tokenizer.eos_ids | self.prompts.end_ids
        kind = (model.name, model.tokenizer.chat_template, sorted(model.tokenizer.special_ids.items()))
        digest = hashlib.sha256(repr(kind).encode()).hexdigest()[:16]
        self.ids = TokenIds(model.tokenizer, self.prompts, digest, documents)
        self.engine = Engine(
            model.runner, lambda stop: Detokenizer(model.tokenizer, stop), CostModel(model.quadratic_cost)
        )

    def exchange(self, model: OpenModel) -> None:
        """Go on with the same model, opened anew with other settings; for `Engine.between`."""
        self.model = model
        self.engine.runner = model.runner
        self.engine.cost = CostModel(model.quadratic_cost)
        self.warm_up()

    @property
    def snapshots(self) -> SnapshotStore | None:
        """What was read and is on disk; None where nothing is saved."""
        return self.model.runner.snapshots

    @property
    def sink(self) -> int:
        """First tokens that every head keeps, where none keeps everything."""
        return int(self.model.runner.describe()["sink"])

    @property
    def recent(self) -> int:
        """Last tokens that every head keeps, where none keeps everything."""
        return int(self.model.runner.describe()["recent"])

    def text(self, ids: Sequence[int]) -> str:
        """The text of a whole answer."""
        detokenizer = Detokenizer(self.model.tokenizer)
        return "".join(map(detokenizer.push, ids)) + detokenizer.flush()

    def words(self, ids: Sequence[int]) -> str:
        """The text of a few tokens from the midst of a text, on one line."""
        text = b"".join(map(self.model.tokenizer.token_bytes, ids)).decode("utf-8", "ignore")
        return " ".join(text.split())

    def warm_up(self, documents: bool = True) -> None:
        """Read and write a little, so that the first question pays for nothing and its time can be told.

        The reading test goes first: it shows which heads tell where a model looks. Where no `documents` will be
        asked about there is nothing to tell.
        """
        if documents:
            probe = build_probe(self.model.tokenizer, self.prompts)
            if self.model.runner.capacity is None or len(probe) < self.model.runner.capacity:
                self.model.runner.find_evidence_heads(probe.prompt, probe.questions)
        runner = self.model.runner
        length = min(runner.chunk, _WARM_UP_TOKENS)
        if runner.capacity is not None:
            length = max(1, min(length, runner.capacity - 2))
        words = self.model.tokenizer.encode_text("The quick brown fox jumps over the lazy dog. ") or [0]
        prompt = tuple((words * (length // len(words) + 1))[:length])
        totals = replace(self.engine.totals, requests=dict(self.engine.totals.requests))
        self.engine.submit(GenerationRequest(prompt, SamplingParams(max_new_tokens=2))).result()
        self.engine.totals, self.engine.timings = totals, Timings()
        gc.collect()
        gc.freeze()  # it stays until the model goes: the collector took 0.1 s to look through it, amid an answer
