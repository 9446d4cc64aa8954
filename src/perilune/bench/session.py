"""What a benchmark module gets: checks against a reference, times, memory, ceilings of the machine, and rows.

    def run(bench: Bench) -> None:
        case = "norm T4096 D1024"
        if not bench.wants(case):
            return
        bench.check(case, fast(x), reference(x.double()), limit=5e-3)
        bench.add(case, "forward", "ms", bench.time(lambda: fast(x)), peers={"torch": bench.time(lambda: slow(x))})

A module checks first and times what was right. Rows are printed as they come, and written after each one when there is
a file, so that a run cut short keeps what it had.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perilune.bench import timing
from perilune.bench.peers import version_of
from perilune.bench.rows import Row, line_of, ratio_of, write_rows


class BenchError(RuntimeError):
    """A result that is wrong: no time of it is worth anything."""


class NotApplicable(RuntimeError):
    """Why an area, or a case, cannot run on this machine; raised by a module, shown in one line."""


class Bench:
    def __init__(
        self,
        device: torch.device | str,
        *,
        pattern: str = "",
        path: Path | None = None,
        commit: str = "",
        emit: Callable[[str], None] = print,
    ):
        """`pattern`: part of a case's name, several with commas between. `path`: file for the rows."""
        self.device = torch.device(device)
        self.rows: list[Row] = []
        self.notes: list[str] = []
        self.prefix = ""  # of the cases in the rows, where several areas share a file
        self.versions = _versions(self.device)
        self._commit = commit
        self._device_name = _device_name(self.device)
        self._parts = [part.strip() for part in pattern.split(",") if part.strip()]
        self._path = path
        self._emit = emit

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    def wants(self, case: str) -> bool:
        """Whether the person asked for this case; work for others is skipped."""
        return not self._parts or any(part in case for part in self._parts)

    @property
    def is_filtered(self) -> bool:
        """Whether the person named cases: then also those that are left out by default, as slow, should run."""
        return bool(self._parts)

    def names(self, word: str) -> bool:
        """Whether the person's pattern has this word: for cases so slow that a part of their name is not enough."""
        return any(word in part for part in self._parts)

    def check(
        self,
        case: str,
        got: Tensor,
        want: Tensor,
        limit: float,
        what: str = "o",
        peers: Mapping[str, Tensor] | None = None,
    ) -> float:
        """Relative root mean square error against a reference of higher precision; above `limit` or NaN raises.

        Results of `peers` are compared with the same reference, without a limit.
        """
        if got.shape != want.shape:
            raise BenchError(f"{case}: {what} has shape {tuple(got.shape)}, the reference has {tuple(want.shape)}")
        error = relative_error(got, want)
        if not error <= limit:  # NaN fails this too
            raise BenchError(
                f"{case}: {what} differs from the reference by {error:.3g} (relative RMS), limit {limit:g}"
            )
        theirs = {name: relative_error(x, want) for name, x in (peers or {}).items()}
        self.add(case, f"relative error {what}", "", error, peers={n: e for n, e in theirs.items() if math.isfinite(e)})
        for name in (name for name, e in theirs.items() if not math.isfinite(e)):
            self.note(f"{case}: {what} of {name} is not finite")
        return error

    def time(self, function: Callable[[], Any], grad_to_none: Iterable[Tensor] = ()) -> float:
        """Median milliseconds of one call, with a cold second-level cache on CUDA."""
        return timing.median_ms(function, self.device, grad_to_none)

    def time_graph(self, function: Callable[[], Any]) -> float:
        """Milliseconds of one call within a replayed CUDA graph; `time` where there is no CUDA."""
        return timing.graph_ms(function, self.device)

    def time_in_a_row(self, function: Callable[[], Any]) -> float:
        """Milliseconds of one of many calls in a row, without a graph: the host counts where it is the slower side."""
        return timing.in_a_row_ms(function, self.device)

    def peak_memory(self, function: Callable[[], Any]) -> int:
        """Bytes allocated at the peak of a call beyond what was allocated before it."""
        return timing.peak_bytes(function, self.device)

    @cached_property
    def copy_bandwidth(self) -> float:
        """Bytes per second of a large copy, read plus written."""
        return timing.copy_bandwidth(self.device)

    @cached_property
    def matmul_rate(self) -> float:
        """FLOP per second of a large product: bfloat16 on CUDA, float32 on CPU."""
        return timing.matmul_rate(self.device)

    def add(
        self,
        case: str,
        metric: str,
        unit: str,
        ours: float,
        peers: Mapping[str, float | None] | None = None,
        floor: float | None = None,
        lower_is_better: bool = True,
    ) -> None:
        """One row for each peer that has a number, or one row without a peer."""
        measured = {name: value for name, value in (peers or {}).items() if value is not None}
        for name, value in measured.items() or [(None, None)]:
            for number in (ours, value, floor):
                if number is not None and not math.isfinite(number):
                    raise BenchError(f"{case}: {metric} is {number}, expected a finite number")
            row = Row(
                case=self.prefix + case,
                metric=metric,
                unit=unit,
                ours=float(ours),
                peer=None if value is None else float(value),
                peer_name=name,
                ratio=ratio_of(ours, value, lower_is_better=lower_is_better),
                floor=None if floor is None else float(floor),
                device=self._device_name,
                versions=dict(self.versions),
                commit=self._commit,
                date=datetime.now(UTC).isoformat(timespec="seconds"),
            )
            self.rows.append(row)
            self._emit(line_of(row))
        if self._path is not None:
            write_rows(self.rows, self._path)

    def note(self, text: str) -> None:
        """A line for the person, once: what was left out and why."""
        if text not in self.notes:
            self.notes.append(text)
            self._emit(f"note: {text}")


def relative_error(got: Tensor, want: Tensor) -> float:
    """|got - want| / |want| in float64, sums of squares over all elements; where want is zero, |got - want| itself."""
    difference, size = 0.0, 0.0
    # In pieces: a float64 copy of a large tensor would not fit beside it.
    for part, reference in zip(got.detach().flatten().split(1 << 26), want.detach().flatten().split(1 << 26)):
        reference = reference.double()
        difference += float((part.double() - reference).square().sum())
        size += float(reference.square().sum())
    return math.sqrt(difference / size) if size else math.sqrt(difference)


def _versions(device: torch.device) -> dict[str, str]:
    found = {"torch": str(torch.__version__), "triton": version_of("triton"), "perilune": version_of("perilune")}
    if device.type == "cuda":
        found["cuda"] = torch.version.cuda
    return {name: version for name, version in found.items() if version}


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
