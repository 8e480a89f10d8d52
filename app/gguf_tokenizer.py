"""The tokenizer inside a GGUF file, written as the tokenizer.json that its model was made with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from models.errors import BadCheckpoint, UnsupportedModel
from models.gguf import read_gguf

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # GGUF token types with a meaning here

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_SPLITS = {"llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "smaug-bpe": _LLAMA3, "qwen2": _QWEN2}
_SPLITS |= {"deepseek-r1-qwen": _QWEN2, "tekken": _TEKKEN}
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "tekken")  # a word of the vocabulary needs no merges
_GPT2 = ("gpt-2", "smollm")
_KINDS = {str: "texts", int: "whole numbers", float: "numbers"}


@dataclass(frozen=True)
class TokenizerSpec:
    """A tokenizer.json's content with what stands beside it: template, control tokens by role, ids that end."""

    data: dict[str, Any]
    chat_template: str | None
    special_texts: Mapping[str, str]
    eos_ids: frozenset[int]
    add_bos: bool

    def save(self, folder: Path) -> None:
        """Writes the files of a Hugging Face tokenizer."""
        config = {**self.special_texts, "add_bos_token": self.add_bos, "chat_template": self.chat_template}
        ends = {"eos_token_id": sorted(self.eos_ids)}
        for name, content in (
            ("tokenizer.json", self.data),
            ("tokenizer_config.json", config),
            ("generation_config.json", ends),
        ):
            (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def spec_from_gguf(path: Path) -> TokenizerSpec:
    """Read a GGUF file's tokenizer; raises UnsupportedModel naming a kind that is not known."""
    fields = _Fields(path)
    tokens: list[str] = fields.many("tokens", str)
    if not tokens:
        raise BadCheckpoint(f"{path.name} has no tokenizer.ggml.tokens. Use a file with its tokenizer inside.")
    types: list[int] = fields.many("token_type", int, len(tokens)) or [1] * len(tokens)
    kind = fields.text("ggml.model")
    if kind == "gpt2":
        data = _byte_level(fields, tokens)
    elif kind == "llama":
        data = _sentencepiece(fields, tokens, types)
    else:
        raise UnsupportedModel("tokenizer.ggml.model", kind, "gpt2, llama")
    special = (_UNKNOWN, _CONTROL)
    data["added_tokens"] = [
        {"id": token_id, "content": text, "special": token_type in special, "normalized": False}
        | {"single_word": False, "lstrip": False, "rstrip": False}
        for token_id, (text, token_type) in enumerate(zip(tokens, types, strict=True))
        if token_type in (*special, _USER_DEFINED)
    ]
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {role: fields.token_id(name, len(tokens)) for role, name in roles.items()}
    ends = (fields.token_id(name, len(tokens)) for name in ("eos", "eot", "eom"))
    return TokenizerSpec(
        data=data,
        chat_template=fields.text("chat_template"),
        special_texts={role: tokens[token_id] for role, token_id in ids.items() if token_id is not None},
        eos_ids=frozenset(token_id for token_id in ends if token_id is not None),
        add_bos=fields.flag("add_bos_token", kind == "llama"),
    )


@cache
def byte_alphabet() -> Mapping[str, int]:
    """Byte-level BPE's character for every byte: printable ones stand for themselves, the rest for U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(hidden)}


class _Fields:
    """A GGUF file's fields below `tokenizer.`, each of the type that it must have; raises BadCheckpoint for others."""

    def __init__(self, path: Path) -> None:
        self._metadata = read_gguf(path).metadata
        self._name = path.name

    def text(self, field: str) -> str | None:
        value = self._metadata.get(f"tokenizer.{field}")
        if value is not None and not isinstance(value, str):
            raise self._wrong(f"tokenizer.{field} = {value!r}", "a text")
        return value

    def flag(self, field: str, default: bool) -> bool:
        return bool(self._metadata.get(f"tokenizer.ggml.{field}", default))

    def many(self, field: str, kind: type, count: int | None = None) -> list[Any]:
        """A list of `count` of a kind; empty where the file has none."""
        key = f"tokenizer.ggml.{field}"
        try:
            values = self._metadata.get(key) or []
        except UnicodeDecodeError as error:
            raise self._wrong(key, f"in UTF-8 ({error})") from error
        right = isinstance(values, list) and all(isinstance(value, kind) for value in values)
        if not right or (values and count is not None and len(values) != count):
            found = f", and has {len(values):,}" if right else ""
            told = _KINDS[kind] if count is None else f"{count:,} {_KINDS[kind]}, one a token"
            raise self._wrong(key, f"a list of {told}{found}")
        return values

    def scores(self, count: int) -> list[float]:
        """Every token's score, which a vocabulary without merges needs."""
        values = self.many("scores", float, count)
        if not values:
            raise self._wrong("tokenizer.ggml.scores", "there, as it has no tokenizer.ggml.merges")
        return values

    def token_id(self, role: str, count: int) -> int | None:
        """The id of the token with a role, of `count` tokens."""
        key = f"tokenizer.ggml.{role}_token_id"
        value = self._metadata.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
            raise self._wrong(f"{key} = {value!r}", f"the id of one of its tokens, from 0 to {count - 1:,}")
        return value

    def _wrong(self, field: str, told: str) -> BadCheckpoint:
        return BadCheckpoint(f"{self._name} is damaged: {field} must be {told}. Download it again.")


def _byte_level(fields: _Fields, tokens: Sequence[str]) -> dict[str, Any]:
    pre = fields.text("ggml.pre")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": pre in _GPT2}
    if pre in _SPLITS:
        first = {"type": "Split", "pattern": {"Regex": _SPLITS[pre]}, "behavior": "Isolated", "invert": False}
    elif pre in _GPT2:
        first = {"type": "Digits", "individual_digits": True}
    else:
        raise UnsupportedModel("tokenizer.ggml.pre", pre, ", ".join((*_GPT2, *_SPLITS)))
    steps = [byte_level] if pre == "gpt-2" else [first, byte_level]
    merges = fields.many("merges", str)
    return {
        "normalizer": {"type": "NFC"} if _SPLITS.get(pre) is _QWEN2 else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": _model(tokens, [merge.split(" ") for merge in merges], ignore_merges=pre in _WHOLE_WORDS),
    }


def _sentencepiece(fields: _Fields, tokens: Sequence[str], types: Sequence[int]) -> dict[str, Any]:
    prefix = fields.flag("add_space_prefix", True)
    scheme = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first" if prefix else "never", "split": False}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    pairs = [merge.split(" ") for merge in fields.many("merges", str)]
    if not pairs:
        pairs = list(_merges_of(tokens, types, fields.scores(len(tokens))))
    unknown = fields.token_id("unknown", len(tokens))
    return {
        "normalizer": None,
        "pre_tokenizer": scheme,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _model(
            tokens, pairs, byte_fallback=True, fuse_unk=True, unk_token=None if unknown is None else tokens[unknown]
        ),
    }


def _merges_of(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> Iterator[list[str]]:
    """The merges that a sentencepiece vocabulary implies, best first: every split of a token into two others."""
    ids = {
        text: token_id
        for token_id, (text, token_type) in enumerate(zip(tokens, types, strict=True))
        if token_type not in (_UNKNOWN, _CONTROL)
    }
    for text in sorted(ids, key=lambda text: (-scores[ids[text]], ids[text])):
        splits = [(text[:at], text[at:]) for at in range(1, len(text))]
        known = [(ids[left], ids[right], left, right) for left, right in splits if left in ids and right in ids]
        yield from ([left, right] for _, _, left, right in sorted(known))


def _model(tokens: Sequence[str], merges: list[list[str]], **options: Any) -> dict[str, Any]:
    model = {"type": "BPE", "vocab": {text: token_id for token_id, text in enumerate(tokens)}, "merges": merges}
    return {**model, "dropout": None, "unk_token": None, "byte_fallback": False, "fuse_unk": False, **options}
