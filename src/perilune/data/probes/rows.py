"""Rows of a probe, addressed by number like those of a corpus; see the package's docstring."""

import hashlib
import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from perilune.data.packing import IGNORED, PackedBatch
from perilune.data.probes import mqar, palindrome, stack
from perilune.data.probes.draws import Draws
from perilune.data.store import TokenStore

VERSION = 1  # part of the fingerprint: raise it when the same number gives another row
Task = Literal["mqar", "palindrome", "stack"]
TASKS: tuple[Task, ...] = get_args(Task)
_VALID = 0x76616C6964  # keeps held-out rows apart from those trained on


@dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    task: Task = "mqar"
    num_pairs: int | None = None
    """mqar: keys to remember. None: one for every 16 tokens of the row."""
    num_stacks: int = 64
    """stack: how many there are."""

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ValueError(f"probe.task is {self.task!r}, expected one of {', '.join(TASKS)}")
        for name in ("num_pairs", "num_stacks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"probe.{name} is {value!r}, expected 1 or more")


class ProbeRows:
    """Rows without end. `held_out` rows are others than all that are trained on with the same seed."""

    def __init__(
        self, config: ProbeConfig, *, seq_len: int, vocab_size: int, seed: int, held_out: bool = False
    ) -> None:
        if seq_len < 4:
            raise ValueError(f"seq_len={seq_len!r} is too short for a probe, expected 4 or more")
        if vocab_size < 8:
            raise ValueError(f"vocab_size={vocab_size!r} is too small for a probe, expected 8 or more")
        self.config = config
        self.seq_len = seq_len
        self.vocab_size = vocab_size
        self.seed = seed ^ _VALID if held_out else seed
        self.generate(np.zeros(1, dtype=np.int64))  # what cannot be generated is refused now

    rows_per_epoch = math.inf
    num_rows = 1 << 40

    @property
    def store(self) -> TokenStore:
        """What of it is stored: nothing."""
        table = np.ones(self.vocab_size, dtype=np.int32)
        return TokenStore.from_documents([], bytes_per_token=table, bos_id=0, eos_id=0, pad_id=0)

    @property
    def fingerprint(self) -> str:
        content = f"probe {VERSION} {self.config!r} {self.seq_len} {self.vocab_size} {self.seed}"
        return hashlib.sha256(content.encode()).hexdigest()

    def generate(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """tokens int64 [N, seq_len + 1] and answers bool [N, seq_len] of the rows with these numbers."""
        draws, shape = Draws(self.seed, rows), {"seq_len": self.seq_len, "vocab_size": self.vocab_size}
        if self.config.task == "mqar":
            return mqar.generate(draws, **shape, num_pairs=self.config.num_pairs)
        if self.config.task == "palindrome":
            return palindrome.generate(draws, **shape)
        return stack.generate(draws, **shape, num_stacks=self.config.num_stacks)

    def batch(self, first_row: int, count: int) -> PackedBatch:
        """Rows first_row .. first_row + count - 1. An answer counts as one byte: bits per byte are bits per answer."""
        if first_row < 0:
            raise IndexError(f"row {first_row} does not exist: rows count from 0")
        if count < 1:
            raise ValueError(f"count={count!r}: a batch has at least one row")
        tokens, answers = self.generate(np.arange(first_row, first_row + count, dtype=np.int64))
        num_answers = int(answers.sum())
        return PackedBatch(
            tokens=tokens[:, :-1].ravel(),
            targets=np.where(answers, tokens[:, 1:], IGNORED).ravel(),
            cu_seqlens=np.arange(0, count * self.seq_len + 1, self.seq_len, dtype=np.int32),
            num_targets=num_answers,
            num_bytes=num_answers,
        )
