"""Answers of an OpenAI-compatible server as the events of a Generation."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import openai

from app.documents.document import without_halves
from app.engine.generation import Generation, Job
from app.engine.stats import Totals
from app.engine.types import Done, Failed, FinishReason, GenerationRequest, Memory, Progress, Timings, Token, Usage
from app.errors import OctavoError

_CONNECT_S = 10.0
_NO_TOKEN = -1  # another server tells texts, not ids
_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}


class RemoteError(OctavoError):
    """The other server cannot be reached, or refuses; says which server and what it said."""

    http_status = 502


class RemoteEngine:
    """Sends requests to a server and gives their answers; as many at once as are asked for.

    One thread runs all of them in an event loop, so that any can be cancelled at any time: the connection is closed,
    which is how servers learn of it.
    """

    def __init__(self, base_url: str, key: str) -> None:
        self.base_url = base_url
        self.totals = Totals()
        self.timings = Timings()
        self._running: dict[Job, asyncio.Task[None] | None] = {}  # none before the loop has begun it
        self._client = openai.AsyncOpenAI(
            base_url=base_url,
            api_key=key or "none",
            max_retries=0,  # an answer that broke off must not begin again behind one's back
            timeout=openai.Timeout(None, connect=_CONNECT_S),  # reading millions of tokens may take an hour
        )
        self._closing = threading.Lock()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="octavo-remote", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether an answer is on its way."""
        return bool(self._running)

    def models(self) -> list[dict[str, Any]]:
        """What the server lists; raises RemoteError."""

        async def listed() -> list[dict[str, Any]]:
            try:
                found = await self._client.models.list(timeout=_CONNECT_S)
            except openai.OpenAIError as error:
                raise self._told(error) from error
            return [model.model_dump() for model in found.data]

        waited = asyncio.run_coroutine_threadsafe(listed(), self._loop)
        try:
            return waited.result(2 * _CONNECT_S)
        except TimeoutError as error:  # a few bytes now and then: no single reading of them took long
            waited.cancel()
            raise RemoteError(f"{self.base_url} does not finish its list of models. See whether it runs.") from error

    def submit(self, body: dict[str, Any], prompt_tokens: int, on_done: Callable[[Done], None]) -> Generation:
        """Ask for an answer: `body` as the API has it, with "messages" or "prompt"; `prompt_tokens` is an estimate."""
        job = Job(GenerationRequest(()), on_done)
        job.events.put(Progress(0, prompt_tokens, 0, 0.0, 0.0))
        with self._closing:
            if self._closed:
                raise RemoteError("Octavo is being stopped. Start it anew, then ask again.")
            self._running[job] = None
            self._loop.call_soon_threadsafe(self._begin, job, body)
        return _RemoteGeneration(job, self._cancel)

    def close(self) -> None:
        """Cancel everything; nothing is taken any more."""
        with self._closing:
            closed, self._closed = self._closed, True
        if not closed:
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop)
            self._thread.join(5)

    async def _stop(self) -> None:
        tasks = [task for task in self._running.values() if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while self._running:  # what is told of their ends
            await asyncio.sleep(0.01)
        self._loop.stop()

    def _begin(self, job: Job, body: dict[str, Any]) -> None:
        answer = _Parts()
        task = self._running[job] = self._loop.create_task(self._stream(job, body, answer))
        # Not in the task itself: one that is cancelled before its first step runs none of its code.
        task.add_done_callback(lambda ended: self._end(job, answer, ended))

    def _cancel(self, job: Job) -> None:
        """Any thread, any number of times."""
        job.cancelled = job.cancelled or not job.finished.is_set()
        self._loop.call_soon_threadsafe(lambda: (task := self._running.get(job)) is not None and task.cancel())

    def _end(self, job: Job, answer: _Parts, task: asyncio.Task[None]) -> None:
        event = self._event(answer, task)
        if isinstance(event, Failed) or job.on_done is None:
            self._tell(job, event)
            return
        # It may look through long documents, while other answers go on in this loop.
        keeping = self._loop.run_in_executor(None, job.on_done, event)
        keeping.add_done_callback(lambda kept: self._tell(job, event, kept.exception()))

    def _tell(self, job: Job, event: Done | Failed, error: BaseException | None = None) -> None:
        if isinstance(event, Done):
            self.timings = event.timings
        if isinstance(error, Exception):
            event = Failed(error)
        self._count(event)
        del self._running[job]
        job.finished.set()
        job.events.put(event)

    def _event(self, answer: _Parts, task: asyncio.Task[None]) -> Done | Failed:
        """How an answer ended."""
        if task.cancelled():
            return answer.done("cancelled")
        error = task.exception()
        broke_off = answer.begun and isinstance(error, openai.APIConnectionError)
        # A whole answer tells its reason or its usage at least.
        if broke_off or (error is None and answer.reason is None and answer.usage is None):
            return Failed(self._broke_off())
        if isinstance(error, openai.OpenAIError):
            return Failed(self._told(error))
        if isinstance(error, Exception):  # parts of an answer that are none, which nobody checks one by one
            told = f"{self.base_url} sent what is no answer ({type(error).__name__}: {error}). See what runs there."
            return Failed(RemoteError(told))
        return answer.done(answer.reason or "stop")

    async def _stream(self, job: Job, body: dict[str, Any], answer: _Parts) -> None:
        create: Any = self._client.chat.completions if "messages" in body else self._client.completions
        async with await create.create(**body, stream=True, stream_options={"include_usage": True}) as stream:
            async for chunk in stream:
                answer.usage = chunk.usage or answer.usage
                for choice in chunk.choices:
                    text = without_halves((choice.delta.content if "messages" in body else choice.text) or "")
                    answer.reason = _REASONS.get(choice.finish_reason or "", answer.reason)
                    if text:
                        answer.add(text)
                        job.events.put(Token(text, _NO_TOKEN))

    def _broke_off(self) -> RemoteError:
        return RemoteError(f"{self.base_url} broke off its answer in the middle. See whether it runs, then ask again.")

    def _count(self, event: Done | Failed) -> None:
        if isinstance(event, Failed):
            self.totals.ended("failed")
            return
        self.totals.ended(event.finish_reason)
        self.totals.prompt_tokens += event.usage.prompt_tokens
        self.totals.cached_tokens += event.usage.cached_tokens
        self.totals.completion_tokens += event.usage.completion_tokens

    def _told(self, error: openai.OpenAIError) -> RemoteError:
        if isinstance(error, openai.APITimeoutError | openai.APIConnectionError):
            return RemoteError(f"{self.base_url} does not answer. Start that server, or give another --base-url.")
        if isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError):
            return RemoteError(f"{self.base_url} wants another key. Set OPENAI_API_KEY to one that it knows.")
        if isinstance(error, openai.APIStatusError):
            told = RemoteError(f"{self.base_url} refused ({error.status_code}): {error.message}")
            if error.status_code < 500:
                told.http_status = error.status_code
            return told
        return RemoteError(f"{self.base_url} failed: {error}")


