"""Prefill attention with grouped heads as they are, and with keys and values expanded to one head a query head.

Native grouping is how a serving engine should feed MQA and GQA to its prefill kernel; expanding costs memory and time.
4,096 queries at the end of 65,536 keys, causal and so aligned bottom-right; checked against float64 on some rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks._report import Wrong, at_least, at_most, finish, parser_for
from benchmarks.prefill import DEVICE, free, in_turns
from kernels.attention_prefill import ROWS
from kernels.attention_prefill.flashinfer import FA3_SERVES

QUERIES, KEYS, D = 4096, 65_536, 128
HEADS = ((64, 8), (32, 8), (32, 32))
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def main(argv: list[str]) -> int:
    """Runs the benchmark; exit code 1 when a bar is missed."""
    parser = parser_for("gqa", __doc__)
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("This benchmark needs a CUDA GPU.", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    traits = {"head_dim": D, "dtype": torch.bfloat16}
    backends, declined = [], {}
    for backend in ROWS.backends[:-1]:
        reason = backend.declines(DEVICE, **traits)
        if reason is None or reason == FA3_SERVES:  # FA2 runs here too, for the comparison
            backends.append(backend)
        else:
            declined[backend.name] = reason
    rows: list[dict[str, Any]] = []
    for heads, kv_heads in HEADS:
        q = torch.randn(QUERIES, heads, D, device=DEVICE, dtype=torch.bfloat16)
        k, v = torch.randn(2, kv_heads, KEYS, D, device=DEVICE, dtype=torch.bfloat16)
        for backend in backends:
            rows += measure(backend.name, backend.run.attend, q, k, v)
        del q, k, v
        free()
    for row in rows:
        print(row)
    best = ROWS.choose(DEVICE, **traits).backend.name
    bars = []
    for heads, kv_heads in HEADS:
        mine = {r["form"]: r for r in rows if r["heads"] == f"{heads}/{kv_heads}" and r["kernel"] == best}
        # One query head a KV head: `expand` is then the native call itself.
        forms = ("expand", "repeat_interleave") if heads > kv_heads else ("repeat_interleave",)
        expanded = min(mine[form]["ms"] for form in forms)
        name = f"{heads}/{kv_heads} heads, native against expanded"
        bars.append(at_least(name, expanded / mine["native"]["ms"], "x", 1.0))
        bars.append(at_most(f"{heads}/{kv_heads} heads, memory beside the result", mine["native"]["mib"], "MiB", 64))
    details = {"kernel": best, "declined": declined, "rows": rows}
    finish("gqa", argv, bars, details, args.json, torch.get_num_threads())
    return 0 if all(bar.holds for bar in bars) else 1


def measure(name: str, attend: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor) -> list[dict[str, Any]]:
    """Native, expanded by `expand` and by `repeat_interleave`: error, milliseconds and MiB beside the result."""
    group = q.shape[1] // k.shape[0]

    def native() -> Tensor:
        out: Tensor = attend(q, k, v, scale=D**-0.5, causal=True)[0]
        return out

    def expand() -> Tensor:
        keys, values = (x[:, None].expand(-1, group, -1, -1).reshape(-1, KEYS, D) for x in (k, v))
        out: Tensor = attend(q, keys, values, scale=D**-0.5, causal=True)[0]
        return out

    def repeat() -> Tensor:
        keys, values = (x.repeat_interleave(group, 0) for x in (k, v))
        out: Tensor = attend(q, keys, values, scale=D**-0.5, causal=True)[0]
        return out

    mib = {}
    runs = {"native": native, "expand": expand, "repeat_interleave": repeat}
    for form, run in runs.items():
        out = run()
        for row in (0, QUERIES // 2, QUERIES - 1):
            seen = KEYS - QUERIES + row + 1
            for head in (0, q.shape[1] - 1):
                keys, values = (x[head // group, :seen].double() for x in (k, v))
                want = (keys @ q[row, head].double() * D**-0.5).softmax(0) @ values
                error = float((out[row, head].double() - want).norm() / want.norm())
                if not error <= 2e-2:
                    raise Wrong(f"{name}, {form}, row {row}, head {head}: error {error:.2e}")
        del out
        free()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        out = run()
        torch.cuda.synchronize()
        beside = torch.cuda.max_memory_allocated() - held - out.nbytes
        del out
        mib[form] = round(beside / 2**20, 1)
    flops = 4 * D * q.shape[1] * QUERIES * (KEYS - (QUERIES - 1) / 2)
    return [
        {
            "heads": f"{q.shape[1]}/{k.shape[0]}",
            "kernel": name,
            "form": form,
            "ms": round(time, 3),
            "tflops": round(flops / time / 1e9, 1),
            "mib": mib[form],
        }
        for form, time in in_turns(runs, 3).items()
    ]
