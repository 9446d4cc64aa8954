"""Sampling of a batch of rows that are alike as one CUDA graph: forty small kernels take the host longer to launch than
the device to run.

Rows are alike that are drawn in the same way (all greedy, or weighed with cuts that see as many weights: the one group
of `Arranged`), from logits that nothing but the bans of the sampler changes, with log-probs of the drawn tokens alone.
Logits and settings are copied into buffers that stay where they are, filled up to the next bucket (a power of two), and
ids, problems and log-probs come back as one block of float64, in which all of them are exact.

With `capture=False` the same padded draw runs without a graph: what tests compare on a CPU.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from perilune.model.sampling import GREEDY, Arranged, draw_alike, to_device
from perilune.serve.graphs import recorded

MOST_ELEMENTS = 1 << 23
"""Of logits: a graph keeps several tensors as large, in float64."""
NEUTRAL = np.array([1.0, 0.0, 1.0, 0.0, 0.0])
"""Settings of a padding row."""
IDS, PROBLEM_CODES, LOGPROBS = range(3)


@dataclass(eq=False)
class _Recording:
    logits: Tensor
    """[bucket, vocabulary]"""
    columns: Tensor
    """[5, bucket] float64, as in Arranged"""
    width: int
    graph: torch.cuda.CUDAGraph | None = None
    output: Tensor | None = None


class SampleGraphs:
    def __init__(self, banned_V: Tensor | None, nothing: Tensor, *, device: torch.device, capture: bool = True) -> None:
        """`banned_V` tokens have the logit `nothing`."""
        self._banned_V, self._nothing = banned_V, nothing
        self._device, self._capture = device, capture
        self._recordings: dict[tuple[int, int, torch.dtype], _Recording | None] = {}
        """None where there was no memory for it."""
        self._memory = torch.cuda.graph_pool_handle() if capture else None

    def run(self, logits_NV: Tensor, arranged: Arranged) -> Tensor | None:
        """[3, N] float64 on the device: IDS, PROBLEM_CODES, LOGPROBS. None where rows are not alike, or too many."""
        count, vocab_size = logits_NV.shape
        width = _width(arranged, count)
        bucket = 1 << (count - 1).bit_length()
        if width is None or bucket * vocab_size > MOST_ELEMENTS:
            return None
        key = bucket, width, logits_NV.dtype
        if key not in self._recordings:
            self._recordings[key] = self._record(bucket, vocab_size, width, logits_NV.dtype)
        recording = self._recordings[key]
        if recording is None:
            return None
        recording.logits[:count].copy_(logits_NV)
        recording.columns[:, :count].copy_(to_device(arranged.columns, self._device), non_blocking=True)
        if recording.graph is None:
            return self._sampled(recording)[:, :count]
        recording.graph.replay()
        assert recording.output is not None
        return recording.output[:, :count].clone()

    def _sampled(self, recording: _Recording) -> Tensor:
        logits_NV = recording.logits
        allowed_NV = logits_NV if self._banned_V is None else torch.where(self._banned_V, self._nothing, logits_NV)
        ids_N, problems_N = draw_alike(allowed_NV, recording.columns, recording.width)
        logprobs_N = logits_NV.gather(-1, ids_N[:, None])[:, 0] - logits_NV.logsumexp(-1)
        return torch.stack([ids_N.double(), problems_N.double(), logprobs_N.double()])

    def _record(self, bucket: int, vocab_size: int, width: int, dtype: torch.dtype) -> _Recording | None:
        if not self._capture and self._memory is not None:  # it failed before
            return None
        try:
            recording = _Recording(
                logits=torch.zeros(bucket, vocab_size, dtype=dtype, device=self._device),
                columns=torch.from_numpy(NEUTRAL).to(self._device)[:, None].repeat(1, bucket),
                width=width,
            )
            if self._capture:
                recording.graph, recording.output = recorded(
                    lambda: self._sampled(recording), device=self._device, memory=self._memory
                )
        except RuntimeError as error:  # of memory too
            self._capture = False
            warnings.warn(f"new shapes are sampled without CUDA graphs from now on: {error}", stacklevel=2)
            return None
        return recording


def _width(arranged: Arranged, count: int) -> int | None:
    """Of the one group that all rows are in; None: there are several."""
    if not arranged.groups:
        return GREEDY
    width, members = arranged.groups[0]
    return width if len(members) == count else None
