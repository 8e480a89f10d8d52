"""ChatService with another server: the same chats, documents and plans, without what needs the own engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from app.chat import Chat, Selection, Turn, content_of, new_sources, selection_of
from app.config import Settings
from app.conversation import Message, exchanges
from app.documents import Document
from app.engine.generation import Generation
from app.engine.types import Done, Memory, SamplingParams
from app.errors import ContextTooLong, UsageError
from app.evidence import quotes
from app.model import LoadProgress
from app.remote.engine import RemoteEngine, RemoteError
from app.service import ChatService, PlanView, largest_of

_AGAIN_S = 2.0
_BYTES_PER_TOKEN = 4.0  # of English, until the server has told what it counted
# Names under which servers tell how many tokens a context holds.
_CONTEXT_KEYS = ("max_model_len", "context_length", "context_window", "max_context_length")
_NOTE = (
    "Answers come from {}. Saved caches, passages behind an answer, memory and head figures need Octavo's own engine."
)


class RemoteService(ChatService):
    """Asks a server for answers. Token counts are estimates: its tokenizer is not here."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        assert settings.base_url is not None
        self._engine = RemoteEngine(settings.base_url, settings.base_key)
        self._model = ""
        self._capacity: int | None = settings.context
        self._bytes_per_token = _BYTES_PER_TOKEN
        self._used: dict[str, int] = {}

    @property
    def ready(self) -> bool:
        return bool(self._model)

    @property
    def busy(self) -> bool:
        return self._engine.busy

    def load(self, progress: LoadProgress | None = None, documents: bool = True) -> None:
        """Ask the server for its models; never raises, as ChatService.load has it.

        While it does not answer, or refuses, it is asked again every few seconds: it may still be starting.
        """
        self.tidy()
        self._find_model()
        if isinstance(self.load_error, RemoteError):
            threading.Thread(target=self._wait_for_it, name="octavo-remote-wait", daemon=True).start()
        if progress is not None:
            progress("Ready", 1.0)

    def _find_model(self) -> None:
        try:
            listed = {str(model["id"]): model for model in self._engine.models()}
            model = self.settings.model or (next(iter(listed)) if len(listed) == 1 else None)
            if model is None or model not in listed:
                names = ", ".join(listed) or "none"
                raise UsageError(f"Give one of the models of {self._engine.base_url} with --model: {names}.")
            told = [listed[model][key] for key in _CONTEXT_KEYS if isinstance(listed[model].get(key), int)]
            self._capacity = self.settings.context or (told[0] if told else None)
            self.load_error = None
            self._model = model
        except Exception as error:
            self.load_error = error

    def _wait_for_it(self) -> None:
        while isinstance(self.load_error, RemoteError) and not self._closed.wait(_AGAIN_S):
            self._find_model()

    def close(self) -> None:
        self._closed.set()
        self._model = ""
        self._engine.close()

    def count_tokens(
        self,
        document: Document | Selection,
        progress: Callable[[float], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> int:
        """An estimate from the length of the text."""
        return self._tokens_of(selection_of(document).text)

    def plan(self, chat: Chat, documents: Sequence[Document | Selection] | None = None, question: str = "") -> PlanView:
        self._check_ready()
        return self._plan(chat.turns, new_sources(chat.turns, documents), question)

    def _plan(self, before: Sequence[Turn], sources: Sequence[Selection], question: str) -> PlanView:
        new = self._tokens_of(_content(sources, question))
        need = self._tokens_before(before) + new
        capacity = self._capacity
        fits = capacity is None or need < capacity
        of = "" if capacity is None else f" of {capacity:,}"
        message = f"About {need:,}{of} tokens." if fits else str(self._too_long(need, before, sources))
        return PlanView(fits, need, new, capacity, 0, None, message)

    def _ask(
        self,
        chat: Chat,
        before: Sequence[Turn],
        question: str,
        sources: tuple[Selection, ...],
        sampling: SamplingParams,
        turn: Turn | None,
    ) -> Generation:
        plan = self._plan(before, sources, question)
        if not plan.fits:
            raise self._too_long(plan.prompt_tokens, before, sources)
        messages = _messages(chat.system, before)
        messages.append({"role": "user", "content": _content(sources, question)})
        turn_id = (turn or chat.begin(question)).id
        chat.update(turn_id, sources=sources)
        read = {source.label: source.document for t in before for source in t.sources}
        read |= {source.label: source.document for source in sources}

        def keep(done: Done) -> None:
            found = tuple(quotes(done.text, read))
            said = {"answer": done.text, "finish_reason": done.finish_reason, "quotes": found}
            chat.update(turn_id, answered=bool(done.text), **said)
            self._used[turn_id] = done.usage.prompt_tokens + done.usage.completion_tokens

        return self._submit_body({"messages": messages}, sampling, keep)

    @property
    def resumes(self) -> bool:
        return False

    def resume(self, chat: Chat, turn_id: str, sampling: SamplingParams | None = None) -> Generation:
        """Raises UsageError: the API has no way to go on with an answer from its last token."""
        raise UsageError("Going on with a cut answer needs Octavo's own engine. Ask for the rest instead.")

    def converse(
        self, messages: Sequence[Message], sampling: SamplingParams | None = None, bucket: str = ""
    ) -> Generation:
        self._check_ready()
        system, turns = exchanges(messages)
        body = [{"role": "system", "content": system}] if system else []
        for turn in turns:
            body.append({"role": "user", "content": _content(turn.sources, turn.question)})
            if turn.answer is not None:
                body.append({"role": "assistant", "content": turn.answer})
        return self._submit_body({"messages": body}, sampling or SamplingParams())

    def complete(
        self, prompt: str | Sequence[int], sampling: SamplingParams | None = None, bucket: str = ""
    ) -> Generation:
        self._check_ready()
        if not prompt:
            raise UsageError("The prompt is empty.")
        text = prompt if isinstance(prompt, str) else list(prompt)
        return self._submit_body({"prompt": text}, sampling or SamplingParams())

    def status(self, chat: Chat | None = None) -> dict[str, Any]:
        """Facts as ChatService.status has them; "memory" is all zeros, since the other server's is not known."""
        self._check_ready()
        return {
            "model": self._model,
            "note": _NOTE.format(self._engine.base_url),
            "pattern": "",
            "context_used": self._tokens_before(chat.turns) if chat is not None else 0,
            "context_capacity": self._capacity,
            "memory_begins": None,
            "memory": asdict(Memory()),
            "ms_per_token": self._engine.timings.decode_ms_per_token,
            "prefill_tokens_per_s": 0.0,
            "busy": self._engine.busy,
            "waiting": 0,
            "totals": self._engine.totals.as_dict(),
            "settings": {"engine": f"OpenAI-compatible server at {self._engine.base_url}"},
        }

    def _submit_body(
        self, body: dict[str, Any], sampling: SamplingParams, keep: Callable[[Done], None] | None = None
    ) -> Generation:
        text = "".join(str(message["content"]) for message in body.get("messages", ())) or str(body.get("prompt", ""))

        def learn(done: Done) -> None:
            if "messages" in body and done.usage.prompt_tokens > 256:
                self._bytes_per_token = len(text.encode("utf-8", "replace")) / done.usage.prompt_tokens
            if keep is not None:
                keep(done)

        whole = {"model": self._model, **body, **_sampling_body(sampling)}
        return self._engine.submit(whole, self._tokens_of(text), learn)

    def _tokens_of(self, text: str) -> int:
        return max(1, round(len(text.encode("utf-8", "replace")) / self._bytes_per_token))

    def _tokens_before(self, turns: Sequence[Turn]) -> int:
        """What turns hold: as the server counted it for the last of them, else an estimate."""
        if not turns:
            return 0
        return self._used.get(turns[-1].id) or self._tokens_of("".join(m["content"] for m in _messages(None, turns)))

    def _too_long(self, need: int, before: Sequence[Turn], new: Sequence[Selection]) -> ContextTooLong:
        assert self._capacity is not None
        largest = largest_of([*(s for turn in before for s in turn.sources), *new], self.count_tokens)
        start = "Start a new chat, or choose fewer pages." if before else "Choose fewer pages."
        return ContextTooLong(need + 1, self._capacity, f"The first is an estimate. {largest}{start}")


def _content(sources: Sequence[Selection], question: str) -> str:
    return "".join(content_of(sources, question, _text))


def _text(source: Selection) -> str:
    if not source.document.pages:
        raise UsageError(f"The text of {source.document.name} is no longer in the library. Add it again in a new chat.")
    return source.text.strip()


def _messages(system: str | None, turns: Sequence[Turn]) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": system}] if system else []
    for turn in turns:
        messages.append({"role": "user", "content": _content(turn.sources, turn.question)})
        messages.append({"role": "assistant", "content": turn.answer})
    return messages


def _sampling_body(sampling: SamplingParams) -> dict[str, Any]:
    """Sampling as the API has it; what OpenAI's own does not know is sent only where it says something."""
    body: dict[str, Any] = {"temperature": sampling.temperature}
    default = SamplingParams()
    if sampling.top_p != default.top_p:
        body["top_p"] = sampling.top_p
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    if sampling.max_new_tokens is not None:
        body["max_tokens"] = sampling.max_new_tokens
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    names = ("top_k", "min_p", "repetition_penalty")
    more = {name: getattr(sampling, name) for name in names if getattr(sampling, name) != getattr(default, name)}
    return body | ({"extra_body": more} if more else {})
