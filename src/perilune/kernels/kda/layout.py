"""How sequences are cut into chunks for the chunked path.

Every sequence (a batch row or a packed document) is cut into chunks of C tokens; chunks never cross a border and the
last one is padded. Sequences are sorted by length, longest first, and put in groups; within a group chunks are stored
position by position:

    group = sequences 0..2, lengths 5C, 3C, C      chunks: (0,0) (1,0) (2,0) | (0,1) (1,1) | (0,2) (1,2) | (0,3) | (0,4)

so the scan over positions is one batched step over a contiguous slice of chunks, and the sequences that end are the
last ones of the slice. A segment is a run of steps whose tensors fit in cache together: all work is done segment by
segment. Padding rows repeat the last token of their sequence; the caller makes them inert (no decay, beta 0).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Step:
    """One chunk position of one group: `num_active` chunks from `first_chunk`, of sequences from `first_sequence`."""

    first_chunk: int
    first_sequence: int
    num_active: int
    num_continuing: int  # of the active sequences, how many have a chunk at the next step of the same segment


@dataclass(frozen=True, kw_only=True)
class Segment:
    first_chunk: int
    num_chunks: int
    steps: tuple[Step, ...]
    batch_slice: slice  # dense layouts: the rows and tokens of this segment
    token_slice: slice
    padding: (
        Tensor | None
    )  # gathered layouts: bool [num_chunks, 1, C, 1], true where a row is padding; None without any


@dataclass(frozen=True, kw_only=True)
class Layout:
    chunk_size: int
    num_chunks: int
    segments: tuple[Segment, ...]
    sequence_order: Tensor | None  # sorted position -> sequence; None when it is the identity
    sequence_rank: Tensor | None  # its inverse
    source_rows: Tensor | None  # [num_chunks * C] token of each chunk row; None for a dense layout
    chunk_rows: Tensor | None  # [B * T] its inverse: chunk row of each token


@lru_cache(maxsize=32)
def dense_layout(batch: int, num_tokens: int, chunk_size: int, chunks_per_segment: int) -> Layout:
    """All sequences have the same length, a multiple of the chunk: segments are plain views of the tensors."""
    positions = num_tokens // chunk_size
    group_size = min(batch, chunks_per_segment)
    steps_per_segment = max(1, chunks_per_segment // max(group_size, 1))
    segments, first_chunk = [], 0
    for first in range(0, batch, max(group_size, 1)):
        active = min(group_size, batch - first)
        for position in range(0, positions, steps_per_segment):
            length = min(steps_per_segment, positions - position)
            steps = tuple(
                Step(
                    first_chunk=first_chunk + i * active,
                    first_sequence=first,
                    num_active=active,
                    num_continuing=active if i + 1 < length else 0,
                )
                for i in range(length)
            )
            segments.append(
                Segment(
                    first_chunk=first_chunk,
                    num_chunks=length * active,
                    steps=steps,
                    batch_slice=slice(first, first + active),
                    token_slice=slice(position * chunk_size, (position + length) * chunk_size),
                    padding=None,
                )
            )
            first_chunk += length * active
    return Layout(
        chunk_size=chunk_size,
        num_chunks=first_chunk,
        segments=tuple(segments),
        sequence_order=None,
        sequence_rank=None,
        source_rows=None,
        chunk_rows=None,
    )


@lru_cache(maxsize=32)
@torch.inference_mode(False)  # a cached inference tensor could never be used in training
def packed_layout(borders: tuple[int, ...], chunk_size: int, chunks_per_segment: int, device: torch.device) -> Layout:
    """Sequences of any lengths, cut from one row of tokens at `borders`: segments are gathered by row."""
    lengths = [stop - start for start, stop in zip(borders[:-1], borders[1:], strict=True)]
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    chunk_counts = [-(-lengths[i] // chunk_size) for i in order]
    chunk_starts: list[int] = []
    chunk_lengths: list[int] = []
    plans: list[tuple[int, list[Step]]] = []
    first = 0
    while first < len(order) and chunk_counts[first] > 0:
        group = range(first, min(first + chunks_per_segment, len(order)))
        pending: list[Step] = []
        pending_start = len(chunk_starts)
        for position in range(chunk_counts[first]):
            active = [i for i in group if chunk_counts[i] > position]
            if pending and len(chunk_starts) + len(active) - pending_start > chunks_per_segment:
                plans.append((pending_start, pending))
                pending, pending_start = [], len(chunk_starts)
            if pending:
                pending[-1] = _continued(pending[-1], len(active))
            pending.append(
                Step(first_chunk=len(chunk_starts), first_sequence=first, num_active=len(active), num_continuing=0)
            )
            for i in active:
                offset = position * chunk_size
                chunk_starts.append(borders[order[i]] + offset)
                chunk_lengths.append(min(chunk_size, lengths[order[i]] - offset))
        plans.append((pending_start, pending))
        first = group.stop

    starts = torch.tensor(chunk_starts, dtype=torch.long).view(-1, 1)
    valid = torch.tensor(chunk_lengths, dtype=torch.long).view(-1, 1)
    column = torch.arange(chunk_size).view(1, -1)
    source_rows = (starts + torch.minimum(column, valid - 1)).flatten()
    is_padding = (column >= valid).flatten()
    chunk_rows = torch.empty(borders[-1], dtype=torch.long)
    real_rows = (~is_padding).nonzero().flatten()
    chunk_rows[source_rows[real_rows]] = real_rows

    segments = []
    for first_chunk, steps in plans:
        num_chunks = steps[-1].first_chunk + steps[-1].num_active - first_chunk
        rows = slice(first_chunk * chunk_size, (first_chunk + num_chunks) * chunk_size)
        padding = is_padding[rows].view(num_chunks, 1, chunk_size, 1)
        segments.append(
            Segment(
                first_chunk=first_chunk,
                num_chunks=num_chunks,
                steps=tuple(steps),
                batch_slice=slice(0, 1),
                token_slice=rows,
                padding=padding.to(device) if padding.any() else None,
            )
        )
    sequence_order = torch.tensor(order, dtype=torch.long)
    return Layout(
        chunk_size=chunk_size,
        num_chunks=len(chunk_starts),
        segments=tuple(segments),
        sequence_order=sequence_order.to(device),
        sequence_rank=sequence_order.argsort().to(device),
        source_rows=source_rows.to(device),
        chunk_rows=chunk_rows.to(device),
    )


def _continued(step: Step, num_continuing: int) -> Step:
    return Step(
        first_chunk=step.first_chunk,
        first_sequence=step.first_sequence,
        num_active=step.num_active,
        num_continuing=num_continuing,
    )
