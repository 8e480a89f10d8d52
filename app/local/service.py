"""ChatService with the own engine: loads one model and answers with it."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from app.chat import CUT, Chat, Selection, Turn, ids_of, new_sources, selection_of
from app.config import Settings
from app.conversation import AnswerMemory, Message, exchanges
from app.documents import Document
from app.engine.engine import let_go
from app.engine.generation import Generation
from app.engine.snapshots import SnapshotStore
from app.engine.types import Done, GenerationRequest, Mark, SamplingParams
from app.errors import Cancelled, ContextTooLong, UsageError
from app.evaluation.examiner import Examiner
from app.evaluation.selftest import SelfTest
from app.evidence import passages, quotes
from app.head_costs import Heads
from app.library import Owner
from app.local.forgetting import memory_begins
from app.local.loaded import Loaded
from app.model import LoadProgress, OpenModel, open_model
from app.service import ChatService, MemoryBegins, PlanView, check_numbers, largest_of
from app.words import plural

log = logging.getLogger(__name__)

_PATIENCE_S = 30.0  # for the last step of an answer whose chat is deleted


class LocalService(ChatService):
    """Answers with one model, in this process."""

    def __init__(self, settings: Settings, opener: Callable[[Settings, LoadProgress], OpenModel] = open_model) -> None:
        super().__init__(settings)
        self._opener = opener
        self._loaded: Loaded | None = None
        self._lock = threading.Lock()
        self._answers = AnswerMemory()
        self._opens: dict[str, tuple[tuple[str, int], bool]] = {}  # by label: of what state, and whether it does

    @property
    def ready(self) -> bool:
        return self._loaded is not None

    @property
    def busy(self) -> bool:
        return (loaded := self._loaded) is not None and loaded.engine.busy

    @property
    def waiting(self) -> int:
        return loaded.engine.waiting if (loaded := self._loaded) is not None else 0

    def load(self, progress: LoadProgress | None = None, documents: bool = True) -> None:
        report = self._unless_closed(progress)
        if self._loaded is not None:
            return
        try:
            self.tidy()
            model = self._opener(self.settings, report)
            loaded = Loaded(model, self.library.documents)
            self._pin(loaded)
            try:
                report("Warming up", 0.95)
                loaded.warm_up(documents)
            except BaseException:
                loaded.engine.close()
                raise
            with self._lock:
                if not self._closed.is_set():
                    self._loaded = loaded
            if self._loaded is None:
                loaded.engine.close()
            report("Ready", 1.0)
        except Cancelled:
            pass  # nobody waits for it any more
        except Exception as error:
            self.load_error = error

    def _unless_closed(self, progress: LoadProgress | None) -> LoadProgress:
        """Tells `progress`; raises Cancelled once the service is closed, so that nobody waits for a model in vain."""

        def report(stage: str, fraction: float) -> None:
            if self._closed.is_set():
                raise Cancelled("The service was closed while it opened a model.")
            if progress is not None:
                progress(stage, fraction)

        return report

    @property
    def changeable(self) -> tuple[str, ...]:
        if (loaded := self._loaded) is None:
            return ()
        if self.settings.mode == "endless":
            return ("sink", "recent", "chunk")
        patterned = loaded.model.heads is not None and loaded.model.heads.pattern is not None
        formats = ("kv", "kv_bits", "chunk")
        return ("retrieval_ratio", "sink", "recent", *formats) if patterned else formats

    def change(self, values: Mapping[str, Any], progress: LoadProgress | None = None) -> None:
        loaded = self._need()
        if wrong := sorted(set(values) - set(self.changeable)):
            known = ", ".join(self.changeable) or "nothing"
            raise UsageError(f"{', '.join(wrong)} cannot be changed here while Octavo runs; {known} can.")
        replace(self.settings, **values)  # values that cannot be are told before anybody waits
        report = self._unless_closed(progress)

        def work() -> None:
            before, wanted = self.settings, replace(self.settings, **values)
            if wanted == before:
                return
            loaded.model.runner.release()
            failed = self._exchange(loaded, wanted, report)
            if failed is None:
                self.settings = wanted
                return
            report("Going back to the settings before", 0.0)
            if (lost := self._exchange(loaded, before, report)) is not None:
                self.load_error, self._loaded = lost, None
                loaded.engine.close()
            raise failed

        report("Waiting for the answers in front", 0.0)
        loaded.engine.between(work)
        report("Ready", 1.0)

    def _exchange(self, loaded: Loaded, settings: Settings, report: LoadProgress) -> Exception | None:
        """Open the model anew and go on with it, in the engine's worker; else why not, and then nothing is held."""
        model = None
        try:
            model = self._opener(settings, report)
            report("Warming up", 0.95)
            loaded.exchange(model)
            self._pin(loaded)
        except Exception as error:
            if model is not None:
                model.runner.release()
            let_go(error)
            return error
        return None

    def _pin(self, loaded: Loaded) -> None:
        if (snapshots := loaded.snapshots) is not None:
            snapshots.pinned = self.library.pinned

    def close(self) -> None:
        with self._lock:
            self._closed.set()
            loaded, self._loaded = self._loaded, None
        if loaded is not None:
            loaded.engine.close()

    def count_tokens(
        self,
        document: Document | Selection,
        progress: Callable[[float], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> int:
        return len(self._need().ids.of(selection_of(document), progress, cancelled))

    def plan(self, chat: Chat, documents: Sequence[Document | Selection] | None = None, question: str = "") -> PlanView:
        loaded = self._need()
        loaded.ids.revive(chat, chat.turns)
        known = chat.token_count
        new_ids = loaded.ids.added(not chat.turns, chat.system, new_sources(chat.turns, documents), question)
        new = len(new_ids)
        need, capacity = known + new, loaded.engine.runner.capacity
        fits = capacity is None or need < capacity
        _, stored = loaded.engine.runner.known(chat.token_ids + tuple(new_ids))
        seconds = loaded.engine.cost.seconds(max(known, stored), need)
        if capacity is None:
            kept = f"{'of which only ' if new > loaded.recent else ''}the last {loaded.recent:,} are remembered"
            message = f"To read: {plural(new, 'token')}, {kept}."
        elif fits:
            message = f"{new:,} tokens to read; {need:,} of {capacity:,} tokens of the context are used then."
        else:
            message = str(_too_long(loaded, need, capacity, chat.turns, new_sources(chat.turns, documents)))
        return PlanView(fits, need, new, capacity, loaded.model.bytes_for(need), seconds, message, stored)

    def _ask(
        self,
        chat: Chat,
        before: Sequence[Turn],
        question: str,
        sources: tuple[Selection, ...],
        sampling: SamplingParams,
        turn: Turn | None,
    ) -> Generation:
        loaded = self._need()
        loaded.ids.revive(chat, before)
        before = [chat.tree[t.id] for t in before]
        new_ids = tuple(loaded.ids.added(not before, chat.system, sources, question))
        prompt = ids_of(before) + new_ids
        capacity = loaded.engine.runner.capacity
        if capacity is not None and len(prompt) >= capacity:
            raise _too_long(loaded, len(prompt), capacity, before, sources)
        turn_id = (turn or chat.begin(question)).id
        chat.update(turn_id, sources=sources, prompt_ids=new_ids)
        marks = loaded.ids.marks(prompt, len(prompt) - len(new_ids), sources)
        read = [source for t in before for source in t.sources] + list(sources)
        frame = marks[-1].position if marks else len(prompt) - len(new_ids)
        asked = (frame, loaded.ids.begin(prompt, frame, question)) if read else None
        request = GenerationRequest(prompt, sampling, loaded.stop_ids, chat.id, marks, asked)

        def keep(done: Done) -> None:
            ids = tuple(loaded.prompts.answer_ids(done.token_ids, loaded.stop_ids))
            said = {"answer_ids": ids, "answer": done.text, "finish_reason": done.finish_reason}
            chat.update(turn_id, answered=bool(done.token_ids), **said)  # first: the answer counts without evidence
            places = loaded.ids.places(prompt, read)
            found = passages(done.looked, places, loaded.model.tokenizer) if done.looked is not None else ()
            quoted = quotes(done.text, {place.label: place.document for place in places})
            chat.update(turn_id, passages=tuple(found), quotes=tuple(quoted))

        return self._enter(loaded, request, keep)

    def resume(self, chat: Chat, turn_id: str, sampling: SamplingParams | None = None) -> Generation:
        loaded = self._need()
        sampling = sampling or chat.sampling
        with chat.asking:
            chat.settle()
            turns = [t for t in chat.path(turn_id) if t.answered]
            if not turns or turns[-1].id != turn_id or turns[-1].finish_reason not in CUT:
                raise UsageError("Only an answer that was stopped or cut can be continued.")
            loaded.ids.revive(chat, turns)
            turns = [chat.tree[t.id] for t in turns]
            prompt, capacity = ids_of(turns), loaded.engine.runner.capacity
            if capacity is not None and len(prompt) >= capacity:
                raise _too_long(loaded, len(prompt), capacity, turns)
            turn = chat.tree[turn_id]
            documents = {source.label: source.document for t in turns for source in t.sources}

            def keep(done: Done) -> None:
                ids = turn.answer_ids + tuple(loaded.prompts.answer_ids(done.token_ids, loaded.stop_ids))
                text = loaded.text(ids)
                said = {"answer_ids": ids, "answer": text, "finish_reason": done.finish_reason, "error": ""}
                chat.update(turn_id, **said, quotes=tuple(quotes(text, documents)))

            generation = self._submit(loaded, prompt, sampling, chat.id, keep)
            chat.follow(generation)
        return generation

    def converse(
        self, messages: Sequence[Message], sampling: SamplingParams | None = None, bucket: str = ""
    ) -> Generation:
        loaded = self._need()
        sampling = sampling or SamplingParams()
        system, turns = exchanges(messages)
        ids: list[int] = []
        for turn in turns:
            content = loaded.ids.content(turn.sources, turn.question)
            ids += loaded.prompts.next(content) if ids else loaded.prompts.first(content, system)
            bucket = bucket or _digest(ids)
            if turn.answer is not None:
                known = self._answers.find(ids, turn.answer)
                ids += loaded.model.tokenizer.encode_text(turn.answer, start=False) if known is None else known

        def keep(done: Done) -> None:
            if done.token_ids and not sampling.stop:  # what ends before a stop text has ids behind its text
                self._answers.keep(ids, done.text, tuple(loaded.prompts.answer_ids(done.token_ids, loaded.stop_ids)))

        sources = [source for turn in turns for source in turn.sources]
        marks = loaded.ids.marks(ids, 0, sources)
        return self._submit(loaded, tuple(ids), sampling, "api " + bucket, keep, marks, sources)

    def complete(
        self, prompt: str | Sequence[int], sampling: SamplingParams | None = None, bucket: str = ""
    ) -> Generation:
        loaded = self._need()
        tokenizer = loaded.model.tokenizer
        if isinstance(prompt, str):
            ids = tokenizer.encode_text(prompt)
            if tokenizer.add_bos and tokenizer.bos_id is not None:
                ids.insert(0, tokenizer.bos_id)
        else:
            ids = list(prompt)
            wrong = next((token for token in ids if not 0 <= token < tokenizer.vocab_size), None)
            if wrong is not None:
                raise UsageError(f"Token {wrong} does not exist; ids go from 0 to {tokenizer.vocab_size - 1}.")
        if not ids:
            raise UsageError("The prompt is empty.")
        bucket = bucket or _digest(ids[:64])
        return self._submit(loaded, tuple(ids), sampling or SamplingParams(), "api " + bucket)

    def status(self, chat: Chat | None = None) -> dict[str, Any]:
        loaded = self._need()
        runner, timings = loaded.model.runner, loaded.engine.timings
        return {
            "model": loaded.model.name,
            "note": loaded.model.note,
            "pattern": loaded.model.pattern_note,
            "context_used": chat.token_count if chat is not None else 0,
            "context_capacity": runner.capacity,
            "memory_begins": asdict(begins) if chat is not None and (begins := self.memory_begins(chat)) else None,
            "memory": asdict(runner.memory()),
            "ms_per_token": timings.decode_ms_per_token,
            "prefill_tokens_per_s": timings.prefill_tokens_per_s,
            "busy": loaded.engine.busy,
            "waiting": loaded.engine.waiting,
            "totals": loaded.engine.totals.as_dict(),
            "settings": runner.describe(),
        }

    @property
    def heads(self) -> Heads | None:
        return loaded.model.heads if (loaded := self._loaded) is not None else None

    def self_test(self, document: Document | Selection, count: int) -> SelfTest:
        loaded = self._need()
        return SelfTest(Examiner(loaded.model, loaded.engine), selection_of(document).text, count)

    def reading_seconds(self, tokens: int) -> float | None:
        return loaded.engine.cost.seconds(0, tokens) if (loaded := self._loaded) is not None else None

    def saved_bytes(self, label: str | None = None) -> int:
        return snapshots.bytes_of(label) if (snapshots := self._snapshots) is not None else 0

    def opens_at_once(self, label: str) -> bool:
        if (loaded := self._loaded) is None or (snapshots := loaded.snapshots) is None:
            return False
        if label not in snapshots.labels():
            return False
        state = snapshots.kind, snapshots.bytes_of(label)
        known = self._opens.get(label)
        if known is None or known[0] != state:  # what is saved changes seldom, and texts are long
            document = self.library.documents.get(label)
            known = state, document is not None and _saved_alone(loaded, snapshots, document)
            self._opens[label] = known
        return known[1]

    @property
    def saved_quota(self) -> int:
        return snapshots.quota if (snapshots := self._snapshots) is not None else 0

    @property
    def saved_note(self) -> str:
        return snapshots.notes[-1] if (snapshots := self._snapshots) is not None and snapshots.notes else ""

    def forget(self, label: str) -> None:
        if (snapshots := self._snapshots) is not None:
            snapshots.forget(label, self.library.listed() - {label})

    def delete_chat(self, owner: Owner, chat: Chat) -> None:
        if (loaded := self._loaded) is not None:
            loaded.engine.settle(chat.id, _PATIENCE_S)
        super().delete_chat(owner, chat)

    def _free(self, chat: Chat) -> None:
        super()._free(chat)
        paths = [path for path in chat.paths() if path]
        if paths and (snapshots := self._snapshots) is not None:
            try:
                snapshots.forget_paths(paths, self.library.paths(paths), self.library.named())
            except OSError as error:
                log.warning("What was read for a deleted chat stays on disk: %s", error)

    @property
    def _snapshots(self) -> SnapshotStore | None:
        return loaded.snapshots if (loaded := self._loaded) is not None else None

    def memory_begins(self, chat: Chat, prompt: int = 0, answer: int = 0) -> MemoryBegins | None:
        return memory_begins(self._need(), chat, prompt, answer)

    def _submit(
        self,
        loaded: Loaded,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        chat_id: str,
        keep: Callable[[Done], None] | None = None,
        marks: tuple[Mark, ...] = (),
        sources: Sequence[Selection] = (),
    ) -> Generation:
        check_numbers(sampling)
        capacity = loaded.engine.runner.capacity
        if capacity is not None and len(prompt) >= capacity:
            largest = largest_of(sources, lambda source: len(loaded.ids.of(source)))
            raise ContextTooLong(len(prompt) + 1, capacity, f"{largest}Send fewer messages or a shorter document.")
        return self._enter(loaded, GenerationRequest(prompt, sampling, loaded.stop_ids, chat_id, marks), keep)

    def _enter(self, loaded: Loaded, request: GenerationRequest, keep: Callable[[Done], None] | None) -> Generation:
        if (snapshots := loaded.snapshots) is not None:
            snapshots.expect(mark.label for mark in request.marks)
        return loaded.engine.submit(request, keep)

    def _need(self) -> Loaded:
        if (loaded := self._loaded) is None:
            raise self._why_not_ready()
        return loaded


def _saved_alone(loaded: Loaded, snapshots: SnapshotStore, document: Document) -> bool:
    """Whether a cache on disk ends with the whole document and has but the template ahead of it.

    One that was read behind another document, or behind a system prompt, is of use only there.
    """
    whole = [Selection.whole(document)]
    ids = loaded.ids.added(True, None, whole, "")
    marks = loaded.ids.marks(ids, 0, whole)
    return bool(marks) and snapshots.length(np.asarray(ids[: marks[0].position])) == marks[0].position


def _digest(ids: Sequence[int]) -> str:
    return hashlib.sha256(np.asarray(ids, dtype=np.int64).tobytes()).hexdigest()


def _too_long(
    loaded: Loaded, need: int, capacity: int, before: Sequence[Turn], new: Sequence[Selection] = ()
) -> ContextTooLong:
    largest = largest_of([*(s for turn in before for s in turn.sources), *new], lambda s: len(loaded.ids.of(s)))
    if before:
        advice = f"The chat so far has {len(ids_of(before)):,}. Start a new chat, or choose fewer pages."
    else:
        advice = "Choose fewer pages or a shorter document."
    return ContextTooLong(need + 1, capacity, largest + advice)
