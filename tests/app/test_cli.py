"""The command line over a fake model: what is printed where, exit codes, one-line errors, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from app import cli_ask, cli_bench
from app.__main__ import build_parser, main
from app.cli_plan import parse_size
from app.config import DEFAULT_HUB_MODEL, Settings
from app.errors import UsageError
from app.local import LocalService
from app.model import OpenModel
from models.errors import BadCheckpoint
from tests.fakes import FakeRunner, FakeTokenizer

ROOT = Path(__file__).parents[2]
LLAMA3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4194304,
    "rms_norm_eps": 1e-5,
    "rope_theta": 283461213.0,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}


class Runner(FakeRunner):
    def describe(self) -> dict[str, Any]:
        keys = ("mode", "weights", "kv", "retrieval_ratio", "sink", "recent", "chunk", "backends")
        return dict.fromkeys(keys, 0) | {"recent": 100, "beyond": 1}


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> FakeRunner:
    """A fake model behind `ask`; tests change its answer, its size, or what it does at each step."""
    runner = Runner(answer=lambda prompt: "The code is 4711 – 🙂.")

    def opener(settings: Settings, progress: Callable[[str, float], None]) -> OpenModel:
        progress("Reading the weights", 0.5)
        return OpenModel("fake", runner, FakeTokenizer(), frozenset(), lambda context: context)

    monkeypatch.setattr(cli_ask, "open_service", partial(LocalService, opener=opener))
    return runner


def last_prompt(model: FakeRunner) -> list[str]:
    """Texts of the prompts that the model was asked, by wrapping its answer."""
    seen: list[str] = []
    answer = model.answer

    def spy(prompt: Sequence[int]) -> str:
        seen.append(FakeTokenizer().decode(prompt))
        return answer(prompt)

    model.answer = spy
    return seen


def test_ask_prints_the_answer_and_nothing_else(model: FakeRunner, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["ask", "What is the code?"]) == 0
    assert capfd.readouterr() == ("The code is 4711 – 🙂.\n", "")
    assert model.open_slots == 0


def test_what_tells_sources_is_learned_only_where_there_are_some(
    model: FakeRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests: list[object] = []
    monkeypatch.setattr(Runner, "find_evidence_heads", lambda runner, prompt, questions: tests.append(questions))
    monkeypatch.setattr("app.probe.Probe.__len__", lambda probe: 1)
    assert main(["ask", "What is the code?"]) == 0
    assert not tests
    model.starts = 0
    (tmp_path / "a.txt").write_text("The code is 4711.")
    assert main(["ask", "--document", f"{tmp_path}/a.txt", "What is the code?"]) == 0
    assert tests


def test_json_is_the_last_line_with_the_named_fields(model: FakeRunner, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["ask", "--json", "What is the code?"]) == 0
    answer, last = capfd.readouterr().out.strip().split("\n")
    result = json.loads(last)
    assert answer == result["answer"] == "The code is 4711 – 🙂."
    assert result["finish_reason"] == "stop"
    told = {"answer", "finish_reason", "usage", "timings", "memory", "settings", "forgotten_tokens"}
    assert set(result) == told | {"evidence", "quotes"}
    assert set(result["usage"]) == {"prompt_tokens", "cached_tokens", "completion_tokens"}
    assert set(result["timings"]) == {"prefill_s", "prefill_tokens_per_s", "decode_ms_per_token"}
    assert set(result["memory"]) == {"weights_bytes", "retrieval_kv_bytes", "streaming_kv_bytes", "peak_bytes"}
    named = {"mode", "weights", "kv", "retrieval_ratio", "sink", "recent", "chunk", "backends"}
    assert set(result["settings"]) == named
    assert result["forgotten_tokens"] == 0


def test_an_endless_answer_tells_what_it_has_forgotten(model: FakeRunner, capfd: pytest.CaptureFixture[str]) -> None:
    model.capacity = None
    question = "What was it? " * 50
    assert main(["ask", question]) == 0
    out, err = capfd.readouterr()
    assert out == "The code is 4711 – 🙂.\n"
    assert err.startswith("octavo: Of ")
    assert "tokens between the first 0 and the last 100 are forgotten" in err
    model.starts = 0  # it is loaded anew
    assert main(["ask", "--json", question]) == 0
    result = json.loads(capfd.readouterr().out.strip().split("\n")[-1])
    usage = result["usage"]
    assert result["forgotten_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] - 1 - 100
    model.starts = 0
    assert main(["ask", "What?"]) == 0
    assert capfd.readouterr().err == ""


def test_the_answer_is_streamed(model: FakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    steps_at_write: list[int] = []
    steps = 0

    def count(step: str, slot: object) -> None:
        nonlocal steps
        steps += step == "decode"
        time.sleep(0.005)

    class Out:
        def write(self, text: str) -> None:
            steps_at_write.append(steps)

        def flush(self) -> None:
            pass

    model.hook = count
    monkeypatch.setattr(sys, "stdout", Out())
    assert main(["ask", "What is the code?"]) == 0
    assert len(set(steps_at_write)) > 10


def test_documents_come_ahead_of_the_question(
    model: FakeRunner, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("first\fsecond\fthird")
    (tmp_path / "odd:2").write_bytes("caf\xe9".encode("latin-1"))
    prompts = last_prompt(model)
    files = [f"--document={tmp_path}/a.txt:2-3", f"--document={tmp_path}/odd:2"]
    assert main(["ask", *files, "--system", "Be brief.", "Well?"]) == 0
    prompt = prompts[-1]  # the ones before warm the model up
    assert "first" not in prompt
    places = [prompt.index(word) for word in ("Be brief.", "second", "third", "café", "Well?")]
    assert places == sorted(places)
    assert capfd.readouterr().err.startswith("octavo: odd:2: Read as cp1252.")


def test_sampling_flags_reach_the_engine(model: FakeRunner, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["ask", "--max-new-tokens", "8", "--stop", "code", "--seed", "1", "Well?"]) == 0
    assert capfd.readouterr().out == "The \n"
    assert main(["ask", "--max-new-tokens", "3", "Well?"]) == 0
    assert capfd.readouterr() == ("The\n", "octavo: The answer stopped at its limit of tokens.\n")


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["ask"], 2, "required: QUESTION"),
        (["ask", " "], 2, "question is empty"),
        (["ask", "--temperature", "x", "q"], 2, "--temperature"),
        (["ask", "--temperature", "-1", "q"], 2, "--temperature is -1"),
        (["ask", "--max-new-tokens", "0", "q"], 2, "--max-new-tokens is 0; it must be a whole number from 1"),
        (["ask", "--kv", "kv3", "q"], 2, "--kv"),
        (["ask", "--sink", "-1", "q"], 2, "--sink"),
        (["ask", "--no-such-flag", "q"], 2, "--no-such-flag"),
        (["serve", "--model", "./absent", "--port", "0"], 2, "--model ./absent: there is no such file"),
        (["ask", "--document", "absent.txt", "q"], 1, "absent.txt: there is no such file"),
        (["ask", "--document", "README.md:7-2", "q"], 2, "Pages 7 to 2"),
        (["ask", "word " * 300], 1, "the context holds 1,000"),
        (["nonsense"], 2, "nonsense"),
        (["bench", "no-such"], 2, "no benchmark 'no-such'"),
        (["plan", "--config", "a", "--model", "b", "--context", "1"], 2, "not both"),
        (["plan", "--config", "absent.json", "--context", "1"], 2, "absent.json"),
        (["plan", "--context", "1", "--gpu-memory", "much"], 2, "--gpu-memory"),
        (["--port", "70000"], 2, "--port"),
    ],
)
def test_errors_are_one_line_with_an_exit_code(
    model: FakeRunner,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    argv: list[str],
    code: int,
    words: str,
) -> None:
    (tmp_path / "README.md").write_text("text")
    monkeypatch.chdir(tmp_path)
    assert main(argv) == code
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("octavo: ")
    assert words in err
    assert err.count("\n") == 1


def test_a_failure_of_the_model_is_told(
    model: FakeRunner, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(step: str, slot: object) -> None:
        raise MemoryError

    model.hook = fail
    assert main(["ask", "q"]) == 1
    assert "Out of memory" in capfd.readouterr().err

    def opener(settings: Settings, progress: object) -> OpenModel:
        raise BadCheckpoint("model.safetensors is cut short.")

    monkeypatch.setattr(cli_ask, "open_service", partial(LocalService, opener=opener))
    assert main(["ask", "q"]) == 1
    assert capfd.readouterr().err == "octavo: model.safetensors is cut short.\n"
    assert main(["ask", "--debug", "q"]) == 1
    assert "Traceback" in capfd.readouterr().err


def test_ctrl_c_ends_the_answer_and_keeps_what_came(model: FakeRunner, capfd: pytest.CaptureFixture[str]) -> None:
    def interrupt(step: str, slot: Any) -> None:
        if step == "decode" and len(slot.script) == 10_000 + 10:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)

    model.hook = interrupt
    before = signal.getsignal(signal.SIGINT)
    assert main(["ask", "--json", "Well?"]) == 130
    result = json.loads(capfd.readouterr().out.strip().split("\n")[-1])
    assert result["finish_reason"] == "cancelled"
    assert "The code is 4711".startswith(result["answer"])
    assert len(result["answer"]) > 5
    assert model.open_slots == 0
    assert signal.getsignal(signal.SIGINT) is before


def test_every_setting_of_the_model_has_a_flag_and_no_default_of_its_own() -> None:
    args = vars(build_parser().parse_args(["serve"]))
    settings = {name for name in vars(Settings()) if name in args}
    assert settings == set(vars(Settings())) - {"base_key"}  # a secret, from the environment alone
    assert all(args[name] is None for name in settings)
    assert Settings.from_flags(build_parser().parse_args(["serve"])) == Settings()


def test_without_a_command_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Settings] = []
    monkeypatch.setattr("app.ui.serve", served.append)
    assert main([]) == 0
    assert main(["--port", "7000", "--kv", "kv8"]) == 0
    assert [(s.host, s.port, s.kv) for s in served] == [("127.0.0.1", 7860, "kv4"), ("127.0.0.1", 7000, "kv8")]


def test_a_port_in_use_is_told() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = run_cli("serve", "--port", port)
    assert result.returncode == 2
    assert f"Port {port} on 127.0.0.1 is in use" in result.stderr
    assert result.stderr.count("\n") == 1


def test_plan_needs_only_a_config(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA3_8B))
    assert main(["plan", "--config", str(config), "--context", "4194304", "--gpu-memory", "80GiB", "--json"]) == 0
    plan = json.loads(capfd.readouterr().out)
    assert plan["bytes_per_token"] == 17_408
    rotations = (4 + 2) * 4096**2  # of the residual stream, in fp32 and in bf16
    assert plan["weights_bytes"] == pytest.approx(6.98e9 + 2.10e9 + rotations, rel=0.01)
    assert plan["retrieval_bytes"] >= 4_194_304 * 17_408
    assert plan["fits"] is True
    assert plan["longest_context"] == plan["model_window"] == 4_194_304

    assert main(["plan", "--config", str(config), "--context", "1048576", "--gpu-memory", "24GB", "--json"]) == 0
    small = json.loads(capfd.readouterr().out)
    assert small["fits"] is False
    longest = small["longest_context"]
    again = ["plan", "--config", str(config), "--gpu-memory", "24GB", "--json"]
    assert main([*again, "--context", str(longest)]) == 0
    assert json.loads(capfd.readouterr().out)["fits"] is True
    assert main([*again, "--context", str(longest + 1024)]) == 0
    assert json.loads(capfd.readouterr().out)["fits"] is False

    full = ["plan", "--config", str(config), "--context", "1000", "--retrieval-ratio", "1", "--kv", "bf16", "--json"]
    assert main(full) == 0
    assert json.loads(capfd.readouterr().out)["bytes_per_token"] == 131_072


def test_plan_without_a_context_tells_the_longest_that_fits(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA3_8B))
    ask = ["plan", "--config", str(config), "--json", "--gpu-memory"]
    assert main([*ask, "24GiB"]) == 0
    plan = json.loads(capfd.readouterr().out)
    assert plan["fits"] is True
    assert plan["context"] == plan["longest_context"]
    assert plan["total_bytes"] > 24 * 2**30 - 128 * plan["bytes_per_token"]
    assert main([*ask, "1GiB"]) == 0
    small = json.loads(capfd.readouterr().out)
    assert (small["fits"], small["longest_context"]) == (False, 0)


def test_plan_knows_the_default_model_without_a_network(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.socket.connect", lambda *where: pytest.fail("the network was asked"))
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA3_8B))
    for model in (["--model", DEFAULT_HUB_MODEL], ["--config", str(config)]):
        assert main(["plan", *model, "--context", "1000000", "--gpu-memory", "24GiB", "--json"]) == 0
    ours, theirs = capfd.readouterr().out.splitlines()
    assert ours == theirs


def test_plan_of_endless_mode_needs_no_context(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA3_8B))
    ask = ["plan", "--config", str(config), "--mode", "endless", "--gpu-memory", "24GB"]
    assert main([*ask, "--json"]) == 0
    plan = json.loads(capfd.readouterr().out)
    assert (plan["bytes_per_token"], plan["retrieval_bytes"], plan["longest_context"]) == (0, 0, None)
    assert (plan["sink"], plan["recent"], plan["fits"]) == (4, 2044, True)
    assert plan["streaming_bytes"] % (2048 * 131_072) == 0  # fp16, for each of the sequences that are kept
    assert main([*ask, "--sink-tokens", "0", "--recent", "100"]) == 0
    out = capfd.readouterr().out
    assert "keep the first 0 and the last 100 tokens" in out
    assert "without end" in out
    assert main([*ask, "--context", "1000"]) == 2
    assert "--context means nothing in endless mode" in capfd.readouterr().err


def test_plan_is_readable_and_knows_the_models_window(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "embedded", "--context", "100000"]) == 0
    out = capfd.readouterr().out
    assert "window is 8,192" in out
    assert "longer than the model's window" in out


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GiB", 80 << 30), ("80 gb", 80 * 10**9), ("1.5MiB", 3 << 19), ("4096", 4096), ("2t", 2 * 10**12)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "GiB", "-1GiB", "80QiB", "1i", "nan", "1e9"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="such as 80GiB"):
        parse_size(text)


def test_doctor_tells_kernels_and_why_others_declined(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capfd.readouterr().out
    for word in ("Python", "torch", "CPU", "Kernels on cpu", "int8_gemm", "attention_prefill", "not int_mm: "):
        assert word in out


def test_a_package_that_is_missing_is_told_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "app.cli_doctor", raising=False)
    assert main(["doctor"]) == 1
    assert capfd.readouterr().err.startswith("octavo: This Python lacks torch. Start Octavo with ./launch.sh")


def test_bench_calls_the_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    (folder / "mine.py").write_text("def main(argv):\n    print(argv)\n    return 3\n")
    monkeypatch.setattr(cli_bench, "_FOLDER", folder)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "benchmarks", raising=False)
    assert main(["bench", "mine", "--help", "-x", "1"]) == 3
    assert capfd.readouterr().out == "['--help', '-x', '1']\n"
    monkeypatch.delitem(sys.modules, "benchmarks")


def test_help_loads_no_library() -> None:
    code = "import sys; from app.__main__ import build_parser; build_parser().format_help(); print(sorted(sys.modules))"
    modules = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert not [name for name in ("torch", "gradio", "transformers") if f"'{name}'" in modules]


def run_cli(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "app", *argv], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.parametrize(
    ("pages", "told"),
    [
        ("a-b", "no page range"),
        ("-1", "no page range"),
        ("5-3", "after the last"),
        ("9" * 5000, "no page range"),
        ("1-" + "9" * 5000, "no page range"),
    ],
    ids=lambda text: text[:20],
)
def test_a_wrong_page_range_is_told_as_such(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], pages: str, told: str
) -> None:
    (tmp_path / "short.txt").write_text("The code is 4711.")
    assert main(["ask", "--document", f"{tmp_path / 'short.txt'}:{pages}", "Which?"]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--temperature", "-1", "Hi"], ["--max-new-tokens", "0", "Hi"], [" "]])
def test_what_is_wrong_without_a_model_is_told_before_one_is_loaded(
    monkeypatch: pytest.MonkeyPatch, wrong: list[str]
) -> None:
    def load(service: LocalService, progress: object = None, documents: bool = True) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(LocalService, "load", load)
    assert main(["ask", *wrong]) == 2


@pytest.mark.parametrize(
    "wrong",
    [
        ["heads", "--library-quota", "1"],
        ["heads", "--mode", "endless"],
        ["heads", "--chunk", "64"],
        ["identify", "--out", "x", "--kv", "kv8"],
        ["plan", "--library-quota", "1"],
        ["identify", "--out", "x", "--engine", "openai"],
        ["quantize", "a", "b", "--engine", "openai"],
        ["eval", "needle", "--out", "x", "--base-url", "http://127.0.0.1:1/v1"],
    ],
)
def test_a_flag_that_a_command_does_not_use_is_refused(capsys: pytest.CaptureFixture[str], wrong: list[str]) -> None:
    assert main(wrong) == 2
    assert "--" in capsys.readouterr().err


def test_a_terminal_that_lacks_a_character_still_gets_the_answer(
    monkeypatch: pytest.MonkeyPatch, model: FakeRunner
) -> None:
    import io

    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["ask", "What is the code?"]) == 0
    out.flush()
    assert b"The code is 4711" in out.buffer.getvalue()  # type: ignore[attr-defined]
