"""Conversations that come whole with every request, and the token ids that their answers were written with."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from app.chat import Selection
from app.errors import UsageError

_KEPT_TOKENS = 1_000_000


@dataclass(frozen=True)
class Message:
    """One message; `sources` are documents that a user's message brings along."""

    role: Literal["system", "user", "assistant"]
    text: str
    sources: tuple[Selection, ...] = ()


@dataclass(frozen=True)
class Exchange:
    """A question with its documents, and its answer; None where it is to be written."""

    question: str
    sources: tuple[Selection, ...]
    answer: str | None


def exchanges(messages: Sequence[Message]) -> tuple[str | None, list[Exchange]]:
    """(system prompt, exchanges) of messages; neighbours of one role are one message.

    A document that an earlier message brought is not read again. Raises UsageError for an order that no chat has.
    """
    system: list[str] = []
    merged: list[Message] = []
    for at, message in enumerate(messages):
        if message.role == "system":
            if merged:
                raise UsageError(f"messages[{at}] is a system message; those come before all others.")
            system.append(message.text)
        elif merged and merged[-1].role == message.role:
            before = merged.pop()
            text = "\n\n".join(filter(None, (before.text, message.text)))
            merged.append(Message(message.role, text, before.sources + message.sources))
        else:
            merged.append(message)
    if not merged or merged[0].role != "user" or merged[-1].role != "user":
        raise UsageError("The first message after the system's must be the user's, and so must be the last.")
    seen: set[object] = set()
    found: list[Exchange] = []
    for at in range(0, len(merged), 2):
        sources = {source.key: source for source in merged[at].sources if source.key not in seen}
        seen.update(sources)
        answer = merged[at + 1].text if at + 1 < len(merged) else None
        if not merged[at].text.strip():
            about = " about its file" if merged[at].sources else ""
            raise UsageError(f"A user's message has no text: ask something{about}.")
        found.append(Exchange(merged[at].text, tuple(sources.values()), answer))
    return "\n\n".join(system) or None, found


class AnswerMemory:
    """Ids of recent answers by what stood before them, so that a conversation sent back goes on with the same ids.

    The same text may have several spellings in tokens; with another one, nothing behind it could be reused.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()
        self._tokens = 0

    def keep(self, prompt_ids: Sequence[int], answer: str, ids: tuple[int, ...]) -> None:
        """`answer` was written as `ids` behind `prompt_ids`."""
        key = _key(prompt_ids, answer)
        with self._lock:
            self._tokens += len(ids) - len(self._answers.pop(key, ()))
            self._answers[key] = ids
            while self._tokens > _KEPT_TOKENS:
                self._tokens -= len(self._answers.popitem(last=False)[1])

    def find(self, prompt_ids: Sequence[int], answer: str) -> tuple[int, ...] | None:
        """The ids of `answer` behind `prompt_ids`, if it was written here."""
        with self._lock:
            return self._answers.get(_key(prompt_ids, answer))


def _key(prompt_ids: Sequence[int], answer: str) -> bytes:
    digest = hashlib.sha256(np.asarray(prompt_ids, dtype=np.int64).tobytes())
    digest.update(answer.strip().encode("utf-8", "surrogatepass"))
    return digest.digest()
