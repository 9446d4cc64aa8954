"""From runs of tokens, plain numbers on the host, to the tensors of one step (paged.py).

A `Run` is some tokens of one sequence with the pages and the slot it owns. Runs of one token become decodes, longer
ones chunks. The numbers of decodes travel as one int32 block, so that a step costs one copy to the device, and a CUDA
graph can read them from a buffer that stays where it is:

    numbers [6, D]     TOKEN, POSITION, WRITE_ROW, SLOT, LENGTH, LATE
    table   [D, M]     the pages of every sequence

LATE is -1, or the index among `late_ids`, on the device, of a token that the host has not seen yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from perilune.model.paged import Chunks, DecodePlaces, PagedBatch, rows_of

TOKEN, POSITION, WRITE_ROW, SLOT, LENGTH, LATE = range(6)


class Run(Protocol):
    """Tokens of one sequence, beginning at position `start`."""

    @property
    def start(self) -> int: ...
    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def pages(self) -> Sequence[int]: ...
    @property
    def slot(self) -> int: ...
    @property
    def late_row(self) -> int | None: ...


def decode_numbers(runs: Sequence[Run], *, page_size: int, scratch_row: int, num_rows: int | None = None) -> np.ndarray:
    """[6, num_rows] int32 of runs of one token; rows past the runs are padding."""
    columns = [
        (
            max(run.tokens[0], 0),
            run.start,
            run.pages[run.start // page_size] * page_size + run.start % page_size if run.pages else scratch_row,
            run.slot,
            run.start + 1,
            -1 if run.late_row is None else run.late_row,
        )
        for run in runs
    ]
    padding = (0, 0, scratch_row, -1, 0, -1)
    columns += [padding] * (0 if num_rows is None else num_rows - len(runs))
    return np.ascontiguousarray(np.array(columns, np.int32).reshape(-1, 6).T)


def page_table(runs: Sequence[Run], *, num_rows: int | None = None, width: int | None = None) -> np.ndarray:
    """[num_rows, width] int32; entries past the pages of a run are 0, and never read."""
    width = max((len(run.pages) for run in runs), default=0) if width is None else width
    table = np.zeros((len(runs) if num_rows is None else num_rows, width), np.int32)
    for row, run in enumerate(runs):
        table[row, : len(run.pages)] = run.pages
    return table


def decode_places(numbers: np.ndarray, table: np.ndarray, page_size: int) -> DecodePlaces:
    """Of decodes without padding, with these numbers and pages."""
    slots, lengths = numbers[SLOT], numbers[LENGTH]
    first, count = int(slots[0]), len(slots)
    in_a_row = np.array_equal(slots, np.arange(first, first + count))
    longest = int(lengths.max()) if table.shape[1] else 0
    rows = (table.astype(np.int64)[:, :, None] * page_size + np.arange(page_size)).reshape(count, -1)[:, :longest]
    outside = None
    if longest and lengths.min() < longest:
        beyond = np.arange(longest) >= lengths[:, None]
        rows = np.where(beyond, rows[:, :1], rows)  # what lies past the end may be anything, NaN for instance
        outside = torch.from_numpy(beyond).unsqueeze(1)
    return DecodePlaces(
        slots=slice(first, first + count) if in_a_row else torch.from_numpy(slots.astype(np.int64)),
        rows=torch.from_numpy(np.ascontiguousarray(rows)),
        outside=outside,
    )


def decode_batch(
    numbers: Tensor,
    table: Tensor,
    late_ids: Tensor | None = None,
    *,
    wanted: Tensor | None = None,
    places: DecodePlaces | None = None,
) -> PagedBatch:
    """A step of decodes alone. Runs on the device: it can be part of a graph."""
    return PagedBatch(
        tokens=_with_late(numbers[TOKEN], numbers[LATE], late_ids).unsqueeze(0),
        positions=numbers[POSITION].unsqueeze(0),
        write_rows=numbers[WRITE_ROW].long(),
        slots=numbers[SLOT],
        block_table=table,
        lengths=numbers[LENGTH],
        wanted=wanted,
        places=places,
    )


def mixed_batch(
    decodes: Sequence[Run],
    chunks: Sequence[Run],
    *,
    page_size: int,
    scratch_row: int,
    wanted: Sequence[int] | None = None,
    late_ids: Tensor | None = None,
    device: torch.device | str | None = None,
) -> PagedBatch:
    """A step of decodes and chunks, in this order; `wanted` are rows of it."""
    numbers, table = decode_numbers(decodes, page_size=page_size, scratch_row=scratch_row), page_table(decodes)
    on_host = device is None or torch.device(device).type == "cpu"
    places = decode_places(numbers, table, page_size) if decodes and on_host else None
    rows = None if wanted is None else torch.tensor(wanted, dtype=torch.long, device=device)
    first = decode_batch(
        torch.from_numpy(numbers).to(device), torch.from_numpy(table).to(device), late_ids, wanted=rows, places=places
    )
    if not chunks:
        return first
    lengths = tuple(len(run.tokens) for run in chunks)
    ends = tuple(run.start + len(run.tokens) for run in chunks)
    borders = torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.long, device=device)
    pages = [torch.tensor(run.pages, dtype=torch.long, device=device) for run in chunks]
    cached = tuple(rows_of(own, end, page_size) for own, end in zip(pages, ends, strict=True))
    tokens = torch.tensor([[max(token, 0) for run in chunks for token in run.tokens]], dtype=torch.long).to(device)
    late = [-1] * sum(lengths)
    for run, border in zip(chunks, np.cumsum(lengths).tolist(), strict=True):
        late[border - 1] = -1 if run.late_row is None else run.late_row
    if any(row >= 0 for row in late):
        tokens = _with_late(tokens[0], torch.tensor(late, device=device), late_ids).unsqueeze(0)
    positions = torch.cat([torch.arange(run.start, end) for run, end in zip(chunks, ends, strict=True)]).to(device)
    write = [own[run.start :] for run, own in zip(chunks, cached, strict=True)] if pages[0].numel() else None
    write_rows = torch.full_like(positions, scratch_row) if write is None else torch.cat(write)
    assert first.positions is not None
    return PagedBatch(
        tokens=torch.cat([first.tokens.long(), tokens], dim=1),
        positions=torch.cat([first.positions.long(), positions.unsqueeze(0)], dim=1),
        write_rows=torch.cat([first.write_rows, write_rows]),
        slots=first.slots,
        block_table=first.block_table,
        lengths=first.lengths,
        chunks=Chunks(
            cu_seqlens=borders,
            slots=torch.tensor([run.slot for run in chunks], dtype=torch.long, device=device),
            lengths=lengths,
            cached_rows=cached,
        ),
        wanted=rows,
        places=places,
    )


def _with_late(tokens: Tensor, late: Tensor, late_ids: Tensor | None) -> Tensor:
    if late_ids is None or not late_ids.numel():  # the step before sampled nothing, so nothing of it is late
        return tokens
    return torch.where(late >= 0, late_ids[late.clamp(min=0).long()].to(tokens.dtype), tokens)
