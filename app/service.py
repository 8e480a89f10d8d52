"""ChatService: the one door from page, API and command line to the engine."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from app.chat import Chat, Selection, Turn, ids_of
from app.config import Settings
from app.conversation import AnswerMemory, Message, exchanges
from app.documents import Document, read_safely
from app.engine.detokenize import Detokenizer
from app.engine.engine import Engine, Generation
from app.engine.sampler import check_sampling
from app.engine.snapshots import SnapshotStore
from app.engine.stats import CostModel, Totals
from app.engine.types import Done, GenerationRequest, Mark, SamplingParams
from app.errors import ContextTooLong, NotReady, UsageError
from app.evaluation.examiner import Examiner
from app.evaluation.selftest import Seen, self_test
from app.evidence import Source, find_ids, passages, quotes
from app.head_costs import Heads
from app.library import Library
from app.model import LoadProgress, OpenModel, open_model
from app.probe import build_probe
from app.prompt import Encoded, PromptBuilder

__all__ = ["Chat", "ChatService", "MemoryBegins", "PlanView", "Selection", "Turn"]

_CACHED_TOKENS = 8_000_000  # token ids of documents kept for the next question about them, 8 bytes each
_WARM_UP_TOKENS = 256
_WORDS = 12  # tokens shown of where an endless chat's memory begins
# Between documents and question. Of 15 facts in 3,100 to 6,100 tokens of dry text the embedded model finds 10 with this
# line and 6 with a plain rule instead; with unquantised weights and cache it does no better.
_INSTRUCTION = "Answer from the {} above.\n\n"


T = TypeVar("T")


@dataclass(frozen=True)
class PlanView:
    """What the next question would take, before anything runs.

    Tokens of the whole prompt, of what is new in it, and of the context (None: it has no end); bytes for weights and
    this context; seconds until the first word, None while unknown. `message` says it to a person; `stored_tokens` of
    the prompt were read before and come from memory or disk.
    """

    fits: bool
    prompt_tokens: int
    new_tokens: int
    capacity: int | None
    bytes: int
    seconds_estimate: float | None
    message: str
    stored_tokens: int = 0


@dataclass(frozen=True)
class MemoryBegins:
    """Where an endless chat's memory begins: `forgotten` tokens lie between its first `sink` ones and there.

    `turn` counts from 0, and is the number of turns when it is the one that still runs; `in_answer` tells its answer
    from what was read for it; `words` are the first ones that are remembered, empty where they are not known yet.
    """

    forgotten: int
    sink: int
    turn: int
    in_answer: bool
    words: str


class ChatService:
    """Loads one model and answers questions about documents with it. Every method may be called from any thread."""

    def __init__(self, settings: Settings, opener: Callable[[Settings, LoadProgress], OpenModel] = open_model) -> None:
        self.settings = settings
        self.load_error: Exception | None = None
        self._opener = opener
        self._loaded: _Loaded | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._tokens: OrderedDict[tuple[Any, ...], tuple[int, ...]] = OrderedDict()
        self._answers = AnswerMemory()
        self.library = Library(settings.cache_dir / "library")

    @property
    def ready(self) -> bool:
        """Whether questions can be asked."""
        return self._loaded is not None

    @property
    def busy(self) -> bool:
        """Whether an answer runs or waits."""
        return self._loaded is not None and self._loaded.engine.busy

    def load(self, progress: LoadProgress | None = None) -> None:
        """Load the model: slow. Never raises; a failure is kept in `load_error`, which later calls raise.

        `progress(stage, fraction)` is told what goes on, with fractions from 0 to 1.
        """
        report = progress or (lambda stage, fraction: None)
        if self._loaded is not None:
            return
        try:
            model = self._opener(self.settings, report)
            loaded = _Loaded(model)
            if (snapshots := loaded.snapshots) is not None:
                snapshots.pinned = self.library.pinned
            report("Warming up", 0.95)
            try:
                loaded.warm_up()
            except BaseException:
                loaded.engine.close()
                raise
            with self._lock:
                if not self._closed:
                    self._loaded = loaded
            if self._loaded is None:
                loaded.engine.close()
            report("Ready", 1.0)
        except Exception as error:
            self.load_error = error

    def close(self) -> None:
        """Cancel what runs and let go of the model."""
        with self._lock:
            self._closed, loaded, self._loaded = True, self._loaded, None
        if loaded is not None:
            loaded.engine.close()

    def add_document(self, path: Path, name: str = "") -> Document:
        """Read a file; raises BadDocument or DocumentTooLarge. Needs no model."""
        return read_safely(path, name)

    def count_tokens(
        self,
        document: Document | Selection,
        progress: Callable[[float], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> int:
        """Tokens of a document's text; remembered, so that asking about it is quick.

        `progress` gets fractions from 0 to 1; once `cancelled()` is true, Cancelled is raised.
        """
        return len(self._ids(self._need(), selection_of(document), progress, cancelled))

    def new_chat(self, system: str | None = None) -> Chat:
        """An empty conversation, apart from every other."""
        return Chat(system)

    def fork(self, chat: Chat, turn_id: str) -> Chat:
        """A chat of its own that goes on from an answer; both share what was read up to there."""
        return chat.fork(turn_id)

    def plan(self, chat: Chat, documents: Sequence[Document | Selection] | None = None, question: str = "") -> PlanView:
        """Whether the next question fits, and how long reading for it takes. Nothing runs on the device."""
        loaded = self._need()
        self._revive(loaded, chat, chat.turns)
        known = chat.token_count
        new_ids = self._new_ids(loaded, chat.turns, chat.system, new_sources(chat.turns, documents), question)
        new = len(new_ids)
        need, capacity = known + new, loaded.engine.runner.capacity
        fits = capacity is None or need < capacity
        _, stored = loaded.engine.runner.known(chat.token_ids + tuple(new_ids))
        seconds = loaded.engine.cost.seconds(max(known, stored), need)
        time = "" if seconds is None else f", about {_duration(seconds)}"
        if capacity is None:
            message = f"{new:,} tokens to read{time}; the last {loaded.recent:,} are remembered."
        elif fits:
            message = f"{new:,} tokens to read{time}; {need:,} of {capacity:,} tokens of the context are used then."
        else:
            message = str(_too_long(need, capacity, chat.turns))
        return PlanView(fits, need, new, capacity, loaded.model.bytes_for(need), seconds, message, stored)

    def ask(
        self,
        chat: Chat,
        question: str,
        documents: Sequence[Document | Selection] | None = None,
        sampling: SamplingParams | None = None,
        turn: Turn | None = None,
    ) -> Generation:
        """Ask a question; the answer comes as events.

        `documents` are read ahead of the question; those that this chat has read already are not read again. The
        answer belongs to `turn`, which the chat has begun already, or to a new one at its head, and counts when it ends
        with words, complete or cut short. Raises NotReady, UsageError, ContextTooLong. While an earlier answer of the
        same chat is being cancelled this waits for its last step.
        """
        loaded = self._need()
        sampling = sampling or chat.sampling
        check_request(question, sampling)
        with chat.asking:
            chat.settle()
            before = [t for t in chat.path(turn.parent if turn is not None else chat.head) if t.answered]
            self._revive(loaded, chat, before)
            before = [chat.tree[t.id] for t in before]
            sources = new_sources(before, documents)
            new_ids = tuple(self._new_ids(loaded, before, chat.system, sources, question))
            prompt = ids_of(before) + new_ids
            capacity = loaded.engine.runner.capacity
            if capacity is not None and len(prompt) >= capacity:
                raise _too_long(len(prompt), capacity, before)
            turn_id = (turn or chat.begin(question)).id
            chat.update(turn_id, sources=sources, prompt_ids=new_ids)
            marks = self._marks(loaded, prompt, len(prompt) - len(new_ids), sources)
            read = [source for t in before for source in t.sources] + list(sources)
            request = GenerationRequest(prompt, sampling, loaded.stop_ids, chat.id, marks, evidence=bool(read))

            def keep(done: Done) -> None:
                ids = tuple(loaded.prompts.answer_ids(done.token_ids, loaded.stop_ids))
                said = {"answer_ids": ids, "answer": done.text, "finish_reason": done.finish_reason}
                rests = self._evidence(loaded, prompt, read, done)
                chat.update(turn_id, answered=bool(done.token_ids), **said, **rests)

            generation = loaded.engine.submit(request, keep)
            chat.follow(generation)
        return generation

    def resume(self, chat: Chat, turn_id: str, sampling: SamplingParams | None = None) -> Generation:
        """Go on with an answer that was stopped or cut, from its last token; the events tell the new text only.

        Raises as `ask`, and UsageError for an answer that ended by itself.
        """
        loaded = self._need()
        sampling = sampling or chat.sampling
        with chat.asking:
            chat.settle()
            turns = [t for t in chat.path(turn_id) if t.answered]
            if not turns or turns[-1].id != turn_id or turns[-1].finish_reason not in ("cancelled", "length", "loop"):
                raise UsageError("Only an answer that was stopped or cut can be continued.")
            self._revive(loaded, chat, turns)
            prompt = ids_of([chat.tree[t.id] for t in turns])
            turn = chat.tree[turn_id]

            documents = [source.document for t in turns for source in t.sources]

            def keep(done: Done) -> None:
                ids = turn.answer_ids + tuple(loaded.prompts.answer_ids(done.token_ids, loaded.stop_ids))
                said = {"answer_ids": ids, "answer": loaded.text(ids), "finish_reason": done.finish_reason}
                chat.update(turn_id, **said, quotes=tuple(quotes(loaded.text(ids), documents)))

            generation = self._submit(loaded, prompt, sampling, chat.id, keep)
            chat.follow(generation)
        return generation

    def converse(
        self, messages: Sequence[Message], sampling: SamplingParams | None = None, bucket: str = ""
    ) -> Generation:
        """Answer a conversation that is given whole, such as an API request's.

        What the cache has of it is not read again. Requests of one `bucket`, or else of one beginning, share their
        place there. Raises NotReady, UsageError, ContextTooLong.
        """
        loaded = self._need()
        sampling = sampling or SamplingParams()
        system, turns = exchanges(messages)
        ids: list[int] = []
        for turn in turns:
            content = self._content(loaded, turn.sources, turn.question)
            ids += loaded.prompts.next(content) if ids else loaded.prompts.first(content, system)
            bucket = bucket or _digest(ids)
            if turn.answer is not None:
                known = self._answers.find(ids, turn.answer)
                ids += loaded.model.tokenizer.encode_text(turn.answer, start=False) if known is None else known

        def keep(done: Done) -> None:
            if done.token_ids and not sampling.stop:  # what ends before a stop text has ids behind its text
                self._answers.keep(ids, done.text, tuple(loaded.prompts.answer_ids(done.token_ids, loaded.stop_ids)))

        marks = self._marks(loaded, ids, 0, [source for turn in turns for source in turn.sources])
        return self._submit(loaded, tuple(ids), sampling, "api " + bucket, keep, marks)

    def complete(
        self, prompt: str | Sequence[int], sampling: SamplingParams | None = None, bucket: str = ""
    ) -> Generation:
        """Continue a text, which never becomes control tokens, or token ids, which may be any. Raises as `converse`."""
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
        """Facts for people and for --json.

        Keys: model, note, pattern, context_used, context_capacity (None: without end), memory_begins (what
        `memory_begins` gives), memory (bytes by kind), ms_per_token, prefill_tokens_per_s, busy, waiting
        (requests in line), totals (see Totals), settings (mode, weights, kv, retrieval_ratio, sink, recent, chunk,
        backends).
        """
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
            "totals": asdict(loaded.engine.totals),
            "settings": runner.describe(),
        }

    @property
    def heads(self) -> Heads | None:
        """The loaded model's head pattern and what other ratios would cost; None where it has none."""
        return self._loaded.model.heads if self._loaded is not None else None

    def self_test(self, document: Document | Selection, count: int) -> Iterator[Seen]:
        """Plants `count` facts in a document and asks for each: what of the document the model really sees."""
        if self.settings.engine != "own":
            raise UsageError("The self-test needs the own engine, not another server.")
        loaded = self._need()
        source = document if isinstance(document, Selection) else Selection.whole(document)
        yield from self_test(Examiner(loaded.model, loaded.engine), source.text, count)

    def saved_bytes(self, label: str | None = None) -> int:
        """Bytes on disk of what was read of a document, or of everything; 0 where nothing is saved."""
        snapshots = self._loaded.snapshots if self._loaded is not None else None
        return snapshots.bytes_of(label) if snapshots is not None else 0

    @property
    def saved_quota(self) -> int:
        """Bytes that what was read may take on disk; 0 where nothing is saved."""
        snapshots = self._loaded.snapshots if self._loaded is not None else None
        return snapshots.quota if snapshots is not None else 0

    @property
    def saved_note(self) -> str:
        """The last thing that went wrong with what is saved; "" for nothing."""
        snapshots = self._loaded.snapshots if self._loaded is not None else None
        return snapshots.notes[-1] if snapshots is not None and snapshots.notes else ""

    def forget(self, label: str) -> None:
        """Delete what was read of a document from the disk."""
        if self._loaded is not None and (snapshots := self._loaded.snapshots) is not None:
            snapshots.drop(lambda snapshot: label in snapshot.labels)

    def memory_begins(self, chat: Chat, prompt: int = 0, answer: int = 0) -> MemoryBegins | None:
        """Where the memory of an endless chat begins; None while nothing is forgotten.

        `prompt` and `answer`: while a turn runs, the tokens of its whole prompt and of its answer so far.
        """
        loaded = self._need()
        if loaded.engine.runner.capacity is not None:
            return None
        turns = tuple(chat.turns)
        known = sum(len(turn.prompt_ids) + len(turn.answer_ids) for turn in turns)
        first = max(known, prompt + answer) - loaded.recent
        if first <= loaded.sink:
            return None
        at = first
        for index, turn in enumerate(turns):
            for in_answer, ids in ((False, turn.prompt_ids), (True, turn.answer_ids)):
                if at < len(ids):
                    words = loaded.words(ids[at : at + _WORDS])
                    return MemoryBegins(first - loaded.sink, loaded.sink, index, in_answer, words)
                at -= len(ids)
        return MemoryBegins(first - loaded.sink, loaded.sink, len(turns), first >= prompt, "")

    def _submit(
        self,
        loaded: _Loaded,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        chat_id: str,
        keep: Callable[[Done], None] | None = None,
        marks: tuple[Mark, ...] = (),
    ) -> Generation:
        try:
            check_sampling(sampling)
        except ValueError as error:
            raise UsageError(str(error)) from error
        capacity = loaded.engine.runner.capacity
        if capacity is not None and len(prompt) >= capacity:
            raise ContextTooLong(len(prompt) + 1, capacity, "Send fewer messages or a shorter document.")
        return loaded.engine.submit(GenerationRequest(prompt, sampling, loaded.stop_ids, chat_id, marks), keep)

    def _need(self) -> _Loaded:
        loaded = self._loaded
        if loaded is not None:
            return loaded
        if self.load_error is not None:
            raise self.load_error
        raise NotReady("The service is closed." if self._closed else "The model is still loading. Try again soon.")

    def _evidence(
        self, loaded: _Loaded, prompt: Sequence[int], read: Sequence[Selection], done: Done
    ) -> dict[str, tuple[Any, ...]]:
        """A turn's passages and quotes: what an answer rests on among what its prompt holds, and what it quotes."""
        sources = []
        for source in read:
            if not source.document.pages:  # its text is gone from the library
                continue
            ids = self._ids(loaded, source)
            start = find_ids(prompt, ids)
            if start is not None:
                document = source.document
                sources.append(Source(source.label, document, source.text, source.start, ids, start))
        found = passages(done.looked, sources, loaded.model.tokenizer) if done.looked is not None else []
        return {"passages": tuple(found), "quotes": tuple(quotes(done.text, [s.document for s in sources]))}

    def _new_ids(
        self,
        loaded: _Loaded,
        before: Sequence[Turn],
        system: str | None,
        sources: Sequence[Selection],
        question: str,
    ) -> list[int]:
        content = self._content(loaded, sources, question)
        return loaded.prompts.next(content) if before else loaded.prompts.first(content, system)

    def _revive(self, loaded: _Loaded, chat: Chat, turns: Sequence[Turn]) -> None:
        """Token ids for a saved chat that another model wrote, or whose ids are lost: made anew from its texts."""
        if chat.ids_of != loaded.tokens:
            for turn in list(chat.tree.values()):
                chat.update(turn.id, prompt_ids=(), answer_ids=())
            chat.ids_of = loaded.tokens
        turns = [chat.tree[turn.id] for turn in turns]
        if all(turn.prompt_ids for turn in turns):
            return
        for at, turn in enumerate(turns):
            if any(not source.document.pages for source in turn.sources):
                gone = next(source.document.name for source in turn.sources if not source.document.pages)
                raise UsageError(f"The text of {gone} is no longer in the library. Add it again in a new chat.")
            prompt_ids = tuple(self._new_ids(loaded, turns[:at], chat.system, turn.sources, turn.question))
            answer_ids = tuple(loaded.model.tokenizer.encode_text(turn.answer, start=False))
            chat.update(turn.id, prompt_ids=prompt_ids, answer_ids=answer_ids)

    def _marks(
        self, loaded: _Loaded, prompt: Sequence[int], start: int, sources: Sequence[Selection]
    ) -> tuple[Mark, ...]:
        """Where each document ends in a prompt whose tokens from `start` on hold them in this order."""
        marks = []
        for source in sources:
            ids = self._ids(loaded, source)
            if (at := find_ids(prompt[start:], ids)) is not None:
                start += at + len(ids)
                marks.append(Mark(start, source.label))
        return tuple(marks)

    def _content(self, loaded: _Loaded, sources: Sequence[Selection], question: str) -> list[str | Encoded]:
        return content_of(sources, question, lambda source: Encoded(self._ids(loaded, source)))

    def _ids(
        self,
        loaded: _Loaded,
        source: Selection,
        progress: Callable[[float], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> tuple[int, ...]:
        with self._lock:
            if source.key in self._tokens:
                self._tokens.move_to_end(source.key)
                return self._tokens[source.key]
        name = f"{source.label}-{source.first_page}-{source.last_page}-{loaded.tokens}"
        if (ids := self.library.documents.ids(name)) is None:
            encode = loaded.model.tokenizer.encode_text
            ids = tuple(encode(source.text.strip(), start=False, progress=progress, cancelled=cancelled))
            if self.library.documents.has(source.label):
                self.library.documents.keep_ids(name, ids)
        with self._lock:
            self._tokens[source.key] = ids
            total = sum(map(len, self._tokens.values()))
            while total > _CACHED_TOKENS and len(self._tokens) > 1:
                total -= len(self._tokens.popitem(last=False)[1])
        return ids


def check_request(question: str, sampling: SamplingParams) -> None:
    """Raises UsageError for what can be told to be wrong without a model."""
    if not question.strip():
        raise UsageError("The question is empty.")
    try:
        check_sampling(sampling)
    except ValueError as error:
        raise UsageError(str(error)) from error


class _Loaded:
    """A model that is ready: engine, prompts and the ids that end an answer."""

    def __init__(self, model: OpenModel) -> None:
        self.model = model
        self.prompts = PromptBuilder(model.tokenizer)
        self.stop_ids = model.eos_ids | model.tokenizer.eos_ids | self.prompts.end_ids
        kind = (model.name, model.tokenizer.chat_template, sorted(model.tokenizer.special_ids.items()))
        self.tokens = hashlib.sha256(repr(kind).encode()).hexdigest()[:16]  # whose token ids a saved chat holds
        self.engine = Engine(
            model.runner, lambda stop: Detokenizer(model.tokenizer, stop), CostModel(model.quadratic_cost)
        )

    @property
    def snapshots(self) -> SnapshotStore | None:
        """What was read and is on disk; None where nothing is saved."""
        return getattr(self.model.runner, "snapshots", None)

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

    def warm_up(self) -> None:
        """Read and write a little, so that the first question pays for nothing and its time can be told.

        The reading test goes first: it shows which heads tell what an answer rests on.
        """
        probe = build_probe(self.model.tokenizer, self.prompts)
        if self.model.runner.capacity is None or len(probe) < self.model.runner.capacity:
            self.model.runner.find_evidence_heads(probe.prompt, probe.questions)
        runner = self.model.runner
        length = min(runner.chunk, _WARM_UP_TOKENS)
        if runner.capacity is not None:
            length = max(1, min(length, runner.capacity - 2))
        words = self.model.tokenizer.encode_text("The quick brown fox jumps over the lazy dog. ") or [0]
        prompt = tuple((words * (length // len(words) + 1))[:length])
        self.engine.submit(GenerationRequest(prompt, SamplingParams(max_new_tokens=2))).result()
        self.engine.totals = Totals()


def content_of(sources: Sequence[Selection], question: str, text_of: Callable[[Selection], T]) -> list[str | T]:
    """A user's message: the documents, each under its title, then the question. `text_of` gives a document's text."""
    content: list[str | T] = []
    for source in sources:
        content += [f"Document: {source.title}\n\n", text_of(source), "\n\n"]
    if sources:
        content.append(_INSTRUCTION.format("document" if len(sources) == 1 else "documents"))
    content.append(question.strip())
    return content


def selection_of(document: Document | Selection) -> Selection:
    """A document as a selection of all its pages."""
    return document if isinstance(document, Selection) else Selection.whole(document)


def new_sources(before: Sequence[Turn], documents: Sequence[Document | Selection] | None) -> tuple[Selection, ...]:
    """Those that no turn before has read, each once."""
    seen = {source.key for turn in before for source in turn.sources}
    chosen = {source.key: source for source in map(selection_of, documents or ())}
    return tuple(source for key, source in chosen.items() if key not in seen)


def _digest(ids: Sequence[int]) -> str:
    return hashlib.sha256(np.asarray(ids, dtype=np.int64).tobytes()).hexdigest()


def _too_long(need: int, capacity: int, before: Sequence[Turn]) -> ContextTooLong:
    if before:
        advice = f"The chat so far has {len(ids_of(before)):,}. Start a new chat, or choose fewer pages."
    else:
        advice = "Choose fewer pages or a shorter document."
    return ContextTooLong(need + 1, capacity, advice)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
