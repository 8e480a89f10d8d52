"""/metrics: what the engine does, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from app.service import ChatService


class EngineCollector(Collector):
    """Reads a service's status whenever it is asked; counts start with the model."""

    def __init__(self, service: ChatService) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        ready = self._service.ready
        yield GaugeMetricFamily("octavo_ready", "1 when questions can be asked.", int(ready))
        if not ready:
            return
        status = self._service.status()
        totals = status["totals"]
        requests = CounterMetricFamily("octavo_requests", "Requests by how they ended.", labels=["end"])
        for how, number in sorted(dict(totals["requests"]).items()):
            requests.add_metric([how], number)
        yield requests
        for name, text in (
            ("prompt_tokens", "Tokens of prompts, cached ones included."),
            ("cached_tokens", "Tokens of prompts that were in the cache."),
            ("completion_tokens", "Tokens of answers."),
        ):
            yield CounterMetricFamily(f"octavo_{name}", text, totals[name])
        yield CounterMetricFamily("octavo_prefill_seconds", "Time spent reading.", totals["prefill_s"])
        yield CounterMetricFamily("octavo_decode_seconds", "Time spent writing.", totals["decode_s"])
        yield GaugeMetricFamily("octavo_busy", "1 while an answer runs or waits.", int(status["busy"]))
        yield GaugeMetricFamily("octavo_waiting_requests", "Requests in line.", status["waiting"])
        if status["context_capacity"] is not None:
            yield GaugeMetricFamily("octavo_context_tokens", "Tokens that a context holds.", status["context_capacity"])
        memory = GaugeMetricFamily("octavo_memory_bytes", "Memory by kind.", labels=["kind"])
        for kind, number in status["memory"].items():
            memory.add_metric([kind.removesuffix("_bytes")], number)
        yield memory


def metrics_text(service: ChatService) -> bytes:
    """The metrics in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(service))
    return generate_latest(registry)