class _Parts:
    """An answer as it comes; what the server does not tell stays 0."""

    def __init__(self) -> None:
        self.reason: FinishReason | None = None
        self.usage: Any = None
        self._texts: list[str] = []
        self._began = time.perf_counter()
        self._first = self._last = 0.0

    @property
    def begun(self) -> bool:
        """Whether anything has come."""
        return bool(self._first)

    def add(self, text: str) -> None:
        self._last = time.perf_counter()
        self._first = self._first or self._last
        self._texts.append(text)

    def done(self, reason: FinishReason) -> Done:
        usage, written = Usage(), 0
        if self.usage is not None:
            details = self.usage.prompt_tokens_details
            written = self.usage.completion_tokens
            usage = Usage(self.usage.prompt_tokens, (details and details.cached_tokens) or 0, written)
        writing = (self._last - self._first) * 1000 / (written - 1) if written > 1 else 0.0
        waiting = self._first - self._began if self._first else 0.0
        return Done(reason, "".join(self._texts), (), usage, Timings(waiting, 0.0, writing), Memory())


class _RemoteGeneration(Generation):
    """A Generation whose end is the end of a connection."""

    def __del__(self) -> None:
        with suppress(RuntimeError):  # the loop is gone as well, as at the end of the process
            self.cancel()
