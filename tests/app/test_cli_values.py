"""Values of flags that can be no value, and places that cannot be written to: told at once, in one line, by name."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from app import cli_eval, cli_identify, cli_quantize
from app.__main__ import build_parser, main
from app.config import Settings
from app.local import LocalService
from app.writable import file_to_write, folder_to_write

NOWHERE = Path("/proc/octavo")  # nothing can be made there, by nobody


def leaves(
    parser: argparse.ArgumentParser, command: tuple[str, ...] = (), types: tuple[type | None, ...] = (None, Path)
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every flag with a value of these types (None: a text), by its command."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from leaves(below, (*command, name), types)
        elif action.option_strings and action.nargs is None and action.type in types:
            yield command, action.option_strings[0]


FLAGS = list(leaves(build_parser()))


def refused(capsys: pytest.CaptureFixture[str], argv: list[str], *words: str) -> None:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert all(word in err for word in words), err


@pytest.fixture(autouse=True)
def nothing_is_done(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No model is looked for: what is wrong is found before."""

    def done(*args: object) -> None:
        raise AssertionError("the work began")

    monkeypatch.chdir(tmp_path)
    for module in (cli_quantize, cli_identify):
        monkeypatch.setattr(module, "find_model", done)
    monkeypatch.setattr(LocalService, "load", done)
    monkeypatch.setattr(LocalService, "add_document", done)
    monkeypatch.setattr("app.ui.serve", done)
    monkeypatch.setattr(cli_eval, "CONTEXT_KINDS", dict.fromkeys(cli_eval.CONTEXT_KINDS, done))


@pytest.mark.parametrize(("command", "flag"), FLAGS, ids=[" ".join((*command, flag)) for command, flag in FLAGS])
def test_an_empty_value_is_no_path_and_no_name(
    capsys: pytest.CaptureFixture[str], command: tuple[str, ...], flag: str
) -> None:
    refused(capsys, [*command, flag, ""], flag, "is empty")
    refused(capsys, [*command, f"{flag}= "], flag, "is empty")


def test_every_path_is_among_those() -> None:
    flags = {flag for _, flag in FLAGS}
    assert {"--document", "--config", "--pattern", "--out", "--haystack", "--plot", "--data", "--text"} <= flags
    assert {"--calibration", "--model", "--reference", "--cache-dir"} <= flags


@pytest.mark.parametrize("argv", [["quantize", "", "out"], ["quantize", "embedded", ""], ["bench", ""]])
def test_an_empty_argument_is_refused(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    refused(capsys, argv, "is empty")


@pytest.mark.parametrize(
    "command",
    [
        ["serve"],
        ["ask", "q"],
        ["quantize", "embedded", "out"],
        ["identify", "--out", "out"],
        ["eval", "quality", "--text", "text"],
        ["eval", "needle", "--out", "out"],
        ["eval", "ruler", "--out", "out"],
        ["eval", "longbench", "--data", ".", "--out", "out"],
    ],
)
def test_threads_have_a_limit_that_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    for number in ("0", "13", "20000", "100000"):
        refused(capsys, [*command, "--threads", number], f"--threads is {number}", "from 1 to 12")
    assert Settings(threads=12).threads == 12


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["ask", "--library-quota", "1e300", "q"], "--library-quota"),
        (["ask", "--library-quota", "inf", "q"], "--library-quota"),
        (["ask", "--temperature", "nan", "q"], "--temperature"),
        (["heads", "--threshold", "nan"], "--threshold"),
        (["heads", "--threshold", "-inf"], "--threshold"),
        (["plan", "--context", "1", "--gpu-memory", "9" * 400], "--gpu-memory"),
    ],
)
def test_numbers_beyond_any_use_are_refused(capsys: pytest.CaptureFixture[str], argv: list[str], word: str) -> None:
    refused(capsys, argv, word)


NUMBERS = [
    (["quantize", "embedded", "out"], "--calibration-tokens", 1),
    (["identify", "--out", "out"], "--steps", 1),
    (["identify", "--out", "out"], "--refine", 0),
    (["eval", "quality", "--text", "text"], "--tokens", 2),
    (["eval", "quality", "--text", "text"], "--length", 2),
    (["eval", "needle", "--out", "out"], "--depths", 1),
    (["eval", "needle", "--out", "out"], "--trials", 1),
    (["eval", "needle", "--out", "out"], "--length", 1),
    (["eval", "ruler", "--out", "out"], "--samples", 1),
    (["eval", "ruler", "--out", "out"], "--length", 1),
    (["eval", "longbench", "--data", ".", "--out", "out"], "--most", 1),
]


