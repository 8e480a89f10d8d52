"""The tokenizer in a model's directory: tokenizer.json and what stands beside it, checked as far as they are used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from app.gguf_tokenizer import TokenizerSpec
from models.errors import BadCheckpoint
from models.files import read_json

_IDS = 1 << 24  # no vocabulary comes near; lists as long as it are made
_STEPS = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "decoder": "decoders",
    "post_processor": "processors",
}


def spec_from_directory(path: Path) -> TokenizerSpec:
    """Read a directory's tokenizer; raises BadCheckpoint naming the file and the field that is not as it must be."""
    file = path / "tokenizer.json"
    if not file.is_file():
        raise BadCheckpoint(f"There is no tokenizer.json in {path}. Save the model's fast tokenizer there.")
    data = {**_read_json(file), "truncation": None, "padding": None}
    _check(data, file)
    texts, template, add_bos = _read_config(path / "tokenizer_config.json")
    if (jinja := path / "chat_template.jinja").is_file():
        try:
            template = jinja.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise BadCheckpoint(f"{jinja} cannot be read: {error}. Download it again.") from error
    if add_bos is None:
        add_bos = texts.get("bos_token") in set(_template_starts(data.get("post_processor")))
    return TokenizerSpec(data, template, texts, _read_ends(path / "generation_config.json"), bool(add_bos))


def _read_config(file: Path) -> tuple[dict[str, str], str | None, Any]:
    """Control tokens by role, the chat template, and whether a prompt begins with BOS where that is said."""
    config = _read_json(file)
    texts: dict[str, Any] = {}
    for role in ("bos_token", "eos_token", "unk_token", "pad_token"):
        if value := config.get(role):
            texts[role] = value.get("content") if isinstance(value, dict) else value
            _need(isinstance(texts[role], str), file, role, "a text, or an object with its content")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = [entry for entry in template if isinstance(entry, dict)]
        template = next((entry.get("template") for entry in named if entry.get("name") == "default"), None)
    _need(template is None or isinstance(template, str), file, "chat_template", "a text, or a list of named ones")
    return texts, template, config.get("add_bos_token")


def _read_ends(file: Path) -> frozenset[int]:
    ends = _read_json(file).get("eos_token_id")
    ids = ends if isinstance(ends, list) else [] if ends is None else [ends]
    _need(all(map(_is_id, ids)), file, "eos_token_id", "one token id, a list of them, or null")
    return frozenset(ids)


def _check(data: Mapping[str, Any], file: Path) -> None:
    model = data.get("model")
    _need(isinstance(model, dict), file, "model", "an object")
    assert isinstance(model, dict)
    if model.get("type", "BPE") == "BPE":  # others are refused by name
        vocab, merges, unknown = model.get("vocab"), model.get("merges"), model.get("unk_token")
        right = isinstance(vocab, dict) and bool(vocab) and all(map(_is_id, vocab.values()))
        _need(right, file, "model.vocab", f"an object of token ids below {_IDS:,} by their texts")
        right = isinstance(merges, list) and all(map(_is_pair, merges))
        _need(right, file, "model.merges", "a list of pairs of texts")
        _need(unknown is None or isinstance(unknown, str), file, "model.unk_token", "a text or null")
        for field in ("continuing_subword_prefix", "end_of_word_suffix"):
            # No family here has them, and the library ends the process for merges that lack them.
            _need(not model.get(field), file, f"model.{field}", "empty or null")
    added = data.get("added_tokens")
    right = added is None or (isinstance(added, list) and all(map(_is_added, added)))
    _need(right, file, "added_tokens", "a list of objects with id, content and special")
    for key, inner in _STEPS.items():
        steps = data.get(key) or {}
        _need(isinstance(steps, dict), file, key, "an object or null")
        within = steps.get(inner, [])
        right = isinstance(within, list) and all(isinstance(s, dict) and isinstance(s.get("type"), str) for s in within)
        _need(right, file, f"{key}.{inner}", "a list of objects with a type")
        _need(not steps or isinstance(steps.get("type"), str), file, f"{key}.type", "a text")
        for step in (steps, *within):
            right = step.get("type") != "TemplateProcessing" or _is_template(step.get("single"))
            _need(right, file, f"{key}.single", "a list of objects, with an id in each SpecialToken")


def _need(right: bool, file: Path, field: str, told: str) -> None:
    if not right:
        raise BadCheckpoint(f"{file} is damaged: {field} must be {told}. Download it again.")


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _IDS


def _is_pair(value: object) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list) and len(value) == 2 and all(isinstance(half, str) for half in value)
    )


def _is_added(value: object) -> bool:
    return (
        isinstance(value, dict)
        and _is_id(value.get("id"))
        and isinstance(value.get("content"), str)
        and isinstance(value.get("special"), bool)
    )


def _is_template(value: object) -> bool:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        return False
    tokens = [item["SpecialToken"] for item in value if "SpecialToken" in item]
    return all(isinstance(token, dict) and isinstance(token.get("id"), str) for token in tokens)


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        return read_json(file)
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"{file} is damaged: {error}. Download it again.") from error


def _template_starts(post_processor: Mapping[str, Any] | None) -> Iterator[str]:
    """Control tokens that the post-processor puts before a text."""
    for step in [post_processor or {}, *(post_processor or {}).get("processors", [])]:
        if step.get("type") == "TemplateProcessing":
            for item in step["single"][:1]:
                if "SpecialToken" in item:
                    yield item["SpecialToken"]["id"]
