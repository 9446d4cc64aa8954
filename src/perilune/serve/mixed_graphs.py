"""Steps of decodes and prompt chunks as CUDA graphs: what graphs.py is for decodes alone.

A step with chunks is hundreds of launches, which take the host longer than the device takes to run them, up to some
thousands of tokens. Here such a step gets the shape of a bucket (model/padded_batch.py), and a bucket that is asked for
often becomes a graph:

    tokens of chunks T     64, 128, ... powers of two up to the most that a step may have; from 1,024 on halfway as well
    decodes D              0, 8, 64, 512, ... up to the most sequences
    chunks N               8, 64, 512, ... up to the most sequences
    keys of all chunks S   2,048 (or T), 16,384, up to MOST_JOINED_KEYS
    columns of the table   as in graphs.py, but at least 64

Only T is fine: what is padded elsewhere costs the device little, and every recording stops the server for some 0.1 s.
The usual ones are made before there are requests (`record_usual`); another is recorded when its bucket is asked for the
second time, since a shape that comes once is not worth it. At most MOST_RECORDINGS are kept, and the one unused for
longest goes. They share one pool of memory and one output: a step has to be over, in the order of the stream, before
the next begins.

What runs without a graph: steps whose chunks have more keys or tokens than that, see pictures or want all their rows
(the runner looks); models in which the host has to know lengths (`why_not`), which are those with latents in float32
and those with experts in anything but bfloat16; and new buckets after a recording did not fit into memory. With
`capture=False` every step runs padded, without a graph: what tests compare on a CPU.
"""

from __future__ import annotations

import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from perilune.kernels.attention.continued import takes_runs
from perilune.kernels.kda.slots import takes_slots
from perilune.kernels.recording import RECORDING
from perilune.model import Decoder
from perilune.model.mla import LatentAttention
from perilune.model.padded_batch import Bucket, padded_batch, padded_numbers
from perilune.model.paged import PagedBatch, PagedCache, StatePool
from perilune.model.paged_batch import MOST_JOINED_KEYS, Run
from perilune.serve.graphs import copy_numbers, copy_pages, recorded, width_of

FEWEST_TOKENS, FEWEST_DECODES, FEWEST_RUNS, FEWEST_KEYS = 64, 8, 8, 2048
NARROWEST = 64
GROWTH = 8
"""Of everything but tokens, from one bucket to the next."""
MANY_TOKENS = 1024
"""From here on padding costs the device more than another recording is worth."""
MOST_RECORDINGS = 96
PATIENCE = 2
"""How often a bucket is asked for before it is recorded."""


