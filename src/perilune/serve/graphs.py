"""Steps of decodes alone as CUDA graphs: one recording per batch bucket, replayed with new numbers.

A decoding step of a small batch takes the host longer to launch than the device to run. A graph launches it at once,
but only with the shapes and addresses it was recorded with. So the numbers of a step are copied into buffers that stay
where they are, the batch is filled up to the next bucket (1, 2, 4, 8, 16, ...) with padding rows, and the table of
pages to the next width (a power of four). A graph is recorded when its bucket is first needed, or before there are
requests (`record_usual`), after running it twice on padding alone, which compiles every kernel and changes no page or
slot.

The numbers of all rounds of a burst (plan.py) are sent at once, so that a later round costs the host next to nothing.

With `capture=False` the same padded step runs without a graph: what tests compare on a CPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import is_not

import numpy as np
import torch
from torch import Tensor

from perilune.kernels.recording import RECORDING, stream_of
from perilune.kernels.recording import recording as on_device
from perilune.model.paged import PagedBatch
from perilune.model.paged_batch import Run, decode_batch, decode_numbers, round_numbers
from perilune.model.sampling import to_device

SMALLEST_WIDTH = 16
USUAL_WIDTHS = (SMALLEST_WIDTH, 4 * SMALLEST_WIDTH)
WARM_UPS = 2


def batch_buckets(max_sequences: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to the most sequences that run at once."""
    if max_sequences < 1:
        raise ValueError(f"max_sequences is {max_sequences!r}, expected at least 1")
    sizes = [1]
    while sizes[-1] < max_sequences:
        sizes.append(min(2 * sizes[-1], max_sequences))
    return tuple(sizes)


