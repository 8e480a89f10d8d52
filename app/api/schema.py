"""What requests may say. A field is used, or allowed with the one value that changes nothing, or refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from app.api.errors import ApiError
from app.engine.types import SamplingParams

# Fields of OpenAI's API that are not offered, with values that ask for nothing. None always does.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "store": (False,),
    "echo": (False,),
    "suffix": ("",),
    "service_tier": ("auto", "default"),
    "metadata": ({},),
    # In messages that clients send back as they got them.
    "tool_calls": ([],),
    "annotations": ([],),
}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {
            name: value
            for name, value in data.items()
            if name in cls.model_fields or not (value is None or _asks_nothing(name, value))
        }


def _asks_nothing(name: str, value: Any) -> bool:
    # The type counts too: True == 1 in Python, and "n": true is a mistake to tell.
    number = (int, float)
    return any(
        value == neutral and (type(value) is type(neutral) or (type(value) in number and type(neutral) in number))
        for neutral in _NEUTRAL.get(name, ())
    )


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class FileRef(_Strict):
    """A stored document by `file_id`, or one carried along as a data URL in `file_data`."""

    file_id: str | None = None
    file_data: str | None = None
    filename: str | None = None

    @model_validator(mode="after")
    def _one(self) -> FileRef:
        if (self.file_id is None) == (self.file_data is None):
            raise ValueError("give either file_id or file_data")
        return self


class FilePart(_Strict):
    type: Literal["file"]
    file: FileRef


def _text_or_list(value: Any) -> str:
    return "as list" if isinstance(value, list) else "as text"


def _kind_of_part(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if kind not in ("text", "file"):
        raise ApiError(
            f"A content part of type {kind!r} is not supported; text and file are.",
            param="messages",
            code="unsupported_content",
        )
    return f"as {kind}"


Part = Annotated[
    Annotated[TextPart, Tag("as text")] | Annotated[FilePart, Tag("as file")], Discriminator(_kind_of_part)
]
Content = Annotated[
    Annotated[str, Tag("as text")] | Annotated[list[Part], Tag("as list")], Discriminator(_text_or_list)
]
_StopText = Annotated[str, Field(min_length=1)]
Stop = Annotated[
    Annotated[_StopText, Tag("as text")] | Annotated[list[_StopText], Tag("as list")],
    Discriminator(_text_or_list),
]


class ChatMessage(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


# A true is no 1 here, nor a "1" a number.
Whole = Annotated[int, Field(strict=True)]
AnswerTokens = Annotated[int, Field(strict=True, ge=1, le=2**40)]  # as many as the engine takes
Number = Annotated[float, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]


class StreamOptions(_Strict):
    include_usage: Flag = False


class _Generate(_Strict):
    """What both kinds of completion share."""

    model: str
    stream: Flag = False
    stream_options: StreamOptions | None = None
    max_tokens: AnswerTokens | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    seed: Annotated[Whole, Field(ge=0, lt=2**63)] | None = None
    stop: Stop | None = None
    # Not OpenAI's, but known from other servers; the client sends them as extra_body.
    top_k: Annotated[Whole, Field(ge=0, lt=2**31)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Number, Field(ge=0.01, le=100)] | None = None
    # Requests of one key share their place in the cache.
    prompt_cache_key: str | None = None
    user: str | None = None

    @model_validator(mode="after")
    def _streams(self) -> _Generate:
        if self.stream_options is not None and not self.stream:
            raise ApiError("stream_options needs stream: true.", param="stream_options")
        if isinstance(self.stop, list) and len(self.stop) > 16:
            raise ApiError(f"stop holds {len(self.stop)} texts; 16 are the most.", param="stop")
        return self

    @property
    def bucket(self) -> str:
        return self.prompt_cache_key or self.user or ""

    @property
    def longest(self) -> int | None:
        return self.max_tokens

    def sampling(self) -> SamplingParams:
        """Without a word about it the likeliest token is taken: answers about documents are to be repeatable."""
        given = {
            name: getattr(self, name)
            for name in ("temperature", "top_p", "seed", "top_k", "min_p", "repetition_penalty")
            if getattr(self, name) is not None
        }
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(**given, max_new_tokens=self.longest, stop=stops)


class ChatRequest(_Generate):
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=10_000)]
    max_completion_tokens: AnswerTokens | None = None

    @property
    def longest(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(_Generate):
    """`prompt` is a text or token ids, or a list of one of them."""

    prompt: Any
    max_tokens: AnswerTokens | None = 16  # as OpenAI has it

    @property
    def text_or_ids(self) -> str | list[int]:
        prompt = self.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str) or (
            isinstance(prompt, list) and all(isinstance(at, int) and not isinstance(at, bool) for at in prompt)
        ):
            return prompt
        raise ApiError("prompt must be one text or one list of token ids.", param="prompt")