def growing(first: int, most: int, *, factor: int) -> tuple[int, ...]:
    """first, first * factor, ... and `most` in the end, or what follows it in multiples of `first`."""
    if most < 1:
        raise ValueError(f"most is {most!r}, expected at least 1")
    last = -(-most // first) * first
    sizes = [first]
    while sizes[-1] < last:
        sizes.append(min(factor * sizes[-1], last))
    return tuple(sizes)


def token_buckets(most: int) -> tuple[int, ...]:
    """Powers of two, and what lies halfway between large ones."""
    sizes = growing(FEWEST_TOKENS, most, factor=2)
    halfway = [(small + large) // 2 for small, large in pairwise(sizes) if small >= MANY_TOKENS]
    return tuple(sorted((*sizes, *halfway)))


def key_buckets(tokens: int) -> tuple[int, ...]:
    """Of steps with up to `tokens` tokens in chunks."""
    return growing(max(tokens, min(FEWEST_KEYS, MOST_JOINED_KEYS)), MOST_JOINED_KEYS, factor=GROWTH)


def why_not(model: Decoder, cache: PagedCache) -> str | None:
    """Why steps of this model with chunks cannot be recorded on the GPU it is on, or None."""
    some = torch.empty(0, dtype=model.compute_dtype, device=model.embed_tokens.weight.device)
    for layer, pool in zip(model.layers, cache.layers, strict=True):
        attention = layer.self_attn
        if isinstance(pool, StatePool) and not takes_slots(some, pool.conv, pool.state):
            return "the kernels for chunks of KDA layers do not take its states"
        if isinstance(attention, LatentAttention):
            queries = some.new_empty(0, attention.config.qk_head_dim)
            if not takes_runs(queries, attention.joined_value_width()):
                return f"attention to several chunks in one call takes no {some.dtype} of its widths"
        if layer.expert_index is not None and some.dtype != torch.bfloat16:
            return f"the product of grouped rows waits for their numbers in {some.dtype}"
    return None


@dataclass(eq=False)
class _Recording:
    """Buffers of one bucket, and the graph that reads them."""

    bucket: Bucket
    numbers: Tensor
    """[bucket.num_numbers] int32"""
    table: Tensor
    """[decodes, width] int32"""
    graph: torch.cuda.CUDAGraph | None = None


class MixedGraphs:
    """`step` turns a PagedBatch into one row of output per wanted row, by the same launches for the same shapes."""

    def __init__(
        self,
        step: Callable[[PagedBatch], Tensor],
        *,
        page_size: int,
        scratch_row: int,
        scratch_slot: int,
        max_sequences: int,
        max_tokens: int,
        has_latents: bool,
        device: torch.device,
        capture: bool = True,
        most_recordings: int = MOST_RECORDINGS,
    ) -> None:
        """max_tokens: of the chunks of one step. has_latents: some layer keeps them, so that chunks have keys."""
        self.token_buckets = token_buckets(min(max_tokens, MOST_JOINED_KEYS) if has_latents else max_tokens)
        self.decode_buckets = (0, *growing(FEWEST_DECODES, max_sequences, factor=GROWTH))
        self.run_buckets = growing(FEWEST_RUNS, max_sequences, factor=GROWTH)
        self._step, self._device, self._capture = step, device, capture
        self._scratch = {"page_size": page_size, "scratch_row": scratch_row, "scratch_slot": scratch_slot}
        self._has_latents = has_latents
        self._late_ids = torch.zeros(max_sequences, dtype=torch.long, device=device)
        self._recordings: OrderedDict[Bucket, _Recording] = OrderedDict()  # the first is given up first
        self._most_recordings = most_recordings
        self._asked: Counter[Bucket] = Counter()
        self._memory = torch.cuda.graph_pool_handle() if capture else None
        self._output: Tensor | None = None
        self._is_full = False

    def __len__(self) -> int:
        return len(self._recordings)

    def bucket(self, decodes: Sequence[Run], chunks: Sequence[Run], pages: Sequence[np.ndarray]) -> Bucket | None:
        """The smallest that holds this step, or None. `pages` are those of the decodes."""
        tokens = _fitting(sum(len(run.tokens) for run in chunks), self.token_buckets)
        runs = _fitting(len(chunks), self.run_buckets)
        most_decodes = _fitting(len(decodes), self.decode_buckets)
        if tokens is None or runs is None or most_decodes is None:
            return None
        keys, width = 0, 0
        if self._has_latents:
            needed = sum(run.start + len(run.tokens) for run in chunks)
            found = _fitting(needed, key_buckets(tokens))
            if needed > MOST_JOINED_KEYS or found is None:
                return None
            keys, width = found, max(width_of(max(map(len, pages))), NARROWEST) if pages else 0
        return Bucket(tokens=tokens, runs=runs, decodes=most_decodes, keys=keys, width=width)

    def record_usual(self) -> None:
        """Steps of any number of tokens with any number of decodes: few prompts, not far from their beginning."""
        for tokens in self.token_buckets:
            keys = key_buckets(tokens)[0] if self._has_latents else 0
            for decodes in self.decode_buckets:
                width = NARROWEST if decodes and self._has_latents else 0
                bucket = Bucket(tokens=tokens, runs=self.run_buckets[0], decodes=decodes, keys=keys, width=width)
                if len(self) < self._most_recordings:
                    self._asked[bucket] = PATIENCE
                    self._recording(bucket)

    def run(
        self,
        decodes: Sequence[Run],
        chunks: Sequence[Run],
        pages: Sequence[np.ndarray],
        *,
        wanted: Sequence[int],
        late_ids: Tensor | None = None,
    ) -> Tensor | None:
        """The wanted rows in order, until the next step; None where the step has to run without a graph.

        pages: [M] int32 of every decode. wanted: rows of the decodes and the tokens of the chunks, one behind the
        other, at most one for each of the sequences.
        """
        bucket = self.bucket(decodes, chunks, pages)
        recording = None if bucket is None else self._recording(bucket)
        if recording is None:
            return None
        numbers = padded_numbers(recording.bucket, decodes, chunks, wanted=wanted, **self._scratch)
        copy_numbers(numbers, recording.numbers)
        if recording.bucket.width:
            copy_pages(pages, recording.table)
        if late_ids is not None:
            self._late_ids[: len(late_ids)].copy_(late_ids)
        if recording.graph is None:
            return self._padded(recording)[: len(wanted)]
        recording.graph.replay()
        assert self._output is not None
        return self._output[: len(wanted)]

    def _recording(self, bucket: Bucket) -> _Recording | None:
        """That of the bucket, if it is worth one and there is room."""
        if bucket in self._recordings:
            self._recordings.move_to_end(bucket)
            return self._recordings[bucket]
        self._asked[bucket] += 1
        if self._capture and (self._is_full or self._asked[bucket] < PATIENCE):
            return None
        if len(self._recordings) >= self._most_recordings:
            with RECORDING:  # neither may happen while another engine records: it would break both
                if self._capture:
                    torch.cuda.synchronize(self._device)  # the oldest may still be running
                oldest = next(iter(self._recordings))
                del self._recordings[oldest]
            self._asked[oldest] = 0
        recording = self._new(bucket)
        try:
            self._record(recording)
        except RuntimeError as error:
            self._is_full = True
            warnings.warn(
                f"no step of {bucket.tokens} tokens could be recorded ({error}): new shapes of steps run without CUDA "
                "graphs from now on, which is slower; where memory is short, lower memory_gib or token_budget",
                stacklevel=2,
            )
            return None
        self._recordings[bucket] = recording
        return recording

    def _new(self, bucket: Bucket) -> _Recording:
        """Of padding alone."""
        return _Recording(
            bucket=bucket,
            numbers=torch.from_numpy(padded_numbers(bucket, **self._scratch)).to(self._device),
            table=torch.zeros(bucket.decodes, bucket.width, dtype=torch.int32, device=self._device),
        )

    def _record(self, recording: _Recording) -> None:
        if not self._capture:
            return
        if self._output is None:
            rows = self._padded(recording)
            most = self.decode_buckets[-1] + self.run_buckets[-1]
            self._output = torch.empty(most, rows.shape[1], dtype=rows.dtype, device=rows.device)
        output = self._output

        def step() -> Tensor:
            return output[: recording.bucket.num_wanted].copy_(self._padded(recording))

        recording.graph, _ = recorded(step, device=self._device, memory=self._memory)

    def _padded(self, recording: _Recording) -> Tensor:
        return self._step(padded_batch(recording.bucket, recording.numbers, recording.table, self._late_ids))


def _fitting(count: int, sizes: Sequence[int]) -> int | None:
    """The smallest that is no less than `count`."""
    return next((size for size in sizes if size >= count), None)
