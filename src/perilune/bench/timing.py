"""How long a call takes, how much memory it needs, and what the machine can do at best.

On CUDA: events around each call, the second-level cache flushed in between, the median of many. Elsewhere: the host's
clock, the median of a few. Everything is warmed up first, so that compilation and handles stay out of the numbers.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

CUDA_BUDGET_MS, CPU_BUDGET_MS = 300.0, 150.0
MIN_REPEATS, MAX_REPEATS = 5, 200
FLUSH_BYTES = 256 << 20  # several times the second-level cache of any GPU so far
GRAPH_MS, MAX_GRAPH_CALLS = 2.0, 64


def median_ms(function: Callable[[], Any], device: torch.device, grad_to_none: Iterable[Tensor] = ()) -> float:
    """Median time of one call. Gradients of `grad_to_none` are dropped before each call, outside the timed region."""
    tensors = list(grad_to_none)

    def drop_gradients() -> None:
        for x in tensors:
            x.grad = None

    if device.type != "cuda":
        return _median_on_host(function, drop_gradients)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
    for _ in range(2):
        drop_gradients()
        function()
    one = _events_ms([(drop_gradients, flush, function)])[0]
    repeats = _repeats(one, CUDA_BUDGET_MS)
    if repeats > MIN_REPEATS:  # a short call: let clocks and caches settle
        for _ in range(repeats // 4):
            drop_gradients()
            function()
    return statistics.median(_events_ms([(drop_gradients, flush, function)] * repeats))


def _events_ms(calls: list[tuple[Callable[[], None], Tensor, Callable[[], Any]]]) -> list[float]:
    pairs = []
    for prepare, flush, function in calls:
        prepare()
        flush.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        function()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in pairs]


def _median_on_host(function: Callable[[], Any], prepare: Callable[[], None]) -> float:
    times: list[float] = []
    prepare()
    function()
    repeats = 1
    while len(times) < repeats:
        prepare()
        began = time.perf_counter()
        function()
        times.append((time.perf_counter() - began) * 1e3)
        if len(times) == 1:
            # Three even of a long one: it may have been long because something else ran.
            repeats = min(_repeats(times[0], CPU_BUDGET_MS), 50) if times[0] < 2000 else 3
    return statistics.median(times)


def _repeats(one_ms: float, budget_ms: float) -> int:
    return max(MIN_REPEATS, min(MAX_REPEATS, int(budget_ms / max(one_ms, 1e-3))))


def graph_ms(function: Callable[[], Any], device: torch.device) -> float:
    """Time of one call inside a replayed CUDA graph of several calls: no host cost, and a warm second-level cache."""
    if device.type != "cuda":
        return median_ms(function, device)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)
    one = _replay_ms(_captured(function, 1), 3)
    calls = max(1, min(MAX_GRAPH_CALLS, int(GRAPH_MS / max(one, 1e-3))))
    graph = _captured(function, calls)
    return _replay_ms(graph, _repeats(one * calls, CUDA_BUDGET_MS)) / calls


def in_a_row_ms(function: Callable[[], Any], device: torch.device) -> float:
    """Time of one of many calls, one after the other, by the host's clock: what the slower of host and device takes.

    `median_ms` cannot say it: while the device empties the cache before a call, the host is already launching it.
    """
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None

    def timed(calls: int) -> float:
        wait()
        began = time.perf_counter()
        for _ in range(calls):
            function()
        wait()
        return (time.perf_counter() - began) * 1e3 / calls

    timed(3)
    one = timed(3)
    calls = max(1, min(MAX_GRAPH_CALLS, int(GRAPH_MS / max(one, 1e-3))))
    budget = CUDA_BUDGET_MS if device.type == "cuda" else CPU_BUDGET_MS
    return statistics.median(timed(calls) for _ in range(_repeats(one * calls, budget)))


def _captured(function: Callable[[], Any], calls: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            function()
    return graph


def _replay_ms(graph: torch.cuda.CUDAGraph, repeats: int) -> float:
    graph.replay()
    pairs = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs)


def peak_bytes(function: Callable[[], Any], device: torch.device) -> int:
    """Bytes of torch tensors alive at the worst moment of one call, beyond what was alive before it."""
    if device.type == "cuda":
        function()  # compile, and fill what lives on between calls
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler otherwise tells of its start and stop
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    kineto: Any = profile.profiler
    changes = [event for event in kineto.kineto_results.events() if event.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read plus written, of one large copy."""
    size = (1 << 30) if device.type == "cuda" else (1 << 26)
    source = torch.empty(size, dtype=torch.int8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * size / (median_ms(lambda: target.copy_(source), device) * 1e-3)


def matmul_rate(device: torch.device) -> float:
    """FLOP per second of one large square product: bfloat16 on CUDA, float32 elsewhere."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (512, torch.float32)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * size**3 / (median_ms(lambda: torch.mm(left, right, out=out), device) * 1e-3)
