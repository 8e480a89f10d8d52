"""Settings: defaults, what is refused, and where the environment counts."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from pathlib import Path

import pytest

from app.config import Settings
from app.errors import UsageError


def test_defaults_are_the_promised_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OCTAVO_MODEL", "OCTAVO_CACHE"):
        monkeypatch.delenv(name, raising=False)
    settings = Settings()
    assert (settings.model, settings.weights, settings.kv) == (None, "w8a8", "kv4")
    assert (settings.sink, settings.recent, settings.host, settings.port) == (None, None, "127.0.0.1", 7860)
    assert settings.cache_dir == Path("~/.cache/octavo").expanduser()
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.port = 1  # type: ignore[misc]


def test_environment_gives_defaults_and_flags_win(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    monkeypatch.setenv("OCTAVO_MODEL", "some/model")
    assert Settings().cache_dir == tmp_path
    assert Settings.from_flags(Namespace(model=None)).model == "some/model"
    assert Settings.from_flags(Namespace(model="other/model")).model == "other/model"


def test_flags_of_a_command_are_left_alone_and_paths_become_paths(tmp_path: Path) -> None:
    flags = Namespace(command="ask", question="Why?", kv="kv8", pattern=str(tmp_path), context=None, debug=True)
    settings = Settings.from_flags(flags)
    assert (settings.kv, settings.pattern, settings.context, settings.debug) == ("kv8", tmp_path, None, True)


def test_unknown_setting_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="retrieval_ration"):
        Settings.from_mapping({"retrieval_ration": 0.3})


@pytest.mark.parametrize(
    "values",
    [{"kv": "kv4"}, {"pattern": Path()}, {"retrieval_ratio": 0.3}, {"context": 4096}, {"library_quota": 1.0}],
    ids=str,
)
def test_endless_mode_refuses_what_would_mean_nothing_in_it(values: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=f"--{next(iter(values)).replace('_', '-')} means nothing in endless mode"):
        Settings.from_mapping({"mode": "endless", **values})
    Settings.from_mapping({"mode": "duo", **values})
    assert Settings.from_mapping({"mode": "endless", "sink": 0, "recent": 1, "kv": None}).mode == "endless"


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"weights": "int4"}, "--weights"),
        ({"mode": "forever"}, "duo, endless"),
        ({"kv": "kv2"}, "kv4, kv8, bf16"),
        ({"retrieval_ratio": 1.5}, "between 0 and 1"),
        ({"retrieval_ratio": float("nan")}, "--retrieval-ratio"),
        ({"retrieval_ratio": "0.5"}, "--retrieval-ratio"),
        ({"sink": -1}, "--sink-tokens"),
        ({"recent": 0}, "--recent"),
        ({"chunk": 0}, "--chunk"),
        ({"context": 0}, "--context"),
        ({"threads": 0}, "--threads"),
        ({"threads": True}, "--threads"),
        ({"port": 70000}, "--port"),
        ({"pattern": "/no/such/folder"}, "--pattern"),
        ({"model": " "}, "--model"),
        ({"api_key": ["kéy12345678"]}, "--api-key.*ASCII"),
        ({"api_key": ["key-1234\x7f"]}, "--api-key.*ASCII"),
    ],
)
def test_wrong_values_name_their_flag(values: dict[str, object], named: str) -> None:
    with pytest.raises(UsageError, match=named) as caught:
        Settings.from_mapping(values)
    assert caught.value.exit_code == 2
