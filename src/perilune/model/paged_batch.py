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

from perilune.model.paged import Chunks, DecodePlaces, JoinedKeys, PagedBatch, rows_of
from perilune.model.sampling import to_device

TOKEN, POSITION, WRITE_ROW, SLOT, LENGTH, LATE = range(6)
MOST_JOINED_KEYS = 16_384
"""Keys that are expanded at once for the chunks of a step: as many as in a piece of a longer sequence."""


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
    count = len(runs)
    numbers = np.empty((6, count if num_rows is None else num_rows), np.int32)
    numbers[:, count:] = np.array([[0], [0], [scratch_row], [-1], [0], [-1]])
    if count:
        starts = np.array([run.start for run in runs], np.int64)
        pages = [run.pages[run.start // page_size] if run.pages else -1 for run in runs]
        places = np.array(pages, np.int64) * page_size + starts % page_size
        numbers[TOKEN, :count] = np.maximum([run.tokens[0] for run in runs], 0)
        numbers[POSITION, :count] = starts
        numbers[WRITE_ROW, :count] = np.where(places < 0, scratch_row, places)
        numbers[SLOT, :count] = [run.slot for run in runs]
        numbers[LENGTH, :count] = starts + 1
        numbers[LATE, :count] = [-1 if run.late_row is None else run.late_row for run in runs]
    return numbers


def round_numbers(
    first: np.ndarray, table: np.ndarray, rounds: Sequence[int], *, page_size: int, scratch_row: int
) -> np.ndarray:
    """[most rounds, 6, num_rows] int32: the numbers of a burst, round after round. In each, the runs that have as many
    compute the token that their own row of late ids holds; the others, which come after them, are padding."""
    count, most = len(rounds), max(rounds)
    numbers = np.tile(first, (most, 1, 1))
    later = np.arange(most)[:, None]
    going = later < np.array(rounds)
    positions = first[POSITION, :count].astype(np.int64) + later
    rows = np.full(positions.shape, scratch_row)
    if table.shape[1]:
        pages = table[np.arange(count), np.minimum(positions // page_size, table.shape[1] - 1)]
        rows = pages.astype(np.int64) * page_size + positions % page_size
    numbers[:, POSITION, :count] = np.where(going, positions, 0)
    numbers[:, WRITE_ROW, :count] = np.where(going, rows, scratch_row)
    numbers[:, SLOT, :count] = np.where(going, first[SLOT, :count], -1)
    numbers[:, LENGTH, :count] = np.where(going, positions + 1, 0)
    numbers[1:, TOKEN, :count] = 0
    numbers[1:, LATE, :count] = np.where(going[1:], np.arange(count), -1)
    return numbers


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
        tokens=with_late(numbers[TOKEN], numbers[LATE], late_ids).unsqueeze(0),
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
    """A step of decodes and chunks, in this order; `wanted` are rows of it. Nothing here waits for a GPU."""
    place = torch.device("cpu" if device is None else device)
    numbers, table = decode_numbers(decodes, page_size=page_size, scratch_row=scratch_row), page_table(decodes)
    places = decode_places(numbers, table, page_size) if decodes and place.type == "cpu" else None
    rows = None if wanted is None else _sent(wanted, place)
    first = decode_batch(to_device(numbers, place), to_device(table, place), late_ids, wanted=rows, places=places)
    if not chunks:
        return first
    lengths, starts = [len(run.tokens) for run in chunks], [run.start for run in chunks]
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    borders, slots = np.cumsum([0, *lengths]), np.array([run.slot for run in chunks])
    late = np.full(borders[-1], -1)
    late[borders[1:] - 1] = [-1 if run.late_row is None else run.late_row for run in chunks]
    pages = [np.array(run.pages, np.int64) for run in chunks]
    has_pages = bool(pages[0].size)
    writes = [rows_between(own, start, end, page_size) for own, start, end in zip(pages, starts, ends, strict=True)]
    joined = has_pages and sum(ends) <= MOST_JOINED_KEYS
    sent = _sent_together(
        place,
        tokens=np.concatenate([np.array(run.tokens, np.int64) for run in chunks]).clip(min=0),
        late=late,
        positions=np.concatenate([np.arange(start, end) for start, end in zip(starts, ends, strict=True)]),
        write_rows=np.concatenate(writes) if has_pages else np.full(borders[-1], scratch_row),
        borders=borders,
        slots=slots,
        origins=np.stack([np.repeat(borders[:-1], lengths), np.repeat(slots, lengths)]).astype(np.int32),
        pages=np.concatenate(pages),
        query_borders=borders.astype(np.int32),
        key_borders=np.cumsum([0, *ends]).astype(np.int32),
        joined=np.concatenate([rows_between(own, 0, end, page_size) for own, end in zip(pages, ends, strict=True)])
        if joined
        else np.empty(0, np.int64),
    )
    tokens = sent["tokens"]
    if any(run.late_row is not None for run in chunks):
        tokens = with_late(tokens, sent["late"], late_ids)
    places_of_pages = rows_of(sent["pages"], sent["pages"].numel() * page_size, page_size)
    of_chunks = places_of_pages.split([own.size * page_size for own in pages])
    assert first.positions is not None
    return PagedBatch(
        tokens=torch.cat([first.tokens.long(), tokens.unsqueeze(0)], dim=1),
        positions=torch.cat([first.positions.long(), sent["positions"].unsqueeze(0)], dim=1),
        write_rows=torch.cat([first.write_rows, sent["write_rows"]]),
        slots=first.slots,
        block_table=first.block_table,
        lengths=first.lengths,
        chunks=Chunks(
            cu_seqlens=sent["borders"],
            slots=sent["slots"],
            origins=sent["origins"].view(2, -1),
            lengths=tuple(lengths),
            cached_rows=tuple(own[:end] for own, end in zip(of_chunks, ends, strict=True)),
            joined=JoinedKeys(
                rows=sent["joined"],
                query_borders=sent["query_borders"],
                key_borders=sent["key_borders"],
                most_queries=max(lengths),
                most_keys=max(ends),
            )
            if joined
            else None,
        ),
        wanted=rows,
        places=places,
    )


def rows_between(pages: np.ndarray, start: int, end: int, page_size: int) -> np.ndarray:
    """`rows_of` the tokens [start, end), on the host; nothing where there are no pages."""
    if not pages.size:
        return pages
    first = start // page_size
    near = pages[first : -(-end // page_size), None] * page_size + np.arange(page_size)
    return near.ravel()[start - first * page_size : end - first * page_size]


@torch.inference_mode(False)  # tables of the borders are kept for all layers, but never those of an inference tensor
def _sent_together(device: torch.device, **numbers: np.ndarray) -> dict[str, Tensor]:
    """Arrays of int64 or int32 as flat tensors, by one copy to the device; each begins at a multiple of 16 bytes."""
    sizes = [-(-array.nbytes // 16) * 16 for array in numbers.values()]
    whole = np.zeros(sum(sizes), np.uint8)
    ends = np.cumsum(sizes)
    for array, size, end in zip(numbers.values(), sizes, ends, strict=True):
        whole[end - size : end - size + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    sent = to_device(whole, device)
    kinds = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32}
    return {
        name: sent[end - size : end - size + array.nbytes].view(kinds[array.dtype])
        for (name, array), size, end in zip(numbers.items(), sizes, ends.tolist(), strict=True)
    }


def _sent(numbers: Sequence[int] | np.ndarray, device: torch.device) -> Tensor:
    return to_device(np.asarray(numbers, np.int64), device)


def with_late(tokens: Tensor, late: Tensor, late_ids: Tensor | None) -> Tensor:
    """`tokens`, but late_ids[late] where `late` is no less than 0; all on the device."""
    if late_ids is None or not late_ids.numel():  # the step before sampled nothing, so nothing of it is late
        return tokens
    return torch.where(late >= 0, late_ids[late.clamp(min=0).long()].to(tokens.dtype), tokens)
