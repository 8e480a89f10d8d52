"""Settings: the only place that reads the environment and turns flags into values."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from app.errors import UsageError
from models import kv_bits

Weights = Literal["w8a8", "bf16", "llm.int8"]
Kv = Literal["kv4", "kv8", "bf16"]
Embedding = Literal["bf16", "int8"]
Mode = Literal["duo", "endless"]
EngineName = Literal["own", "openai"]

EMBEDDED_MODEL = "embedded"
DEFAULT_HUB_MODEL = "gradientai/Llama-3-8B-Instruct-Gradient-4194k"

_MOST_GB = 10**9
_THREADS_A_PROCESSOR = 4  # more only wait for each other; thousands end in a crash of OpenMP's

# What says how the own engine works, and nothing to another server.
_OWN_ENGINE = tuple(
    "mode weights embedding kv kv_bits pattern retrieval_ratio sink recent chunk threads library_quota".split()
)
_NOT_ENDLESS = ("kv", "kv_bits", "pattern", "retrieval_ratio", "context", "library_quota")


def _folder(variable: str, default: str) -> Path:
    return Path(os.environ.get(variable) or default).expanduser()


def _secret(variable: str) -> tuple[str, ...]:
    return (value,) if (value := os.environ.get(variable)) else ()


@dataclass(frozen=True)
class Settings:
    """Everything a person can choose; `None` means "automatic". Flags take their defaults from here.

    `library_quota` is in GB, None for a quarter of the disk's free space, 0 for nothing saved.
    `kv_bits`: of an element of a 4-bit history, mean over the retrieval heads, None for what the head pattern asks
    for, or 4 bits in each of them.
    `model`: None, "embedded", a hub id, a directory of safetensors, or a .gguf file. `sink`, `recent`, `chunk` and
    `context` are in tokens. `retrieval_ratio` counts only when there is a head pattern. In `mode` "endless" every head
    keeps the first `sink` and the last `recent` tokens, and the context never fills. `auth` holds "user:password",
    `api_key` keys of the API; the command line shows both to everyone on the machine, the environment does not. With
    `behind_proxy` a proxy on this machine tells who asks. With `engine` "openai" the server at `base_url` answers, to
    which `base_key` is sent; `model` is its name there.
    """

    model: str | None = field(default_factory=lambda: os.environ.get("OCTAVO_MODEL") or None)
    mode: Mode = "duo"
    weights: Weights = "w8a8"
    kv: Kv = "kv4"
    kv_bits: float | None = None
    embedding: Embedding = "bf16"
    pattern: Path | None = None
    retrieval_ratio: float = 0.5
    sink: int | None = None
    recent: int | None = None
    chunk: int | None = None
    context: int | None = None
    threads: int | None = None
    host: str = "127.0.0.1"
    port: int = 7860
    auth: tuple[str, ...] = field(default_factory=lambda: _secret("OCTAVO_AUTH"), repr=False)
    api_key: tuple[str, ...] = field(default_factory=lambda: _secret("OCTAVO_API_KEY"), repr=False)
    behind_proxy: bool = False
    engine: EngineName = "own"
    base_url: str | None = None
    base_key: str = field(default_factory=lambda: os.environ.get("OPENAI_API_KEY", ""), repr=False)
    debug: bool = False
    library_quota: float | None = None
    cache_dir: Path = field(default_factory=lambda: _folder("OCTAVO_CACHE", "~/.cache/octavo"))

    def __post_init__(self) -> None:
        for name in ("pattern", "cache_dir"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, Path(value).expanduser())
        _one_of("--mode", self.mode, get_args(Mode))
        _one_of("--weights", self.weights, get_args(Weights))
        _one_of("--kv", self.kv, get_args(Kv))
        _one_of("--embedding", self.embedding, get_args(Embedding))
        _one_of("--engine", self.engine, get_args(EngineName))
        if (self.engine == "openai") != (self.base_url is not None):
            raise UsageError("--engine openai and --base-url URL belong together: give both or neither.")
        if self.base_url is not None and not self.base_url.startswith(("http://", "https://")):
            raise UsageError(f"--base-url is {self.base_url!r}; it must be such as http://127.0.0.1:8000/v1.")
        if self.model is not None and not self.model.strip():
            raise UsageError("--model is empty. Give a hub id, a directory of safetensors or a .gguf file.")
        if self.kv_bits is not None:
            if not kv_bits.LEAST <= _number("--kv-bits", self.kv_bits) <= kv_bits.MOST:
                raise UsageError(
                    f"--kv-bits is {self.kv_bits:g}; it must be between {kv_bits.LEAST} and {kv_bits.MOST:g}, scales"
                    " included. --kv kv8 keeps 8 bits in every head."
                )
            if self.kv != "kv4":
                raise UsageError(f"--kv-bits shares 4 and 8 bits among the heads of --kv kv4, not of {self.kv}.")
        ratio = _number("--retrieval-ratio", self.retrieval_ratio)
        if not 0.0 <= ratio <= 1.0:
            raise UsageError(f"--retrieval-ratio is {ratio:g}; it must be between 0 and 1.")
        if self.library_quota is not None and not 0 <= _number("--library-quota", self.library_quota) <= _MOST_GB:
            raise UsageError(f"--library-quota is {self.library_quota:g}; it must be 0 to {_MOST_GB:,}, in GB.")
        for flag, number, least, most in (
            ("--sink-tokens", self.sink, 0, 2**40),
            ("--recent", self.recent, 1, 2**40),
            ("--chunk", self.chunk, 1, 2**40),
            ("--context", self.context, 1, 2**40),
            ("--threads", self.threads, 1, _THREADS_A_PROCESSOR * (os.cpu_count() or 1)),
        ):
            if number is not None:
                _whole(flag, number, least, most)
        _whole("--port", self.port, 0, 65535)
        for name in ("auth", "api_key"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if any(not all(person.partition(":")[::2]) for person in self.auth):
            raise UsageError("--auth must be USER:PASSWORD, both of them not empty.")
        if any(not re.fullmatch("[!-~]{8,}", key) for key in self.api_key):  # headers carry no other characters safely
            raise UsageError("--api-key must have at least 8 characters, all of them printable ASCII, and no spaces.")
        if self.pattern is not None and not self.pattern.is_dir():
            raise UsageError(f"--pattern: {self.pattern} is not a directory with full_attention_heads.tsv in it.")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Settings:
        """Settings from named values; None keeps the default, a name that is no setting is a UsageError."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise UsageError(f"Unknown setting {', '.join(unknown)}. Known: {', '.join(sorted(known))}.")
        idle = [name for name in _NOT_ENDLESS if values.get(name) is not None]
        if values.get("mode") == "endless" and idle:
            flag = f"--{idle[0].replace('_', '-')}"
            raise UsageError(
                f"{flag} means nothing in endless mode: no head keeps everything. Leave it out; --sink-tokens and "
                "--recent say what is kept."
            )
        idle = [name for name in _OWN_ENGINE if values.get(name) is not None]
        if values.get("engine") == "openai" and idle:
            flag = "--sink-tokens" if idle[0] == "sink" else f"--{idle[0].replace('_', '-')}"
            raise UsageError(f"{flag} is for Octavo's own engine. Leave it out, or --engine openai.")
        return cls(**{name: value for name, value in values.items() if value is not None})

    @classmethod
    def from_flags(cls, flags: object) -> Settings:
        """Settings from an argparse namespace; what belongs to a command and is no setting is left alone."""
        known = {f.name for f in fields(cls)}
        return cls.from_mapping({name: value for name, value in vars(flags).items() if name in known})


def _one_of(flag: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"{flag} is {value!r}; choose one of {', '.join(allowed)}.")


def _number(flag: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UsageError(f"{flag} is {value!r}; it must be a number.")
    return float(value)


def _whole(flag: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise UsageError(f"{flag} is {value!r}; it must be a whole number from {least:,} to {most:,}.")
