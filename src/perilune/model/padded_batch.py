"""A step of decodes and chunks in a shape of its own choosing: every number filled up to a bucket's.

A CUDA graph runs with the shapes it was recorded with. So a step takes the shape of a bucket, and its numbers lie in
one int32 block of fixed size, which may be copied to where a graph reads it; borders, late tokens and wanted rows are
all worked out from it on the device.

    row      = [ decodes, padding decodes | chunk 0 | chunk 1 | ... | padding tokens ]
    numbers  = rows [6, D + T], borders [N + 2], key_borders [N + 2], slots [N + 1], wanted [D + N], keys [S]

Runs that a step lacks are empty: their borders repeat. One run more than the bucket's N, always the last, holds the
padding tokens. It and the empty runs live on the scratch slot, behind those of all sequences; it has no keys, so its
tokens attend to nothing; their latents go to the scratch row. Padding therefore changes nothing that is read, and a
sequence gets what it would get without it.

Every part begins at a multiple of 16 bytes if D and T are multiples of 4: kernels read such numbers faster.

Shape letters: D decodes, T tokens of chunks, N chunks, S keys of all chunks together, M columns of the page table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from perilune.model.paged import Chunks, JoinedKeys, PagedBatch
from perilune.model.paged_batch import (
    LATE,
    LENGTH,
    POSITION,
    SLOT,
    TOKEN,
    WRITE_ROW,
    Run,
    decode_numbers,
    rows_between,
    with_late,
)

ORIGIN = LENGTH
"""Of a chunk's token: the first token of its chunk, where a decode has its length."""
ALIGNED = 4
"""Numbers in 16 bytes."""

Numbers = TypeVar("Numbers", np.ndarray, Tensor)


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """The shape of a step; equal buckets are one recording."""

    tokens: int
    """T, of chunks"""
    runs: int
    """N"""
    decodes: int = 0
    """D"""
    keys: int = 0
    """S; 0 where no layer keeps latents"""
    width: int = 0
    """M"""

    @property
    def num_wanted(self) -> int:
        """Rows of output: one for every sequence."""
        return self.decodes + self.runs

    @property
    def num_numbers(self) -> int:
        return sum(_padded(rows * columns) for rows, columns in self._shapes().values())

    def parts(self, numbers: Numbers) -> dict[str, Numbers]:
        """`numbers` [num_numbers] by name, without a copy: [rows, columns], or [columns] of a single row."""
        found, start = {}, 0
        for name, (rows, columns) in self._shapes().items():
            part = numbers[start : start + rows * columns]
            found[name] = part.reshape(rows, columns) if rows > 1 else part
            start += _padded(rows * columns)
        return found

    def _shapes(self) -> dict[str, tuple[int, int]]:
        borders = (1, self.runs + 2)
        return {
            "rows": (6, self.decodes + self.tokens), "borders": borders, "key_borders": borders,
            "slots": (1, self.runs + 1), "wanted": (1, self.num_wanted), "keys": (1, self.keys),
        }  # fmt: skip


def padded_numbers(
    bucket: Bucket,
    decodes: Sequence[Run] = (),
    chunks: Sequence[Run] = (),
    *,
    page_size: int,
    scratch_row: int,
    scratch_slot: int,
    wanted: Sequence[int] = (),
) -> np.ndarray:
    """[bucket.num_numbers] int32. The runs fit into the bucket; `wanted` are rows of the step without padding."""
    numbers = np.zeros(bucket.num_numbers, np.int32)
    parts = bucket.parts(numbers)
    rows = parts["rows"]
    rows[:, : bucket.decodes] = decode_numbers(
        decodes, page_size=page_size, scratch_row=scratch_row, num_rows=bucket.decodes
    )
    lengths = [len(run.tokens) for run in chunks]
    ends = [run.start + length for run, length in zip(chunks, lengths, strict=True)]
    _fill_runs(parts, chunks, lengths, ends, num_tokens=bucket.tokens, scratch_slot=scratch_slot)
    later = rows[:, bucket.decodes :]
    later[:, sum(lengths) :] = _column({WRITE_ROW: scratch_row, SLOT: scratch_slot, ORIGIN: sum(lengths), LATE: -1})
    parts["keys"][sum(ends) :] = scratch_row
    first = first_key = 0
    for run, length, end in zip(chunks, lengths, ends, strict=True):
        own = later[:, first : first + length]
        own[:] = _column({WRITE_ROW: scratch_row, SLOT: run.slot, ORIGIN: first, LATE: -1})
        np.maximum(run.tokens, 0, out=own[TOKEN], casting="same_kind")
        own[POSITION] = np.arange(run.start, end)
        own[LATE, -1] = -1 if run.late_row is None else run.late_row
        if len(run.pages):
            held = rows_between(np.array(run.pages, np.int64), 0 if bucket.keys else run.start, end, page_size)
            own[WRITE_ROW] = held[-length:]
            if bucket.keys:
                parts["keys"][first_key : first_key + end] = held
        first, first_key = first + length, first_key + end
    shift = bucket.decodes - len(decodes)
    parts["wanted"][: len(wanted)] = [row if row < len(decodes) else row + shift for row in wanted]
    return numbers


def padded_batch(bucket: Bucket, numbers: Tensor, table: Tensor, late_ids: Tensor) -> PagedBatch:
    """The step that `numbers` [bucket.num_numbers] and the pages of its decodes, table [D, M], describe.

    Runs on the device: it can be part of a graph. What it returns is used up with this step: layers keep what they
    work out about `chunks.cu_seqlens` for as long as that tensor lives.
    """
    parts = bucket.parts(numbers)
    rows, borders = parts["rows"], parts["borders"]
    decodes, later = rows[:, : bucket.decodes], rows[:, bucket.decodes :]
    joined = JoinedKeys(
        rows=parts["keys"].long(),
        query_borders=borders,
        key_borders=parts["key_borders"],
        most_queries=bucket.tokens,
        most_keys=bucket.keys,
    )
    return PagedBatch(
        tokens=with_late(rows[TOKEN], rows[LATE], late_ids).unsqueeze(0),
        positions=rows[POSITION].unsqueeze(0),
        write_rows=rows[WRITE_ROW].long(),
        slots=decodes[SLOT],
        block_table=table,
        lengths=decodes[LENGTH],
        chunks=Chunks(
            cu_seqlens=borders.long(),
            slots=parts["slots"].long(),
            origins=torch.stack([later[ORIGIN], later[SLOT]]),
            joined=joined if bucket.keys else None,
        ),
        wanted=parts["wanted"].long(),
    )


def _fill_runs(
    parts: dict[str, np.ndarray],
    chunks: Sequence[Run],
    lengths: Sequence[int],
    ends: Sequence[int],
    *,
    num_tokens: int,
    scratch_slot: int,
) -> None:
    """Borders and slots: those of the chunks, of empty runs, and of the run of padding tokens."""
    count = len(chunks)
    for name, sizes in (("borders", lengths), ("key_borders", ends)):
        parts[name][: count + 1] = list(accumulate(sizes, initial=0))
        parts[name][count + 1 :] = sum(sizes)
    parts["borders"][-1] = num_tokens
    parts["slots"][:count] = [run.slot for run in chunks]
    parts["slots"][count:] = scratch_slot


def _column(values: dict[int, int]) -> np.ndarray:
    """[6, 1]: what all tokens of a run have in common, by kind of number; 0 for the others."""
    column = np.zeros((6, 1), np.int32)
    for kind, value in values.items():
        column[kind] = value
    return column


def _padded(count: int) -> int:
    return -(-count // ALIGNED) * ALIGNED
