"""The embedded model on the CPU beside transformers and llama.cpp: prefill, decode, KV memory, start.

The same threads and the same weights, in turns at each length; llama.cpp in a process of its own. Nothing is timed
before the answers are checked against transformers in fp32.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pydoc_data.topics
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from app.config import EMBEDDED_MODEL, Settings
from app.embedded import embedded_model_path
from app.engine.runner import Runner, build_runner
from app.measured_heads import measured_heads
from app.tokenizer import Tokenizer
from benchmarks import _llama_cpp
from benchmarks._peer import transformers_model
from benchmarks._report import Bar, Wrong, at_least, at_most, finish, parser_for, threads_flag
from models.cache.duo import DuoCache
from models.checkpoint import Checkpoint, open_checkpoint

LENGTHS = (1024, 4096, 7500)
DECODED = 24  # tokens a run, after the prompt
REPEATS = 3
ALONE = 256  # tokens of the check that are read one by one


def main(argv: list[str]) -> int:
    """Runs the benchmark; exit code 1 when a bar is missed."""
    parser = parser_for("cpu", __doc__)
    threads_flag(parser)
    parser.add_argument("--pattern", type=Path, help="head pattern (default: the embedded model's own)")
    parser.add_argument("--retrieval-ratio", type=float, default=Settings.retrieval_ratio)
    args = parser.parse_args(argv)
    if torch.cuda.is_available():
        print("Run with CUDA_VISIBLE_DEVICES= in front: this benchmark is about the CPU.", file=sys.stderr)
        return 1
    torch.set_num_threads(args.threads)
    start = _seconds_to_first_page()

    path = embedded_model_path()
    checkpoint = open_checkpoint(path)
    tokenizer = Tokenizer.of(checkpoint)
    ids = tokenizer.encode_text("\n\n".join(pydoc_data.topics.topics[k] for k in sorted(pydoc_data.topics.topics)))
    ours = _Ours(checkpoint, args)
    theirs = {
        name: _Transformers(checkpoint, dtype) for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
    }
    _check(ours, theirs["fp32"], ids)
    if not _llama_cpp.installed():
        print("llama-cpp-python is not installed: no comparison with llama.cpp")

    rows: list[tuple[int, str, float, float, Any]] = []
    for length in LENGTHS:
        prompt = ids[:length]
        sides: dict[str, Any] = {"octavo": ours, **{f"transformers {k}": v for k, v in theirs.items()}}
        measured: dict[str, list[tuple[float, float, int | None]]] = {name: [] for name in sides}
        for _ in range(REPEATS):  # in turns, so that a slow minute of the machine is everybody's
            for name, side in sides.items():
                measured[name].append(side.run(prompt))
        if _llama_cpp.installed():
            try:
                name, runs = _llama_cpp.run(path, prompt, args.threads, DECODED, REPEATS)
                measured[name] = runs
            except RuntimeError as error:
                print(error)
        for name, runs in measured.items():
            prefill, decode = (median(values) for values in zip(*(run[:2] for run in runs), strict=True))
            rows.append((length, name, prefill, decode, runs[0][2]))
            speeds = f"prefill {prefill:8.0f} tok/s  decode {1e3 / decode:7.2f} ms/token"
            print(f"{length:>6} {name:<18} {speeds}  KV {_mb(runs[0][2])}")
    bars = [*_bars(rows), at_most("first page after start", start, "s", 8)]
    keys = ("tokens", "side", "prefill_tokens_per_s", "decode_tokens_per_s", "kv_bytes")
    details = {"runs": [dict(zip(keys, row, strict=True)) for row in rows], "settings": ours.runner.describe()}
    finish("cpu", argv, bars, details, args.json, args.threads)
    return 0 if all(bar.holds for bar in bars) else 1


def _mb(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 1e6:.1f} MB"


def _bars(rows: list[tuple[int, str, float, float, Any]]) -> Iterator[Bar]:
    needed = {1024: 1.5, 4096: 1.5, 7500: 2.0}
    for length in LENGTHS:
        at = {name: rest for n, name, *rest in rows if n == length}
        peers = [at["transformers fp32"], at["transformers bf16"]]
        prefill, decode, kv = at["octavo"]
        yield at_least(f"prefill at {length}, x transformers", prefill / max(p[0] for p in peers), "x", 1.2)
        yield at_least(f"decode at {length}, x transformers", decode / max(p[1] for p in peers), "x", needed[length])
        least = min(peer[2] for peer in peers)  # that of bf16, whichever of the two is faster today
        yield at_most(f"KV memory at {length}, of transformers' bf16", kv / least, "of it", 0.25)


class _Ours:
    def __init__(self, checkpoint: Checkpoint, args: argparse.Namespace) -> None:
        from app.model import choose_pattern, find_model

        settings = Settings(
            model=EMBEDDED_MODEL, threads=args.threads, pattern=args.pattern, retrieval_ratio=args.retrieval_ratio
        )
        files = find_model(settings)
        pattern, _ = choose_pattern(files, settings)
        measured = measured_heads(checkpoint, Tokenizer.of(checkpoint), settings.cache_dir, torch.device("cpu"))
        self.runner: Runner = build_runner(checkpoint, pattern, settings, measured=measured)

    def read(self, ids: list[int], cache: DuoCache) -> Tensor:
        tokens, chunk = torch.tensor(ids), self.runner.chunk
        for start in range(0, len(ids), chunk):
            hidden = self.runner.decoder.forward(tokens[start : start + chunk], cache)
        return hidden

    def run(self, prompt: list[int]) -> tuple[float, float, int]:
        """Prefill and decode tokens per second, KV bytes."""
        decoder, cache = self.runner.decoder, DuoCache(self.runner.pool)
        begin = time.perf_counter()
        logits = decoder.logits(self.read(prompt, cache)[-1:])
        prefill = len(prompt) / (time.perf_counter() - begin)
        kv = cache.retrieval_bytes + cache.streaming_bytes
        begin = time.perf_counter()
        for _ in range(DECODED):
            logits = decoder.logits(decoder.forward(logits.argmax(-1), cache))
        decode = DECODED / (time.perf_counter() - begin)
        cache.release()
        return prefill, decode, kv


class _Transformers:
    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        self.model = transformers_model(checkpoint).to(dtype)

    @torch.inference_mode()
    def run(self, prompt: list[int]) -> tuple[float, float, int]:
        """Prefill and decode tokens per second, KV bytes."""
        begin = time.perf_counter()
        out = self.model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
        prefill = len(prompt) / (time.perf_counter() - begin)
        past = out.past_key_values
        kv = sum(layer.keys.nbytes + layer.values.nbytes for layer in past.layers)
        begin = time.perf_counter()
        for _ in range(DECODED):
            out = self.model(out.logits[:, -1:].argmax(-1), past_key_values=past, use_cache=True, logits_to_keep=1)
        return prefill, DECODED / (time.perf_counter() - begin), kv


@torch.inference_mode()
def _check(ours: _Ours, theirs: _Transformers, ids: list[int]) -> None:
    """Next-token loss over the last 1,000 of 2,048 tokens must be within 3 % of transformers', and no answer NaN.

    The last of them are read one by one, as tokens of an answer are: other kernels serve those.
    """
    tokens = torch.tensor(ids[:2048])
    cache, decoder = DuoCache(ours.runner.pool), ours.runner.decoder
    hidden = [ours.read(ids[: 2048 - ALONE], cache)[ALONE - 1001 :]]
    hidden += [decoder.forward(tokens[at : at + 1], cache) for at in range(2048 - ALONE, 2047)]
    logits = decoder.logits(torch.cat(hidden))
    cache.release()
    want = theirs.model(tokens[None], logits_to_keep=1001).logits[0, :-1]
    loss, reference = F.cross_entropy(logits, tokens[-1000:]).item(), F.cross_entropy(want, tokens[-1000:]).item()
    same = (logits.argmax(-1) == want.argmax(-1)).float()
    agreement, alone = same.mean().item(), same[-ALONE:].mean().item()
    told = f"same top token {agreement:.1%}, behind tokens read alone {alone:.1%}"
    print(f"checked: loss {loss:.4f}, transformers fp32 {reference:.4f}; {told}")
    if not loss < reference * 1.03 or not min(agreement, alone) > 0.85:
        raise Wrong(f"loss {loss:.4f} against {reference:.4f}, {told}: no speed is reported")


def _seconds_to_first_page() -> float:
    """From the start of the process to the first whole answer over HTTP, the middle of three."""
    return median(_one_start() for _ in range(REPEATS))


def _one_start() -> float:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "app", "serve", "--model", "embedded", "--port", str(port)]
    begin = time.perf_counter()
    with _stopped(
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ)
    ) as alive:
        while time.perf_counter() - begin < 60:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5) as page:
                if page.status == 200 and page.read():
                    return time.perf_counter() - begin
            if not alive():
                raise Wrong("the server ended before it gave a page")
            time.sleep(0.02)
    raise Wrong("no page within 60 s")


@contextlib.contextmanager
def _stopped(process: subprocess.Popen[bytes]) -> Iterator[Callable[[], bool]]:
    try:
        yield lambda: process.poll() is None
    finally:
        process.terminate()
        process.wait(20)
