"""Endless mode's speed and memory far out: a chunk and a decode step at 4M tokens beside those at 16K."""

from __future__ import annotations

import gc
import time
from statistics import median, quantiles

import torch
from torch import Tensor

from app.engine.graph import DecodeGraph
from benchmarks._report import Wrong, at_most
from models.cache.endless import EndlessCache
from models.cache.live_endless import LiveEndless
from models.decoder import Decoder

CHUNK = 16_384
NEAR, FAR = 16_384, 4_194_304  # where speed is taken
STEPS, WARM, ROUNDS = 20, 3, 40  # decode steps a round; rounds that warm up, and those that count
SLIDES = 8


class Speed:
    """Reads `far` tokens in endless mode; chunks and decode steps at NEAR and at the end are then timed in turns."""

    def __init__(self, decoder: Decoder, cache: EndlessCache, ids: Tensor, far: int) -> None:
        self._decoder = decoder
        self._ids = ids.to(decoder.device)
        shape = cache.shape
        gc.collect()  # what other parts of the benchmark left would go in the middle
        begin = time.perf_counter()
        near: EndlessCache | None = None
        allocated: list[int] = []
        rates: list[float] = []
        while cache.length < far:
            n = min(CHUNK, far - cache.length)
            rates.append(n / self._read(cache, n))
            if near is None and cache.length >= NEAR:
                near = cache.fork()
            elif near is not None:
                allocated.append(torch.cuda.memory_allocated())
        seconds = time.perf_counter() - begin
        print(f"read {cache.length:,} tokens in {seconds:.1f} s", flush=True)
        assert near is not None
        self._live = LiveEndless(shape, cache.rope, decoder.device)
        self._graph = DecodeGraph(decoder, self._live)
        moved = self._moved(cache)
        rounds = [self._round(near, cache, number % 2 == 1) for number in range(WARM + ROUNDS)][WARM:]
        generated = [each["allocated"] for each in rounds]
        growth = max(max(held) - min(held) for held in (allocated, generated))
        tenth = max(1, len(rates) // 10)
        self.details = {
            "sink": shape.sink,
            "recent": shape.recent,
            "read_tokens": far,
            "read_seconds": round(seconds, 1),
            "tokens_per_s_by_tenth": [round(median(rates[i : i + tenth])) for i in range(0, len(rates), tenth)],
            "cache_bytes": cache.streaming_bytes,
            "allocated_bytes": {"reading": allocated[-1], "with_the_captured_step": generated[-1]},
            "reserved_bytes": torch.cuda.memory_reserved(),
            "generated_tokens": STEPS * (WARM + ROUNDS) + SLIDES,
            "rounds": ROUNDS,
        }
        self.bars = []
        for what, told in (("decode", "decode"), ("chunk", "reading")):
            change = [100 * (each[f"{what}_far"] / each[f"{what}_near"] - 1) for each in rounds]
            low, middle, high = quantiles(change, n=4)
            for place in ("near", "far"):
                self.details[f"{what}_ms_{place}"] = round(median(each[f"{what}_{place}"] for each in rounds), 4)
            self.details[f"{what}_change_percent_quartiles"] = [round(x, 3) for x in (low, middle, high)]
            self.bars.append(at_most(f"{told} at {far:,} against {NEAR:,} tokens", abs(middle), "%", 2))
        print(self.details, flush=True)
        self.bars += [
            at_most("memory's growth after the window is full", growth, "bytes", 0),
            at_most("KV bytes moved per slide", moved, "bytes", 0),
        ]

    def _round(self, near: EndlessCache, far: EndlessCache, turned: bool) -> dict[str, float]:
        """Milliseconds of a chunk and of a decode step at both places, next to each other and in either order.

        What the machine does meanwhile meets both, so a round's ratio says more than the two times.
        """
        took: dict[str, float] = {}
        places = [("near", near), ("far", far)]
        for place, cache in reversed(places) if turned else places:
            took[f"chunk_{place}"] = 1e3 * self._read(cache, CHUNK)
        for place, cache in reversed(places) if turned else places:
            took[f"decode_{place}"] = self._decode(cache)
        return took | {"allocated": torch.cuda.memory_allocated()}

    def _read(self, cache: EndlessCache, n: int) -> float:
        """Seconds for the next n tokens of the text, which begins again at its end."""
        ids, decoder = self._ids, self._decoder
        chunk = ids[torch.arange(cache.length, cache.length + n, device=ids.device) % len(ids)]
        torch.cuda.synchronize()
        begin = time.perf_counter()
        last = decoder.logits(decoder.forward(chunk, cache)[-1:])
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        if not last.isfinite().all():
            raise Wrong(f"logits at {cache.length:,} tokens are not finite")
        return seconds

    def _decode(self, cache: EndlessCache) -> float:
        """Milliseconds a token, generating STEPS tokens greedily by the captured step."""
        token = torch.tensor([cache.length % self._decoder.config.vocab_size], device=self._decoder.device)
        self._live.take(cache)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(STEPS):
            token = self._graph.replay(token).argmax(-1, keepdim=True)
            token.item()
        seconds = time.perf_counter() - begin
        self._live.give(cache, cache.length + STEPS)
        return 1e3 * seconds / STEPS

    def _moved(self, cache: EndlessCache) -> float:
        """Bytes of the cache that change in a slide beside those of the token that comes for the one that goes.

        The captured step's logits are compared with those of the step that the host drives; raises Wrong.
        """
        sink, recent, live, decoder = cache.shape.sink, cache.shape.recent, self._live, self._decoder
        changed = 0
        token = torch.tensor([1], device=decoder.device)
        live.take(cache)
        for _ in range(SLIDES):
            before = live.keys.clone(), live.values.clone()
            slot = sink + (cache.length - sink) % recent
            logits = self._graph.replay(token)
            want = decoder.logits(decoder.forward(token, cache))[0]
            error = float((logits - want).norm() / want.norm())
            if not error <= 1e-3:
                raise Wrong(f"at {cache.length:,} tokens the captured step's logits are off by {error:.1e}")
            for old, new in zip(before, (live.keys, live.values), strict=True):
                if torch.equal(old[:, :, slot], new[:, :, slot]):
                    raise Wrong("the new token was not written where it belongs")
                old[:, :, slot] = new[:, :, slot]
                changed += int((old != new).sum()) * old.element_size()
            token = want.argmax(-1, keepdim=True)
        return changed / SLIDES
