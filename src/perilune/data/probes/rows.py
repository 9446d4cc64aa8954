"""Rows of a probe, addressed by number like those of a corpus; see the package's docstring.

With `short_first` the first rows that are trained on hold short problems: row by row the same length in tokens, cut
into documents. A problem's length doubles from 16 tokens or a little more to half a row, in equal shares of these rows:

    a row of 256 tokens    16 x 16   8 x 32   4 x 64   2 x 128   then 1 x 256, as without

Two layers of softmax attention find recall late, and earlier after short problems. Why is not measured; a likely reason
is that a head that looks at the token before is of no use until another matches what it wrote, and the other way round,
while in a short problem even a look at everything before is mostly one at the token before.
"""

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
SHORTEST = 16
"""Tokens of the shortest problem that `short_first` begins with."""
OPERATIONS_PER_STACK = 4
"""In a short problem, about."""
_VALID = 0x76616C6964  # keeps held-out rows apart from those trained on
_SHORT = 0x73686F7274  # and short problems apart from rows


@dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    task: Task = "mqar"
    num_pairs: int | None = None
    """mqar: keys to remember. None: one for every 16 tokens of the row."""
    num_stacks: int = 64
    """stack: how many there are."""
    short_first: int = 0
    """Rows, from the first, that hold short problems; none of those held out does."""

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ValueError(f"probe.task is {self.task!r}, expected one of {', '.join(TASKS)}")
        for name in ("num_pairs", "num_stacks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"probe.{name} is {value!r}, expected 1 or more")
        if self.short_first < 0:
            raise ValueError(f"probe.short_first is {self.short_first!r}, expected 0 (none) or more rows")


class ProbeRows:
    """Rows without end. `held_out` rows are others than all that are trained on with the same seed."""

    def __init__(
        self, config: ProbeConfig, *, seq_len: int, vocab_size: int, seed: int, held_out: bool = False
    ) -> None:
        if seq_len < 4:
            raise ValueError(f"seq_len={seq_len!r} is too short for a probe, expected 4 or more")
        if vocab_size < 8:
            raise ValueError(f"vocab_size={vocab_size!r} is too small for a probe, expected 8 or more")
        if config.short_first and not short_lengths(seq_len):
            raise ValueError(
                f"probe.short_first is {config.short_first!r}, but rows of seq_len={seq_len!r} are too short to be "
                f"cut: expected {2 * SHORTEST} tokens or more, or short_first=0"
            )
        self.config = config
        self.num_short = 0 if held_out else config.short_first
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
        """tokens int64 [N, seq_len + 1] and answers bool [N, seq_len] of whole rows with these numbers."""
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
        rows = np.arange(first_row, first_row + count, dtype=np.int64)
        length = self.problem_lengths(rows)
        tokens = np.zeros((count, self.seq_len), dtype=np.int64)
        targets = np.full((count, self.seq_len), IGNORED, dtype=np.int64)
        starts = np.zeros((count, self.seq_len), dtype=bool)
        for each in np.unique(length):
            here = length == each
            problems = self.seq_len // each
            text, answers = self.generate(rows[here]) if problems == 1 else self._short(rows[here], int(each))
            shape, used = (int(here.sum()), -1), problems * each  # what is left over belongs to the last problem
            tokens[here, :used] = text[:, :-1].reshape(shape)
            targets[here, :used] = np.where(answers, text[:, 1:], IGNORED).reshape(shape)
            starts[here, :used:each] = True
        num_answers = int((targets != IGNORED).sum())
        return PackedBatch(
            tokens=tokens.ravel(),
            targets=targets.ravel(),
            cu_seqlens=np.append(np.flatnonzero(starts), starts.size).astype(np.int32),
            num_targets=num_answers,
            num_bytes=num_answers,
        )

    def problem_lengths(self, rows: np.ndarray) -> np.ndarray:
        """int64 [N]: tokens of a problem in the rows with these numbers."""
        whole = np.full(len(rows), self.seq_len, dtype=np.int64)
        if not self.num_short:
            return whole
        lengths = np.array(short_lengths(self.seq_len), dtype=np.int64)
        part = np.minimum(rows, self.num_short - 1) * len(lengths) // self.num_short
        return np.where(rows < self.num_short, lengths[part], whole)

    def _short(self, rows: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """All problems of these rows one after the other: tokens [P, length + 1] and answers [P, length].

        As dense as they can be: without noise, and with so few stacks that much of what is pushed is popped.
        """
        problems = self.seq_len // length
        numbers = (rows[:, None] * problems + np.arange(problems)).ravel()
        draws = Draws(self.seed ^ _SHORT ^ length << 40, numbers)
        shape = {"seq_len": length, "vocab_size": self.vocab_size}
        if self.config.task == "mqar":
            pairs = self.config.num_pairs or max(1, self.seq_len // mqar.TOKENS_PER_PAIR)
            return mqar.generate(draws, **shape, num_pairs=min(pairs, length // 4))
        if self.config.task == "palindrome":
            return palindrome.generate(draws, **shape)
        used = min(self.config.num_stacks, max(1, length // (3 * OPERATIONS_PER_STACK)))
        return stack.generate(draws, **shape, num_stacks=self.config.num_stacks, num_used=used)


def short_lengths(seq_len: int) -> list[int]:
    """Of the problems before whole rows of `seq_len` tokens, ascending: halves of halves, none below SHORTEST."""
    halvings = max(0, (seq_len // SHORTEST).bit_length() - 1)
    return [seq_len >> times for times in range(halvings, 0, -1)]
