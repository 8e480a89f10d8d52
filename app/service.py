"""ChatService: the one door from page, API and command line to whatever answers."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app import scratch
from app.chat import Chat, Selection, Turn, new_sources
from app.config import Settings
from app.conversation import Message
from app.documents import Document, read_safely
from app.engine.generation import Generation
from app.engine.sampler import check_sampling
from app.engine.types import SamplingParams
from app.errors import NotReady, UsageError
from app.evaluation.selftest import SelfTest
from app.head_costs import Heads
from app.library import Library, Owner
from app.model import LoadProgress

log = logging.getLogger(__name__)

__all__ = ["Chat", "ChatService", "MemoryBegins", "PlanView", "Selection", "Turn"]


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


class ChatService(ABC):
    """Answers questions about documents. Every method may be called from any thread.

    Whoever answers says how, in the abstract methods; what only the own engine can do is refused or empty here.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.load_error: Exception | None = None
        self.library = Library(settings.cache_dir / "library")
        self._closed = threading.Event()

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Whether questions can be asked."""

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether an answer runs or waits."""

    @property
    def waiting(self) -> int:
        """Requests, and changes of settings, in line behind the answer that runs."""
        return 0

    @abstractmethod
    def load(self, progress: LoadProgress | None = None, documents: bool = True) -> None:
        """Make it ready: slow. Never raises; a failure is kept in `load_error`, which later calls raise.

        `progress(stage, fraction)` is told what goes on, with fractions from 0 to 1. Without `documents` it is not
        made ready to tell where it looks in them.
        """

    @abstractmethod
    def close(self) -> None:
        """Cancel what runs and let go of what answers."""

    def tidy(self) -> None:
        """Delete what earlier runs left behind that were killed; never fails."""
        scratch.sweep()
        self.library.tidy()

    def add_document(self, path: Path, name: str = "") -> Document:
        """Read a file; raises BadDocument or DocumentTooLarge. Needs no model."""
        return read_safely(path, name)

    @abstractmethod
    def count_tokens(
        self,
        document: Document | Selection,
        progress: Callable[[float], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> int:
        """Tokens of a document's text; remembered, so that asking about it is quick.

        `progress` gets fractions from 0 to 1; once `cancelled()` is true, Cancelled is raised.
        """

    def new_chat(self, system: str | None = None) -> Chat:
        """An empty conversation, apart from every other."""
        return Chat(system)

    def fork(self, chat: Chat, turn_id: str) -> Chat:
        """A chat of its own that goes on from an answer; both share what was read up to there."""
        return chat.fork(turn_id)

    @abstractmethod
    def plan(self, chat: Chat, documents: Sequence[Document | Selection] | None = None, question: str = "") -> PlanView:
        """Whether the next question fits, and how long reading for it takes. Nothing runs on the device."""

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
        self._check_ready()
        sampling = sampling or chat.sampling
        check_request(question, sampling)
        with chat.asking:
            chat.settle()
            before = [t for t in chat.path(turn.parent if turn is not None else chat.head) if t.answered]
            generation = self._ask(chat, before, question, new_sources(before, documents), sampling, turn)
            chat.follow(generation)
        return generation

    @abstractmethod
    def _ask(
        self,
        chat: Chat,
        before: Sequence[Turn],
        question: str,
        sources: tuple[Selection, ...],
        sampling: SamplingParams,
        turn: Turn | None,
    ) -> Generation:
        """The question behind `before`, with the `sources` that are new there; nobody else asks in this chat."""

    @property
    def resumes(self) -> bool:
        """Whether `resume` can be."""
        return True

    @abstractmethod
    def resume(self, chat: Chat, turn_id: str, sampling: SamplingParams | None = None) -> Generation:
        """Go on with an answer that was stopped or cut, from its last token; the events tell the new text only.

        Raises as `ask`, and UsageError for an answer that ended by itself.
        """

    @abstractmethod
    def converse(
        self, messages: Sequence[Message], sampling: SamplingParams | None = None, bucket: str = ""
    ) -> Generation:
        """Answer a conversation that is given whole, such as an API request's.

        What the cache has of it is not read again. Requests of one `bucket`, or else of one beginning, share their
        place there. Raises NotReady, UsageError, ContextTooLong.
        """

    @abstractmethod
    def complete(
        self, prompt: str | Sequence[int], sampling: SamplingParams | None = None, bucket: str = ""
    ) -> Generation:
        """Continue a text, which never becomes control tokens, or token ids, which may be any. Raises as `converse`."""

    @abstractmethod
    def status(self, chat: Chat | None = None) -> dict[str, Any]:
        """Facts for people and for --json.

        Keys: model, note, pattern, context_used, context_capacity (None: without end), memory_begins (what
        `memory_begins` gives), memory (bytes by kind), ms_per_token, prefill_tokens_per_s, busy, waiting
        (requests in line), totals (see Totals), settings (mode, weights, kv, retrieval_ratio, sink, recent, chunk,
        backends).
        """

    def memory_begins(self, chat: Chat, prompt: int = 0, answer: int = 0) -> MemoryBegins | None:
        """Where the memory of an endless chat begins; None while nothing is forgotten, or nobody tells.

        `prompt` and `answer`: while a turn runs, the tokens of its whole prompt and of its answer so far.
        """
        return None

    def reading_seconds(self, tokens: int) -> float | None:
        """How long reading so many tokens from their beginning takes; None while that is not known."""
        return None

    @property
    def heads(self) -> Heads | None:
        """The loaded model's head pattern, and what other settings of the cache would cost."""
        return None

    @property
    def changeable(self) -> tuple[str, ...]:
        """Settings that `change` takes: those of the cache that mean something for this model and mode."""
        return ()

    def change(self, values: Mapping[str, Any], progress: LoadProgress | None = None) -> None:
        """Go on with other settings, some of `changeable`, for everybody; returns when they are in force.

        What was asked before is answered first, and what is asked meanwhile waits in line while the model is opened
        anew. Chats stay; what they have read is read again, or comes from disk where these settings were used before.
        Raises UsageError, and what opening the model raises: then the settings before are in force again.
        """
        raise UsageError("Changing settings while Octavo runs needs the own engine, not another server.")

    def self_test(self, document: Document | Selection, count: int) -> SelfTest:
        """A test of what of a document the model really sees: `count` facts are planted in it and asked for."""
        raise UsageError("The self-test needs the own engine, not another server.")

    def saved_bytes(self, label: str | None = None) -> int:
        """Bytes on disk of what was read of a document, or of everything; 0 where nothing is saved."""
        return 0

    def opens_at_once(self, label: str) -> bool:
        """Whether a chat that begins with this document of the library need not read it again."""
        return False

    @property
    def saved_quota(self) -> int:
        """Bytes that what was read may take on disk; 0 where nothing is saved."""
        return 0

    @property
    def saved_note(self) -> str:
        """The last thing that went wrong with what is saved; "" for nothing."""
        return ""

    def forget(self, label: str) -> None:  # noqa: B027 - where nothing is saved, nothing is to be deleted
        """Delete what was read of a document from the disk, as far as no document that is kept builds on it."""

    def delete_chat(self, owner: Owner, chat: Chat) -> None:
        """Delete a saved chat, texts that only it named, and what was read for it and serves nobody else."""
        owner.chats.delete(chat.id)
        self._free(chat)

    def _free(self, chat: Chat) -> None:
        """Free what a deleted chat took and nobody else needs; what cannot be told now is left to `tidy`."""
        try:
            self.library.sweep(self.forget)
        except OSError as error:
            log.warning("What a deleted chat took is not all freed: %s", error)

    def _check_ready(self) -> None:
        """Raises what is wrong where no question can be asked."""
        if not self.ready:
            raise self._why_not_ready()

    def _why_not_ready(self) -> Exception:
        if self.load_error is not None:
            return self.load_error
        closed = self._closed.is_set()
        return NotReady("The service is closed." if closed else "The model is still loading. Try again soon.")


def check_request(question: str, sampling: SamplingParams, name_of: Callable[[str], str] = str) -> None:
    """Raises UsageError for what can be told to be wrong without a model; `name_of` as in `check_numbers`."""
    if not question.strip():
        raise UsageError("The question is empty.")
    check_numbers(sampling, name_of)


def largest_of(sources: Sequence[Selection], tokens_of: Callable[[Selection], int]) -> str:
    """Names the largest of several documents, for whoever is to choose less of them; empty where it is plain."""
    readable = [source for source in sources if source.document.pages]
    if len(readable) < 2:
        return ""
    tokens, name = max((tokens_of(source), source.document.name) for source in readable)
    return f"{name} is the largest document: {tokens:,} tokens. "


def check_numbers(sampling: SamplingParams, name_of: Callable[[str], str] = str) -> None:
    """Raises UsageError for one that is out of its range; `name_of` is what whoever gave it knows a parameter by."""
    try:
        check_sampling(sampling)
    except ValueError as error:
        name, _, wrong = str(error).partition(" ")
        raise UsageError(f"{name_of(name)} {wrong}") from error
