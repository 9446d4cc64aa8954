"""Where chunks and runs of chunks lie, as tensors on the device: packed documents of any lengths without a host sync.

Sizes follow from shapes alone. A sequence of n tokens has ceil(n / C) chunks, so N sequences of T tokens in all have at
most T // C + N; entries beyond the true number have length 0 and their programs return at once.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from perilune.kernels.kda.triton_chunk import CHUNK


class Runs(NamedTuple):
    """Pieces of at most `size` chunks, none across a border of sequences. All int32 except where said."""

    first_chunk: Tensor  # [R]
    num_chunks: Tensor  # [R]
    first_checkpoint: Tensor  # [R] slot of the state at the run's start, one slot per `checkpoint_every` chunks
    of_sequence: Tensor  # [N + 1] the runs of sequence n are of_sequence[n] to of_sequence[n + 1]


class Tables(NamedTuple):
    chunk_start: Tensor  # [chunks] int64, row in [B * T]
    chunk_length: Tensor  # [chunks]
    sequences: Runs  # every sequence whole
    checkpoints: Runs  # the pieces between two checkpoints; without any, the same as `sequences`
    pieces: Runs | None  # the pieces of a split sequence


def tables_for(
    cu_seqlens: Tensor | None, batch: int, num_tokens: int, device: torch.device, checkpoint_every: int, piece: int
) -> Tables:
    """piece: chunks per piece of a split sequence, a multiple of checkpoint_every, or 0.

    checkpoint_every: 0 where no backward pass follows, for half as many launches."""
    if cu_seqlens is None:
        return _dense_tables_for(batch, num_tokens, device, checkpoint_every, piece)
    if (shared := _SHARED.get(cu_seqlens)) is not None:
        kind = (num_tokens, checkpoint_every, piece)
        if kind not in shared:
            shared[kind] = _packed_tables(cu_seqlens, *kind)
        return shared[kind]
    # Inference tensors have no version, and host memory may change without the tensor knowing.
    is_kept = cu_seqlens.device.type == "cuda" and not cu_seqlens.is_inference()
    is_kept = is_kept and not torch.cuda.is_current_stream_capturing()
    key = (id(cu_seqlens), num_tokens, checkpoint_every, piece)
    if is_kept and key in _PACKED:
        owner, version, tables = _PACKED[key]
        if owner() is cu_seqlens and version == cu_seqlens._version:
            return tables
    tables = _packed_tables(cu_seqlens, num_tokens, checkpoint_every, piece)
    if is_kept:
        if len(_PACKED) >= 16:
            _PACKED.clear()
        _PACKED[key] = (weakref.ref(cu_seqlens), cu_seqlens._version, tables)
    return tables


def share_tables(cu_seqlens: Tensor) -> None:
    """Work out the tables of these borders once, whoever asks, for as long as this tensor lives.

    It must not change then. Also for what `tables_for` would not keep: an inference tensor, and borders in a CUDA
    graph. For the latter the tensor has to be made and dropped while the graph is recorded: the tables are filled when
    it is replayed, so nobody outside of it may find them.
    """
    if cu_seqlens not in _SHARED:
        _SHARED[cu_seqlens] = {}


def _packed_tables(cu_seqlens: Tensor, num_tokens: int, checkpoint_every: int, piece: int) -> Tables:
    # Borders are trusted to rise from 0 to T. If they do not, results are wrong, but nothing out of bounds is touched.
    borders = cu_seqlens.to(torch.int64).clamp(0, num_tokens).cummax(0).values
    return _tables(borders, num_tokens, checkpoint_every, piece)


_SHARED: WeakIdKeyDictionary = WeakIdKeyDictionary()  # Tensor -> {(num_tokens, checkpoint_every, piece): Tables}
# Every layer of a model asks for the tables of the same borders.
_PACKED: dict[tuple[int, int, int, int], tuple[weakref.ref[Tensor], int, Tables]] = {}


Key = tuple[int, int, torch.device, int, int]
_DENSE: dict[Key, Tables] = {}
_CAPTURED: dict[Key, Tables] = {}  # read by CUDA graphs, which may be replayed at any time: never dropped


def _dense_tables_for(*key: *Key) -> Tables:
    is_capturing = key[2].type == "cuda" and torch.cuda.is_current_stream_capturing()
    tables = _CAPTURED.get(key, _DENSE.get(key))
    if tables is None:
        tables = _dense_tables(*key)
        if is_capturing:  # filled when the graph is replayed: nobody else may read them
            return tables
        if len(_DENSE) >= 32:
            _DENSE.clear()
        _DENSE[key] = tables
    elif is_capturing:
        _CAPTURED[key] = tables
    return tables


@torch.inference_mode(False)  # a cached inference tensor could never be used in training
def _dense_tables(batch: int, num_tokens: int, device: torch.device, checkpoint_every: int, piece: int) -> Tables:
    borders = torch.arange(batch + 1, dtype=torch.int64, device=device) * num_tokens
    return _tables(borders, batch * num_tokens, checkpoint_every, piece, chunks_per_sequence=-(-num_tokens // CHUNK))


def _tables(
    borders: Tensor, num_tokens: int, checkpoint_every: int, piece: int, chunks_per_sequence: int | None = None
) -> Tables:
    num_sequences = borders.shape[0] - 1
    if chunks_per_sequence is None:
        max_chunks = num_tokens // CHUNK + num_sequences
    else:
        max_chunks = num_sequences * chunks_per_sequence
    lengths = borders.diff()
    counts = (lengths + CHUNK - 1) // CHUNK
    first_chunk = _offsets(counts)
    index, sequence, inside = _owners(first_chunk, max_chunks)
    start = borders[sequence] + (index - first_chunk[sequence]) * CHUNK
    length = torch.where(inside, (borders[sequence + 1] - start).clamp(max=CHUNK), 0)

    def runs(size: int, max_runs: int) -> Runs:
        num_runs = (counts + size - 1) // size
        first_run = _offsets(num_runs)
        index, sequence, inside = _owners(first_run, max_runs)
        local = (index - first_run[sequence]) * size
        first = torch.where(inside, first_chunk[sequence] + local, 0).int()
        slots = first
        if checkpoint_every:
            of_sequence = _offsets((counts + checkpoint_every - 1) // checkpoint_every)
            slots = (of_sequence[sequence] + local // checkpoint_every).int()
        return Runs(
            first_chunk=first,
            num_chunks=torch.where(inside, (counts[sequence] - local).clamp(max=size), 0).int(),
            first_checkpoint=slots,
            of_sequence=first_run.int(),
        )

    def bound(size: int) -> int:
        if chunks_per_sequence is not None:
            return num_sequences * -(-chunks_per_sequence // size)
        return max_chunks // size + num_sequences

    sequences = _whole(first_chunk, counts, checkpoint_every, max_chunks)
    return Tables(
        chunk_start=torch.where(inside, start, 0),
        chunk_length=length.int(),
        sequences=sequences,
        checkpoints=runs(checkpoint_every, bound(checkpoint_every)) if checkpoint_every else sequences,
        pieces=runs(piece, bound(piece)) if piece else None,
    )


def _whole(first_chunk: Tensor, counts: Tensor, checkpoint_every: int, max_chunks: int) -> Runs:
    each = torch.arange(counts.shape[0] + 1, dtype=torch.int32, device=counts.device)
    start = first_chunk[:-1].clamp(max=max(max_chunks - 1, 0))  # an empty sequence at the end has no chunk of its own
    slots = start
    if checkpoint_every:
        slots = _offsets((counts + checkpoint_every - 1) // checkpoint_every)[:-1]
    return Runs(start.int(), counts.int(), slots.int(), each)


def _offsets(counts: Tensor) -> Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def _owners(offsets: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """For the items 0 .. size - 1: their number, the group of `offsets` each belongs to, and whether it has one."""
    index = torch.arange(size, device=offsets.device)
    group = torch.searchsorted(offsets[1:], index, right=True).clamp(max=offsets.shape[0] - 2)
    return index, group, index < offsets[-1]