def bucket_of(count: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds `count`."""
    fitting = [size for size in buckets if size >= count]
    if not fitting:
        raise ValueError(f"a step decodes {count} sequences, expected at most max_sequences={buckets[-1]}")
    return fitting[0]


def width_of(num_pages: int) -> int:
    """Columns of the page table: the next power of four, at least 16."""
    width = SMALLEST_WIDTH
    while width < num_pages:
        width *= 4
    return width


@dataclass(eq=False)
class _Recording:
    """Buffers of one bucket, what they are turned into, and the graph that does it."""

    numbers: Tensor
    """[6, bucket] int32"""
    table: Tensor
    """[bucket, width] int32"""
    late_ids: Tensor
    """[rows of the largest bucket]"""
    pages: Sequence[np.ndarray] = ()
    """What the table holds; the same arrays are not copied again."""
    graph: torch.cuda.CUDAGraph | None = None
    output: Tensor | None = None


class DecodeGraphs:
    """`step` turns a PagedBatch into one row of output per decode, always by the same launches for the same shapes."""

    def __init__(
        self,
        step: Callable[[PagedBatch], Tensor],
        *,
        page_size: int,
        scratch_row: int,
        max_sequences: int,
        device: torch.device,
        capture: bool = True,
    ) -> None:
        self.buckets = batch_buckets(max_sequences)
        self._step, self._device, self._capture = step, device, capture
        self._page_size, self._scratch_row = page_size, scratch_row
        self._recordings: dict[tuple[int, int], _Recording] = {}
        self._memory = torch.cuda.graph_pool_handle() if capture else None
        self._burst: tuple[_Recording, Tensor] | None = None
        """The numbers of all its rounds, on the device."""

    def __len__(self) -> int:
        return len(self._recordings)

    def run(
        self,
        runs: Sequence[Run],
        pages: Sequence[np.ndarray],
        late_ids: Tensor | None = None,
        rounds: Sequence[int] | None = None,
    ) -> Tensor:
        """One row per run, until the next step of the same bucket. `pages` [M] int32 are those of every run; `rounds`,
        most of them first, how many tokens each will compute, with `run_later` for all but the first."""
        key = bucket_of(len(runs), self.buckets), width_of(max(map(len, pages)))
        if key not in self._recordings:
            self._recordings[key] = self._record(*key)
        recording = self._recordings[key]
        self._burst = None
        self._fill(recording, runs, pages, late_ids, rounds)
        return self._replayed(recording)[: len(runs)]

    def run_later(self, number: int, count: int, late_ids: Tensor) -> Tensor:
        """Round `number` of the burst that began with the last `run`: of its first `count` runs."""
        assert self._burst is not None
        recording, numbers = self._burst
        recording.numbers.copy_(numbers[number])
        recording.late_ids[: len(late_ids)].copy_(late_ids)
        return self._replayed(recording)[:count]

    def _replayed(self, recording: _Recording) -> Tensor:
        if recording.graph is None:
            return self._padded(recording)
        recording.graph.replay()
        assert recording.output is not None
        return recording.output

    def record_usual(self) -> None:
        """Every number of sequences, none of them long."""
        for batch in self.buckets:
            for width in USUAL_WIDTHS:
                if (batch, width) not in self._recordings:
                    self._recordings[batch, width] = self._record(batch, width)

    def _fill(
        self,
        recording: _Recording,
        runs: Sequence[Run],
        pages: Sequence[np.ndarray],
        late_ids: Tensor | None,
        rounds: Sequence[int] | None,
    ) -> None:
        numbers = decode_numbers(
            runs, page_size=self._page_size, scratch_row=self._scratch_row, num_rows=recording.numbers.shape[1]
        )
        if rounds is None:
            copy_numbers(numbers, recording.numbers)
        else:
            every = round_numbers(
                numbers, page_matrix(pages), rounds, page_size=self._page_size, scratch_row=self._scratch_row
            )
            sent = to_device(every, self._device)
            recording.numbers.copy_(sent[0])
            self._burst = recording, sent
        if len(pages) != len(recording.pages) or any(map(is_not, pages, recording.pages)):
            copy_pages(pages, recording.table)
            recording.pages = pages
        if late_ids is not None:
            recording.late_ids[: len(late_ids)].copy_(late_ids)

    def _padded(self, recording: _Recording) -> Tensor:
        return self._step(decode_batch(recording.numbers, recording.table, recording.late_ids))

    def _record(self, batch: int, width: int) -> _Recording:
        padding = decode_numbers((), page_size=self._page_size, scratch_row=self._scratch_row, num_rows=batch)
        recording = _Recording(
            numbers=torch.from_numpy(padding).to(self._device),
            table=torch.zeros(batch, width, dtype=torch.int32, device=self._device),
            late_ids=torch.zeros(self.buckets[-1], dtype=torch.long, device=self._device),
        )
        if self._capture:
            try:
                recording.graph, recording.output = recorded(
                    lambda: self._padded(recording), device=self._device, memory=self._memory
                )
            except RuntimeError as error:  # of memory too; the padded step runs without a graph all the same
                self._capture = False
                warnings.warn(f"new shapes of decodes run without CUDA graphs from now on: {error}", stacklevel=2)
        return recording


def recorded(
    step: Callable[[], Tensor], *, device: torch.device, memory: torch.cuda._POOL_HANDLE | None
) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """`step` as a graph that takes what it needs from the pool `memory`, and the output that it fills.

    It runs a few times before, beside what the device does: kernels are compiled, and what is kept of them is made,
    outside of the graph. Engines of one process (a policy and its frozen workers) take turns in all of it.
    """
    graph = torch.cuda.CUDAGraph()
    with RECORDING:
        stream = stream_of(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                step()
        torch.cuda.current_stream(device).wait_stream(stream)
        with on_device(graph, device, memory=memory):
            output = step()
    return graph, output


def copy_numbers(numbers: np.ndarray, target: Tensor) -> None:
    """Pinned on the way to a GPU, in memory that is not used again before the copy is over."""
    tensor = torch.from_numpy(numbers)
    target.copy_(tensor.pin_memory() if target.is_cuda else tensor, non_blocking=True)


def copy_pages(pages: Sequence[np.ndarray], table: Tensor) -> None:
    """The pages of every sequence into its row of a table; what lies behind them stays, and is never read."""
    held = page_matrix(pages)
    copy_numbers(held, table[: len(pages), : held.shape[1]])


def page_matrix(pages: Sequence[np.ndarray]) -> np.ndarray:
    """[sequences, most pages] int32; 0 behind those of a sequence."""
    held = np.zeros((len(pages), max(map(len, pages), default=0)), np.int32)
    for row, own in enumerate(pages):
        held[row, : len(own)] = own
    return held
