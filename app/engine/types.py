"""What goes into the engine and what comes out: requests and events."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from models.evidence import Looked

FinishReason = Literal["stop", "length", "cancelled", "loop"]


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen; `temperature` 0 is greedy.

    `repetition_penalty` looks at the answer only. `max_new_tokens` None means until the context is full, if it ever is.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Mark:
    """A place in a prompt that is worth keeping, such as a document's end, `position` tokens from its start.

    `label` is the document's; without one it is kept in memory only. With `chat_id` it takes the place of others of
    that chat, so that many of them push nobody else's out.
    """

    position: int
    label: str
    chat_id: str | None = None


@dataclass(frozen=True)
class GenerationRequest:
    """One answer to generate: prompt token ids, how to sample, which ids end it, whose cache it may reuse.

    What was read up to a mark is kept, in memory and on disk, for every request that begins the same.
    `question`, where what frames the question and where the question begins, asks for where it and the answer looked.
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    stop_ids: frozenset[int] = frozenset()
    chat_id: str | None = None
    marks: tuple[Mark, ...] = ()
    question: tuple[int, int] | None = None


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True)
class Timings:
    """Seconds and milliseconds; rates are 0 when nothing was done."""

    prefill_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    decode_ms_per_token: float = 0.0


@dataclass(frozen=True)
class Memory:
    """Bytes held, by kind."""

    weights_bytes: int = 0
    retrieval_kv_bytes: int = 0
    streaming_kv_bytes: int = 0
    peak_bytes: int = 0


@dataclass(frozen=True)
class Queued:
    """Waiting: `place` 1 is next."""

    place: int


@dataclass(frozen=True)
class Opening:
    """What was read before comes back from disk: `done` of `total` prompt tokens are there."""

    done: int
    total: int


@dataclass(frozen=True)
class Progress:
    """Prefill: `done` of `total` prompt tokens are in the cache, `cached` of them without reading."""

    done: int
    total: int
    cached: int
    tokens_per_s: float
    seconds_left: float


@dataclass(frozen=True)
class Token:
    """New text of the answer (may be empty while half a character is held back) and the token behind it."""

    text: str
    token_id: int


@dataclass(frozen=True)
class Done:
    """The end of a request that did not fail; `token_ids` are the generated ones, end token included."""

    finish_reason: FinishReason
    text: str
    token_ids: tuple[int, ...]
    usage: Usage
    timings: Timings
    memory: Memory
    looked: Looked | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, without the token ids and where the answer looked."""
        return {
            "answer": self.text,
            "finish_reason": self.finish_reason,
            "usage": asdict(self.usage),
            "timings": asdict(self.timings),
            "memory": asdict(self.memory),
        }


@dataclass(frozen=True)
class Failed:
    """The request failed; nothing of it stays in the cache."""

    error: Exception = field(compare=False)


Event = Queued | Opening | Progress | Token | Done | Failed
