"""Chat turns to token ids. A chat's history is ids and only grows, so the cache of one turn serves the next."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from app.errors import UsageError
from models.errors import BadCheckpoint

PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'].capitalize() + ': ' + message['content'] + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
_PRIVATE = range(0xE000, 0xF900)


class PromptTokenizer(Protocol):
    """What prompts need of a tokenizer. `special_ids` maps control tokens' text to their ids.

    `start` is whether the text begins where this tokenizer puts a space before a first word: at the very beginning and,
    with `space_after_special`, after control tokens too.
    """

    chat_template: str | None
    template_variables: Mapping[str, str]
    special_ids: Mapping[str, int]
    bos_id: int | None
    add_bos: bool
    space_after_special: bool

    def encode_text(self, text: str, *, start: bool = True) -> list[int]: ...


@dataclass(frozen=True)
class Encoded:
    """Text that is token ids already, such as a document that several prompts share."""

    ids: Sequence[int]


Content = Sequence[str | Encoded]


class PromptBuilder:
    """Renders a model's chat template into token ids.

    Text of people and documents never becomes a control token, whatever it spells: only the template's own text does.
    `end_ids` are the tokens with which the template ends an answer; generation should stop on them.
    """

    def __init__(self, tokenizer: PromptTokenizer) -> None:
        self._tokenizer = tokenizer
        self._template = _compile(tokenizer.chat_template or PLAIN_TEMPLATE)
        specials = sorted((text for text in tokenizer.special_ids if len(text) > 1), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, specials)) if specials else r"(?!)")
        after_answer = self._after_answer([""])
        self.end_ids = frozenset(after_answer[:1]) & frozenset(tokenizer.special_ids.values())

    def first(self, content: Content, system: str | None = None) -> list[int]:
        """The prompt of a chat's first turn, with exactly one BOS where the model has one."""
        head = [{"role": "system", "content": [system]}] if system else []
        ids = self._encode(self._pieces([*head, {"role": "user", "content": content}]), start=True)
        bos = self._tokenizer.bos_id
        if self._tokenizer.add_bos and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def next(self, content: Content) -> list[int]:
        """What follows a finished answer: its end and the next turn. Append it to all ids so far, see `answer_ids`."""
        return self._after_answer(content)

    def answer_ids(self, generated: Sequence[int], stop_ids: frozenset[int]) -> list[int]:
        """Generated ids as the history keeps them: without the end token, which `next` gives as the template has it."""
        return list(generated[:-1] if generated and generated[-1] in stop_ids else generated)

    def _after_answer(self, content: Content) -> list[int]:
        mark = object()
        turns = [("user", ["?"]), ("assistant", [mark]), ("user", content)]
        pieces = list(self._pieces([{"role": role, "content": parts} for role, parts in turns]))
        places = [at for at, piece in enumerate(pieces) if piece is mark]
        if len(places) != 1:
            raise BadCheckpoint(
                f"The model's chat_template shows an answer {len(places)} times where it must show it once. Mend it, or"
                " use another model."
            )
        rest = pieces[places[0] + 1 :]
        # Some templates write a space before the end token. A model does not generate it, so history has none.
        if len(rest) > 1 and isinstance(rest[0], str) and not rest[0].strip() and isinstance(rest[1], int):
            del rest[0]
        return self._encode(rest, start=False)

    def _pieces(self, messages: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
        """The rendered messages as a sequence of control token ids, texts, and parts that were no text, in order."""
        texts = [part for message in messages for part in message["content"] if isinstance(part, str)]
        guard, mark = _unused("".join(texts) + (self._tokenizer.chat_template or ""), 2)
        opaque: list[Any] = []

        def write(content: Sequence[Any]) -> str:
            written = ""
            for part in content:
                if isinstance(part, str):
                    written += part
                else:
                    written += f"{mark}{len(opaque)}{mark}"
                    opaque.append(part)
            while self._special.search(written):  # again: where two overlap, only the first was cut
                written = self._special.sub(lambda found: found[0][0] + guard + found[0][1:], written)
            return written

        plain = [{"role": message["role"], "content": write(message["content"])} for message in messages]
        try:
            rendered = self._template.render(
                messages=plain, add_generation_prompt=True, tools=None, **self._tokenizer.template_variables
            )
        except Exception as error:  # the template is a program of somebody's: it can fail as any can
            roles = [message["role"] for message in messages]
            advice = "Leave the system prompt out." if "system" in roles else "Mend it, or use another model."
            turns = " and ".join(dict.fromkeys(roles))
            raise BadCheckpoint(
                f"The model's chat_template cannot write {turns} turns: {str(error).rstrip('.')}. {advice}"
            ) from error
        pattern = re.compile(f"{mark}([0-9]+){mark}|({self._special.pattern})")
        at = 0
        for found in pattern.finditer(rendered):
            if found.start() > at:
                yield rendered[at : found.start()].replace(guard, "")
            yield self._tokenizer.special_ids[found[2]] if found[1] is None else opaque[int(found[1])]
            at = found.end()
        if at < len(rendered):
            yield rendered[at:].replace(guard, "")

    def _encode(self, pieces: Iterator[Any] | Sequence[Any], start: bool) -> list[int]:
        ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
                start = self._tokenizer.space_after_special
                continue
            ids.extend(piece.ids if isinstance(piece, Encoded) else self._tokenizer.encode_text(piece, start=start))
            start = False
        return ids


def _compile(source: str) -> Any:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])

    def fail(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: object, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent, **options)

    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = fail
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    try:
        return environment.from_string(source)
    except TemplateError as error:
        at = f", line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
        raise BadCheckpoint(
            f"The model's chat_template is no valid Jinja{at}: {str(error.message).rstrip('.')}. Mend it, or download"
            " the model again."
        ) from error


def _unused(text: str, count: int) -> list[str]:
    """Private-use characters that do not occur in `text`."""
    taken = set(text)
    free = [chr(code) for code in _PRIVATE if chr(code) not in taken][:count]
    if len(free) < count:
        raise UsageError("The text holds every private-use character (U+E000 to U+F8FF). Leave two of them out.")
    return free