@pytest.mark.parametrize(("command", "flag", "least"), NUMBERS)
def test_whole_numbers_have_limits_that_are_told(
    capsys: pytest.CaptureFixture[str], command: list[str], flag: str, least: int
) -> None:
    for number in (least - 1, 10**30):
        refused(capsys, [*command, f"{flag}={number}"], f"{flag} is {number}", f"from {least} to 1,")
    refused(capsys, [*command, flag, "1.5"], flag, "must be a whole number")
    main([*command, flag, str(least)])
    assert flag not in capsys.readouterr().err


def test_every_number_is_checked_here_or_by_the_settings() -> None:
    checked = {flag for _, flag, _ in NUMBERS}
    sampled = {"--max-new-tokens", "--temperature", "--top-k", "--top-p", "--min-p", "--repetition-penalty"}
    settings = {"--" + field.name.replace("_", "-") for field in dataclasses.fields(Settings)} | {"--sink-tokens"}
    numbers = {flag for _, flag in leaves(build_parser(), types=(int, float))}
    assert numbers <= settings | sampled | {"--seed", "--count", "--threshold"}
    assert checked.isdisjoint(numbers)


@pytest.mark.parametrize("bits", ["-1", "0", "3.9", "4", "9", "99", "1e30"])
@pytest.mark.parametrize("command", [["plan"], ["heads"]])
def test_bits_that_no_cache_has_are_wrong_usage(
    capsys: pytest.CaptureFixture[str], command: list[str], bits: str
) -> None:
    refused(capsys, [*command, "--model", "embedded", "--kv-bits", bits], "--kv-bits")


@pytest.mark.parametrize("bits", ["3.9", "8.6", "12", "99"])
@pytest.mark.parametrize("command", [["serve"], ["ask", "q"], ["eval", "quality", "--text", "text"]])
def test_bits_far_out_are_told_before_a_model_is_looked_for(
    capsys: pytest.CaptureFixture[str], command: list[str], bits: str
) -> None:
    refused(capsys, [*command, "--kv-bits", bits], f"--kv-bits is {bits}; it must be between 4 and 8.5")
    assert Settings(kv_bits=8.5).kv_bits == 8.5  # all heads of size 64


@pytest.mark.parametrize("count", ["-1", "91", "1" + "0" * 30])
def test_more_heads_than_there_are_are_wrong_usage(capsys: pytest.CaptureFixture[str], count: str) -> None:
    refused(capsys, ["heads", "--model", "embedded", f"--count={count}"], f"--count is {count}", "from 0 to 90")


@pytest.mark.parametrize("content", ["[1]", "[" * 200_000, "{", "7", "\x00"])
def test_a_config_that_is_none_is_told_as_such(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str
) -> None:
    (tmp_path / "config.json").write_text(content)
    refused(capsys, ["plan", "--config", "config.json", "--context", "1"], "config.json cannot be read")


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["quantize", "embedded", f"{NOWHERE}"], "OUT"),
        (["quantize", "embedded", f"{NOWHERE}/below"], "OUT"),
        (["quantize", "embedded", "there"], "there exists already"),
        (["quantize", "embedded", "dangling"], "dangling exists already"),
        (["quantize", "embedded", "file"], "file.partial exists already"),
        (["identify", "--out", f"{NOWHERE}"], "--out"),
        (["identify", "--out", "there"], "--out: there is a file"),
        (["eval", "needle", "--out", f"{NOWHERE}"], "--out"),
        (["eval", "ruler", "--out", "there"], "--out: there is a file"),
        (["eval", "longbench", "--data", ".", "--out", f"{NOWHERE}"], "--out"),
        (["heads", "--plot", f"{NOWHERE}.png"], "--plot"),
        (["heads", "--plot", "."], "--plot: . is a directory"),
        (["heads", "--plot", "absent/x.png"], "--plot: there is no directory absent"),
        (["eval", "quality", "--text", "absent"], "--text absent"),
    ],
)
def test_what_cannot_be_written_or_read_is_told_before_the_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, argv: list[str], word: str
) -> None:
    (tmp_path / "there").touch()
    (tmp_path / "file.partial").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "absent")
    refused(capsys, argv, word)


def test_what_can_be_written_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    file_to_write("--plot", tmp_path / "file")
    file_to_write("--plot", tmp_path / "new")
    folder_to_write("--out", tmp_path / "a" / "b")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file"]
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["--foo"], "serve"),
        (["--port", "1", "--foo", "x"], "serve"),
        (["ask", "q", "--foo"], "ask"),
        (["eval", "needle", "--out", "x", "--foo"], "eval needle"),
    ],
)
def test_a_flag_that_is_none_is_told_with_where_to_look(
    capsys: pytest.CaptureFixture[str], argv: list[str], command: str
) -> None:
    refused(capsys, argv, "--foo", f"See: ./launch.sh {command} --help")
