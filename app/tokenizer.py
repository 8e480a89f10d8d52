"""Text to token ids and back, from a model directory or a GGUF file, on the `tokenizers` library alone."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from tokenizers import Tokenizer as Backend

from app.engine.detokenize import Detokenizer, TokenBytes
from app.errors import Cancelled
from app.gguf_tokenizer import byte_alphabet, spec_from_gguf
from app.json_tokenizer import spec_from_directory
from app.prompt import PromptTokenizer
from models.checkpoint import Checkpoint
from models.errors import BadCheckpoint, UnsupportedModel

_PIECE_CHARS = 1 << 16
_LONGEST_PIECE = 1 << 20  # a run without a safe cut is cut here all the same: one odd token in a million letters
_GROUP = max(8, 2 * (os.cpu_count() or 1))  # pieces encoded at once: on all cores, without the interpreter's lock
# Long texts are cut between one of these letters and one of these delimiters. The letters are such that every Unicode
# version calls letters; the apostrophe is no delimiter, since "don't" is one word to some tokenizers.
_LETTERS = (
    "A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u02af\u0391-\u03a1\u03a3-\u03ff\u0400-\u0481\u048a-\u0527\u05d0-\u05ea\u0621-\u063a"
    "\u0641-\u064a\u0905-\u0939\u0e01-\u0e30\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
)
_DELIMITERS = ' \n\t,.;:!?"()[]{}<>/\\|=+*-_&%#@~^$0123456789\u3002\uff0c\u3001\uff1b\uff1a\uff01\uff1f\uff08\uff09'
_SURROGATES = re.compile("[\ud800-\udfff]")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# When a space goes before a text: at the first word only, after each control token too, or even before a space.
Prefix = Literal["never", "first", "always", "doubled"]


class TextTokenizer(PromptTokenizer, TokenBytes, Protocol):
    """A tokenizer for prompts, documents and answers."""

    eos_ids: frozenset[int]
    vocab_size: int

    def encode_text(
        self,
        text: str,
        *,
        start: bool = True,
        progress: Callable[[float], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> list[int]: ...


class Tokenizer:
    """A model's tokenizer.

    `encode_text` never gives control tokens: text that spells one is text. `special_ids` are those that a chat template
    may write, `eos_ids` end an answer. Raises BadCheckpoint or UnsupportedModel for files that it cannot use.
    """

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Tokenizer:
        """The tokenizer beside a model's weights; raises BadCheckpoint where they are of different models."""
        tokenizer, rows = cls(checkpoint.path), checkpoint.config.vocab_size
        if tokenizer.vocab_size > rows:
            raise BadCheckpoint(
                f"The tokenizer in {checkpoint.path} has {tokenizer.vocab_size:,} tokens, the model {rows:,}: they do "
                "not belong together. Put the model's own tokenizer.json there."
            )
        return tokenizer

    def __init__(self, path: Path) -> None:
        spec = spec_from_gguf(path) if path.is_file() else spec_from_directory(path)
        data = spec.data
        model = data["model"]
        if model.get("type", "BPE") != "BPE":
            raise UnsupportedModel("tokenizer model", model["type"], "BPE")
        vocabulary: dict[str, int] = model["vocab"]
        added = {token["content"]: token for token in data.get("added_tokens") or []}
        control = {text for text, token in added.items() if token["special"] or _looks_like_control(text)}
        everything = vocabulary | {text: token["id"] for text, token in added.items()}

        self.chat_template = spec.chat_template
        self.template_variables = spec.special_texts
        self.special_ids: Mapping[str, int] = {text: everything[text] for text in control}
        self.bos_id = everything.get(spec.special_texts.get("bos_token", ""))
        eos = everything.get(spec.special_texts.get("eos_token", ""))
        self.eos_ids = spec.eos_ids | ({eos} if eos is not None else frozenset())
        self.add_bos = spec.add_bos
        self.vocab_size = max(everything.values()) + 1

        self._texts = {token_id: text for text, token_id in everything.items()}
        self._silent = frozenset(token["id"] for token in added.values() if token["special"])
        self._added = frozenset(token["id"] for token in added.values())
        self._bytes: dict[int, bytes] = {}
        self._byte_level, self.strip_leading_space = _read_decoder(data.get("decoder"))

        self._prefix: Prefix = _take_prefix(data)
        self.space_after_special = self._prefix in ("always", "doubled")
        try:
            self._backend = Backend.from_str(json.dumps(_text_only(data, added, control), ensure_ascii=False))
        except BaseException as error:  # the library's own have no narrower type
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # its panics are none
                raise
            raise BadCheckpoint(f"The tokenizer in {path} cannot be used: {error}. Download it again.") from error
        if _splits(self._backend, "ab cd", 2):
            delimiters = _pre_tokenizer_delimiters(self._backend, _unjoined(added))
        else:
            delimiters = _unjoined(everything)
        self._cut = re.compile(f"[{_LETTERS}](?=[{re.escape(delimiters)}])" if delimiters else r"(?!)")
        self._interned = list(range(self.vocab_size))  # one object an id: a list of millions takes 8 bytes each

    def encode_text(
        self,
        text: str,
        *,
        start: bool = True,
        progress: Callable[[float], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> list[int]:
        """Ids of plain text, without BOS; `start` false continues other text. Time is linear in the length.

        `progress` gets fractions from 0 to 1; once `cancelled()` is true, Cancelled is raised.
        """
        text = _SURROGATES.sub("\ufffd", text)
        if start and text and (self._prefix == "doubled" or (self._prefix != "never" and text[0] not in " ▁")):
            text = " " + text
        ids: list[int] = []
        done = 0
        for group in self._groups(text):
            if cancelled is not None and cancelled():
                raise Cancelled("Counting tokens was cancelled.")
            for encoding in self._backend.encode_batch_fast(group, add_special_tokens=False):
                ids.extend(map(self._interned.__getitem__, encoding.ids))
            done += sum(map(len, group))
            if progress is not None:
                progress(done / len(text))
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of ids; half a character at the end is left out."""
        shown = self if skip_special else _Everything(self)
        detokenizer = Detokenizer(shown)
        return "".join(map(detokenizer.push, ids)) + detokenizer.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes that the token stands for; empty for control tokens and unknown ids."""
        if token_id in self._silent:
            return b""
        return self.raw_bytes(token_id)

    def raw_bytes(self, token_id: int) -> bytes:
        """Like `token_bytes`, but with the names of control tokens."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._to_bytes(token_id)
        return known

    def _to_bytes(self, token_id: int) -> bytes:
        text = self._texts.get(token_id, "")
        if token_id in self._added:
            return text.encode()
        if self._byte_level:
            alphabet = byte_alphabet()
            return bytes(map(alphabet.__getitem__, text)) if all(char in alphabet for char in text) else text.encode()
        byte = _BYTE_TOKEN.fullmatch(text)
        return bytes.fromhex(byte[1]) if byte else text.replace("▁", " ").encode()

    def _groups(self, text: str) -> Iterator[list[str]]:
        group: list[str] = []
        start = 0
        while start < len(text):
            longest = min(start + _LONGEST_PIECE, len(text))
            found = self._cut.search(text, start + _PIECE_CHARS - 1, longest)
            end = found.end() if found else longest
            group.append(text[start:end])
            start = end
            if len(group) == _GROUP:
                yield group
                group = []
        if group:
            yield group


class _Everything:
    """A tokenizer seen with its control tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.strip_leading_space = tokenizer.strip_leading_space
        self.token_bytes = tokenizer.raw_bytes


def _looks_like_control(text: str) -> bool:
    """Whether an added token is written like one, such as <think>: in a document it must stay text."""
    return len(text) > 2 and (text[0], text[-1]) in (("<", ">"), ("[", "]"))


def _read_decoder(decoder: Mapping[str, Any] | None) -> tuple[bool, bool]:
    """(tokens spell bytes, the first space of a text is dropped)."""
    steps = [decoder or {}, *(decoder or {}).get("decoders", [])]
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return True, False
    if not kinds & {"Replace", "Metaspace"}:
        raise UnsupportedModel("tokenizer decoder", (decoder or {}).get("type"), "ByteLevel, Replace, Metaspace")
    strip = any(step.get("type") == "Strip" and step.get("start") == 1 for step in steps)
    return False, strip or any(
        step.get("type") == "Metaspace" and step.get("prepend_scheme") != "never" for step in steps
    )


def _take_prefix(data: dict[str, Any]) -> Prefix:
    """Turn off the space that the tokenizer puts before a text, so that texts can be cut; says when it is due."""
    prefix: Prefix = "never"
    normalizer = data.get("normalizer") or {}
    if normalizer.get("type") == "Prepend":
        data["normalizer"], prefix = None, "doubled"
    elif any(step["type"] == "Prepend" for step in normalizer.get("normalizers", [])):
        kept = [step for step in normalizer["normalizers"] if step["type"] != "Prepend"]
        data["normalizer"], prefix = {**normalizer, "normalizers": kept}, "doubled"
    pre_tokenizer = data.get("pre_tokenizer") or {}
    for step in [pre_tokenizer, *pre_tokenizer.get("pretokenizers", [])]:
        if step.get("type") == "Metaspace":
            scheme = step.get("prepend_scheme", "always")
            prefix = prefix if scheme == "never" else scheme
            step["prepend_scheme"] = "never"
        elif step.get("type") == "ByteLevel" and step.get("add_prefix_space"):
            step["add_prefix_space"], prefix = False, "always"
    return prefix


def _text_only(data: dict[str, Any], added: Mapping[str, Any], control: set[str]) -> dict[str, Any]:
    """The tokenizer without its control tokens: no text can become one."""
    model = dict(data["model"], dropout=None)
    dropped = control - {model.get("unk_token")}
    kept = {text: token for text, token in added.items() if text not in control}
    # A kept one is in the vocabulary too: that is what fixes its id.
    ids = {text: token["id"] for text, token in kept.items()}
    model["vocab"] = {text: at for text, at in model["vocab"].items() if text not in dropped} | ids
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
    model["merges"] = [pair for pair in pairs if not dropped.intersection((*pair, "".join(pair)))]
    return {**data, "model": model, "added_tokens": list(kept.values()), "post_processor": None}


def _unjoined(tokens: Iterable[str]) -> str:
    """Delimiters that no token joins to a letter before them: merging never crosses such a place."""
    joined = re.compile(f"[{_LETTERS}]([▁{re.escape(_DELIMITERS)}])")
    crossed = {found for text in tokens if len(text) > 1 for found in joined.findall(text)}
    return "".join(char for char in _DELIMITERS if char not in crossed and not (char == " " and "▁" in crossed))


def _pre_tokenizer_delimiters(backend: Backend, among: str) -> str:
    """Delimiters before which the pre-tokenizer always splits after a letter, whatever follows."""
    lefts = ("b a", "b aZ", "b é", "b 字", "b\n\na")
    rests = ("", "b", " b", "B", "1", "\n", "\n\nb", "'s", "  b", ".", "字")
    return "".join(
        char
        for char in among
        if all(_splits(backend, left + char + rest, len(left)) for left in lefts for rest in rests)
    )


def _splits(backend: Backend, text: str, at: int) -> bool:
    """Whether both sides of a text, split alone, are the split of the whole."""
    if backend.pre_tokenizer is None:
        return False
    whole, left, right = (
        [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(part)] for part in (text, text[:at], text[at:])
    )
    return whole == left + right
