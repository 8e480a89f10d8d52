"""llama.cpp on the same file, as a process of its own: builds of it have crashed, and its threads stay out of ours.

    python -m benchmarks._llama_cpp MODEL THREADS DECODED REPEATS REORDER < ids

reads token ids from standard input and prints one JSON list of [prefill tokens/s, decode tokens/s] a repeat. REORDER 1
lets it reorder weights for AMX and wide vectors, as it does by default; 0.3.36 then crashes on some processors.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_TIMEOUT_S = 900


def installed() -> bool:
    """Whether llama-cpp-python is there."""
    return importlib.util.find_spec("llama_cpp") is not None


def run(
    path: Path, ids: list[int], threads: int, decoded: int, repeats: int
) -> tuple[str, list[tuple[float, float, int | None]]]:
    """What ran; prefill and decode tokens per second of each repeat, no KV bytes. RuntimeError if it fails."""
    for name, reorder in (("llama.cpp", 1), ("llama.cpp, weights not reordered", 0)):
        numbers = [str(n) for n in (threads, decoded, repeats, reorder)]
        command = [sys.executable, "-m", "benchmarks._llama_cpp", str(path), *numbers]
        try:
            done = subprocess.run(
                command, input=json.dumps(ids), capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"llama.cpp did not end within {_TIMEOUT_S} s") from None
        if done.returncode == 0:
            return name, [(prefill, decode, None) for prefill, decode in json.loads(done.stdout.splitlines()[-1])]
    raise RuntimeError(f"llama.cpp ended with {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")


def _main(path: str, threads: int, decoded: int, repeats: int, reorder: int) -> None:
    from llama_cpp import Llama, llama_cpp

    defaults = llama_cpp.llama_model_default_params

    def options() -> Any:
        chosen = defaults()
        chosen.use_extra_bufts = bool(reorder)
        return chosen

    llama_cpp.llama_model_default_params = options  # Llama() has no argument for it
    ids = json.load(sys.stdin)
    model = Llama(path, n_threads=threads, n_threads_batch=threads, n_ctx=8192, n_batch=2048, verbose=False)
    model.eval(ids[:64])  # what is set up once is not timed
    results = []
    for _ in range(repeats):
        model.reset()
        begin = time.perf_counter()
        model.eval(ids)
        prefill = len(ids) / (time.perf_counter() - begin)
        begin = time.perf_counter()
        for _ in range(decoded):
            model.eval([model.sample(temp=0.0)])
        results.append((prefill, decoded / (time.perf_counter() - begin)))
    print(json.dumps(results))


if __name__ == "__main__":
    _main(sys.argv[1], *(int(word) for word in sys.argv[2:]))
