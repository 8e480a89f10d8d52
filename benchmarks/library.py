"""Opening what was read before against reading it: a whole prefill, its snapshot written, and read back from disk.

On a GPU: the 8B model's shape with random weights at 262,144 tokens. On a CPU: the embedded model at 7,500. What comes
back is checked each time: every packed block byte for byte, and the logits of the tokens that follow. The first opening
allocates what later ones use again, as the first chunk did for the prefill. Before the second one the disk's cache is
asked to let go of the file (`cold`), so that the disk is timed and not the memory; where the system does not oblige,
`cold` and `warm` are alike.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from app.config import Settings
from app.embedded import embedded_model_path
from app.engine.sizing import CHUNKS, resolve_shape
from app.engine.snapshots import SnapshotStore
from benchmarks._llama_8b import octavo_8b
from benchmarks._report import Wrong, at_least, finish, parser_for
from models.build import load_decoder
from models.cache.duo import DuoCache
from models.cache.pool import BlockPool
from models.cache.shape import CacheShape
from models.checkpoint import open_checkpoint
from models.decoder import Decoder

FOLLOWING = 64  # tokens read behind the document, by both caches


def main(argv: list[str]) -> int:
    """Runs the benchmark; exit code 1 when the bar is missed."""
    parser = parser_for("library", __doc__)
    parser.add_argument("--tokens", type=int, help="length of the document (default 262144 on a GPU, else 7500)")
    parser.add_argument(
        "--folder", type=Path, help="where to write, to time a certain disk (default: the temporary one)"
    )
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    decoder, shape = _model(device)
    length = args.tokens or (262_144 if device.type == "cuda" else 7500)
    chunk = CHUNKS[device.type][0]
    pool = BlockPool(shape, 2 * (length + FOLLOWING) // shape.block + 4, device)
    vocabulary = decoder.config.vocab_size
    ids = torch.randint(0, vocabulary, (length + FOLLOWING,), generator=torch.Generator().manual_seed(0))

    warm = DuoCache(pool)  # what is compiled or allocated once is not timed
    _read(decoder, warm, ids[: min(chunk, length)], chunk)
    warm.release()
    cache = DuoCache(pool)
    prefill = _read(decoder, cache, ids[:length], chunk)

    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        store = SnapshotStore(Path(folder), "benchmark", 1 << 50)
        prompt = ids.numpy().astype(np.int64)
        begin = time.perf_counter()
        store.save(prompt[:length], cache.fork())
        store.flush()
        write = time.perf_counter() - begin
        chain = store.find(prompt)
        if len(chain) != 1 or chain[0][1].length != length:
            raise Wrong("the snapshot was not found again")
        size = chain[0][1].bytes
        times = []
        for number in range(4):  # the process's first; from the disk; twice from the disk's cache
            if number == 1:
                _forget(chain[0][0])
            begin = time.perf_counter()
            back = store.read(chain, pool, (), lambda tokens: None)
            times.append(time.perf_counter() - begin)
            if back is None:
                raise Wrong(f"the snapshot could not be read: {store.notes}")
            _check(decoder, pool, cache, back, ids[length:])
            back.release()
        store.close()
    first, cold, best = times[0], times[1], min(times[2:])
    print(f"{length:,} tokens, {size / 1e9:.2f} GB: read {prefill:.2f} s, written {write:.2f} s")
    print(f"opened again in {cold:.3f} s (disk), {best:.3f} s (the disk's cache, {size / 1e9 / best:.2f} GB/s)")
    details = {
        "tokens": length,
        "bytes": size,
        "prefill_s": round(prefill, 3),
        "write_s": round(write, 3),
        "open_first_s": round(first, 4),
        "open_cold_s": round(cold, 4),
        "open_warm_s": round(best, 4),
        "warm_gb_per_s": round(size / 1e9 / best, 3),
    }
    name = f"opening {length:,} tokens again against reading them"
    bars = [at_least(f"{name}, cold", prefill / cold, "x", 20), at_least(f"{name}, warm", prefill / best, "x", 20)]
    finish("library", argv, bars, details, args.json, torch.get_num_threads())
    return 0 if all(bar.holds for bar in bars) else 1


def _model(device: torch.device) -> tuple[Decoder, CacheShape]:
    if device.type == "cpu":
        settings = Settings()
        checkpoint = open_checkpoint(embedded_model_path())
        mask, shape = resolve_shape(checkpoint.config, None, settings, device)
        return load_decoder(checkpoint, mask, settings.weights, shape, device), shape
    return octavo_8b(device)


def _read(decoder: Decoder, cache: DuoCache, ids: torch.Tensor, chunk: int) -> float:
    """Prefill chunk by chunk; seconds."""
    begin = time.perf_counter()
    for start in range(0, len(ids), chunk):
        decoder.forward(ids[start : start + chunk], cache)
    if cache.pool.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def _check(decoder: Decoder, pool: BlockPool, want: DuoCache, got: DuoCache, following: torch.Tensor) -> None:
    """Both caches hold the same bytes, and go on to the same logits."""
    step = 64
    for start in range(0, len(want.blocks), step):
        if not torch.equal(*(pool.dump(cache.blocks[start : start + step]) for cache in (want, got))):
            raise Wrong(f"blocks {start} to {start + step} came back otherwise")
    logits = []
    for cache in (want, got):
        fork = cache.fork()
        logits.append(decoder.logits(decoder.forward(following, fork)[-1:]).float())
        fork.release()
    error = float((logits[0] - logits[1]).norm() / logits[0].norm())
    if not error < 1e-2:  # blocks lie elsewhere, so sums are rounded elsewhere
        raise Wrong(f"the logits behind the document differ by {error:.4f}")


def _forget(path: Path) -> None:
    """Ask the system to drop a file from the memory in which it keeps what it read and wrote."""
    if hasattr(os, "posix_fadvise"):
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)
