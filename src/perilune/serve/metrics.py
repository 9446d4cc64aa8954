"""What /metrics shows: requests, tokens and times of the server, and every number of the engine's own statistics.

One registry for each server, so that two in one process do not mix. Labels are few and fixed (endpoint, status): no
text of a caller ever becomes a label.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

__all__ = ["CONTENT_TYPE_LATEST", "Metrics", "Stopwatch"]

FIRST_TOKEN = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
WHOLE = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900, 3600)


class _Engine:
    """Reads the engine's statistics when somebody looks, never before."""

    def __init__(self, stats: Callable[[], Any]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        if not dataclasses.is_dataclass(stats):
            return
        for field in dataclasses.fields(stats):
            value = getattr(stats, field.name)
            if isinstance(value, int | float):
                yield GaugeMetricFamily(f"perilune_engine_{field.name}", f"Engine: {field.name}.", value=float(value))


class Metrics:
    def __init__(self, stats: Callable[[], Any], *, sequences: Callable[[], int]) -> None:
        registry = self.registry = CollectorRegistry(auto_describe=False)
        self.requests = Counter(
            "perilune_requests", "Requests by endpoint and status.", ["endpoint", "status"], registry=registry
        )
        self.gone = Counter("perilune_clients_gone", "Clients that left before their answer.", registry=registry)
        self.prompt_tokens = Counter("perilune_prompt_tokens", "Tokens of prompts.", registry=registry)
        self.cached_tokens = Counter(
            "perilune_cached_prompt_tokens", "Of these, taken from the prefix cache.", registry=registry
        )
        self.completion_tokens = Counter("perilune_completion_tokens", "Tokens written.", registry=registry)
        self.first_token = Histogram(
            "perilune_time_to_first_token_seconds", "From the whole body to the first token.",
            registry=registry, buckets=FIRST_TOKEN,
        )  # fmt: skip
        self.per_token = Histogram(
            "perilune_time_per_token_seconds", "Between tokens of a sequence, averaged over a request.",
            registry=registry, buckets=PER_TOKEN,
        )  # fmt: skip
        self.duration = Histogram(
            "perilune_request_seconds", "From the whole body to the end of the answer.", ["endpoint"],
            registry=registry, buckets=WHOLE,
        )  # fmt: skip
        under_way = Gauge("perilune_sequences", "Sequences under way or waiting.", registry=registry)
        under_way.set_function(sequences)
        registry.register(_Engine(stats))

    def text(self) -> bytes:
        return generate_latest(self.registry)


class Stopwatch:
    """Times of one request."""

    def __init__(self, metrics: Metrics, endpoint: str) -> None:
        self._metrics = metrics
        self._endpoint = endpoint
        self._began = time.monotonic()
        self._first: float | None = None

    def token(self) -> None:
        """Something was written; only the first time counts."""
        if self._first is None:
            self._first = time.monotonic()
            self._metrics.first_token.observe(self._first - self._began)

    def end(self, *, prompt: int, cached: int, completion: int, longest: int) -> None:
        """`longest`: tokens of the longest sequence."""
        now, metrics = time.monotonic(), self._metrics
        metrics.duration.labels(self._endpoint).observe(now - self._began)
        metrics.prompt_tokens.inc(prompt)
        metrics.cached_tokens.inc(cached)
        metrics.completion_tokens.inc(completion)
        if self._first is not None and longest > 1:
            metrics.per_token.observe((now - self._first) / (longest - 1))
