"""The numbers of a run: metrics.jsonl, and the clock and memory readings that go into it.

metrics.jsonl is the record the report reads and the only one that takes part in exact resume: a checkpoint stores its
length in bytes, and resuming cuts off what was written after. One JSON object a line:

    {"kind": "train", "step", "loss", "bits_per_byte", "lr", "grad_norm", "tokens", "tokens_per_s", "max_logit", ...}
    {"kind": "valid", "step", "loss", "bits_per_byte"}      {"kind": "sample", "step", "prompt", "text"}

`max_logit` holds the largest attention logit of every softmax layer; where it is only known not to be larger than the
number, which is all QK-Clip needs below its limit, `max_logit_is_bound` [layers] is there and says true.
`step` counts finished optimizer steps. Fields in TIMING_FIELDS depend on the machine and its mood; all others are a
function of config and seed.
"""

import json
import math
import os
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

TIMING_FIELDS = frozenset({"tokens_per_s", "seconds", "peak_memory_bytes"})

Record = Mapping[str, Any]


class JsonLines:
    """Append-only JSONL file that knows its length and can be cut back to an earlier one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("ab")

    def append(self, record: Record) -> None:
        self._file.write(json.dumps(_without_non_finite(record), allow_nan=False).encode() + b"\n")
        self._file.flush()

    def position(self) -> int:
        """The length in bytes. What was appended is with the system then, and not yet on the disk."""
        self._file.flush()
        return os.fstat(self._file.fileno()).st_size

    def cut_to(self, position: int) -> None:
        """Forget what was appended after `position`; a shorter file stays as it is."""
        if self.position() > position:
            self._file.truncate(position)

    def read(self) -> list[dict[str, Any]]:
        self._file.flush()
        return [json.loads(line) for line in self.path.read_bytes().splitlines()]

    def close(self) -> None:
        self._file.close()


def _without_non_finite(value: Any) -> Any:
    """NaN and infinities as null: JSON has no word for them, and browsers refuse what Python writes."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _without_non_finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_without_non_finite(entry) for entry in value]
    return value


class Throughput:
    """Tokens a second over the last `window` log intervals, without the pauses for validation and checkpoints."""

    def __init__(self, window: int = 8, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._marks: deque[tuple[float, int]] = deque(maxlen=window + 1)
        self._paused = 0.0

    def mark(self, tokens_so_far: int) -> float:
        """The rate between the oldest mark remembered and now; 0.0 for the first."""
        self._marks.append((self._clock() - self._paused, tokens_so_far))
        (start, before), (end, after) = self._marks[0], self._marks[-1]
        return (after - before) / (end - start) if end > start else 0.0

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Time spent inside does not count."""
        began = self._clock()
        yield
        self._paused += self._clock() - began


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory in use so far: of the GPU's allocator, or else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # ru_maxrss is in kilobytes on Linux and in bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
