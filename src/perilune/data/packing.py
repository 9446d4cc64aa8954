"""Rows of equal length cut from a shuffled stream of documents, addressed by number.

Epoch e is a permutation of the documents, decided by (seed, e) alone. The permuted documents laid end to end, epoch
after epoch, are one infinite stream s of tokens, cut into slices s[j*T .. j*T + T]: T inputs and, one further, T
targets. Neighbouring slices share one token, so every token is an input exactly once and a target exactly once; nothing
is dropped or padded, and the last slice of an epoch runs on into the next.

Row i is slice j = shuffle(i): slices are shuffled inside windows of about an epoch, so that the rows of one long
document do not come one after another and fill whole batches.

A target is masked (-100) where it belongs to another document than its input. Only the number of rows consumed is
state: how many ranks read which rows does not change the order.

    data = PackedDataset(stores.train, seq_len=512, seed=1)
    batch = data.batch(first_row=0, count=8)      # tokens [4096], targets [4096], cu_seqlens [N + 1]
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from perilune.data.store import TokenStore

__all__ = [
    "IGNORED",
    "PackedBatch",
    "PackedDataset",
    "Row",
    "ValidationSet",
    "mix64_each",
    "permutation",
    "valid_batches",
]

VERSION = 2  # part of the fingerprint: raise it when the same store gives other rows
IGNORED = -100
MAX_WINDOW = 1 << 20
"""Rows shuffled together at the most: a table of 8 MiB."""
_MASK = (1 << 64) - 1
_ROWS = 0x726F7773  # keeps the shuffle of rows apart from that of documents


@dataclass(frozen=True)
class Row:
    """tokens: int32 [T + 1]. starts: ascending offsets in [0, T] where a run of one document begins; the first is 0."""

    tokens: np.ndarray
    starts: np.ndarray


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """Rows laid end to end.

    tokens: int64 [count * T]. targets: int64 [count * T], IGNORED where the next token is another document's.
    cu_seqlens: int32 [N + 1], the borders of the N runs of one document; every row begins a run.
    num_targets, num_bytes: how many targets count, and the bytes of text they stand for (special tokens: none).
    Rows with pictures (vision_rows.py) also have pixels: uint8 [P, 3, 14, 14], the patches of all pictures in order;
    grids: (t, h, w) of each; media_positions: int64, where in `tokens` every <|media_pad|> is, in order.
    """

    tokens: np.ndarray
    targets: np.ndarray
    cu_seqlens: np.ndarray
    num_targets: int
    num_bytes: int
    pixels: np.ndarray | None = None
    grids: tuple[tuple[int, int, int], ...] = ()
    media_positions: np.ndarray | None = None


def permutation(count: int, *, seed: int, epoch: int) -> np.ndarray:
    """A permutation of range(count) from (seed, epoch): indices sorted by a 64-bit hash (splitmix64) of each.

    numpy's own shuffles may change between versions; this order is part of a checkpoint's meaning and must not.
    """
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is meant
        base = mix64_each(mix64_each(np.array([seed & _MASK], dtype=np.uint64)) + np.uint64(epoch))
        keys = mix64_each(base + np.arange(count, dtype=np.uint64))
    return np.argsort(keys, kind="stable")


def mix64_each(value: np.ndarray) -> np.ndarray:
    """A 64-bit hash (splitmix64) of every number of a uint64 array."""
    with np.errstate(over="ignore"):
        value = value + np.uint64(0x9E3779B97F4A7C15)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return value ^ (value >> np.uint64(31))


class PackedDataset:
    """The infinite stream of a store as rows; see the module's docstring."""

    def __init__(self, store: TokenStore, seq_len: int, seed: int) -> None:
        if seq_len < 1:
            raise ValueError(f"seq_len={seq_len!r} must be at least 1")
        if store.num_tokens == 0:
            raise ValueError("the token store has no documents: this split of the corpus is empty")
        self.store = store
        self.seq_len = seq_len
        self.seed = seed
        # Rows are mostly read in order: two epochs are enough at the seam between them.
        self._epoch = lru_cache(maxsize=2)(self._shuffle)
        self.window = min(MAX_WINDOW, max(1, store.num_tokens // seq_len))
        self._slices = lru_cache(maxsize=2)(self._shuffle_window)

    @property
    def fingerprint(self) -> str:
        """What must agree for a row number to mean the same rows: data, tokenizer, length, seed."""
        content = f"packing {VERSION} {self.store.fingerprint} seq_len={self.seq_len} seed={self.seed}"
        return hashlib.sha256(content.encode()).hexdigest()

    @property
    def rows_per_epoch(self) -> float:
        """Rows until every token was an input once; rarely a whole number."""
        return self.store.num_tokens / self.seq_len

    def row(self, index: int) -> Row:
        """Row `index` >= 0, a pure function of (store, seq_len, seed, index)."""
        if index < 0:
            raise IndexError(f"row {index} does not exist: rows count from 0")
        window, place = divmod(index, self.window)
        return self._read(int(self._slices(window)[place]) * self.seq_len, self.seq_len + 1)

    def batch(self, first_row: int, count: int) -> PackedBatch:
        """Rows first_row .. first_row + count - 1."""
        rows = [self.row(index) for index in range(first_row, first_row + count)]
        return _assemble(rows, self.store.bytes_per_token)

    def _shuffle(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """(order of the documents, where each begins in the epoch's stream, with the epoch's length at the end)."""
        order = permutation(self.store.num_documents, seed=self.seed, epoch=epoch)
        begins = np.zeros(len(order) + 1, dtype=np.int64)
        np.cumsum(np.diff(self.store.offsets)[order], out=begins[1:])
        return order, begins

    def _shuffle_window(self, window: int) -> np.ndarray:
        """The slices that the rows of a window stand for."""
        return window * self.window + permutation(self.window, seed=self.seed ^ _ROWS, epoch=window)

    def _read(self, position: int, length: int) -> Row:
        tokens = np.empty(length, dtype=np.int32)
        starts = []
        filled = 0
        while filled < length:
            epoch, offset = divmod(position + filled, self.store.num_tokens)
            order, begins = self._epoch(epoch)
            place = int(np.searchsorted(begins, offset, side="right")) - 1
            while filled < length and place < len(order):
                inside = offset - int(begins[place])
                source = int(self.store.offsets[order[place]]) + inside
                taken = min(length - filled, int(begins[place + 1]) - offset)
                tokens[filled : filled + taken] = self.store.tokens[source : source + taken]
                starts.append(filled)
                filled += taken
                offset += taken
                place += 1
        return Row(tokens, np.array(starts, dtype=np.int64))


class ValidationSet:
    """All documents of a store once, as padded rows: the same numbers whoever evaluates, in whatever batches.

    Documents come in the order of epoch 0 of a fixed seed, so that the first rows are a fair sample when an evaluation
    is limited to `max_rows`. Rows from `num_rows` on exist and are all padding with every target masked, so every rank
    can take batches of one shape. Over all rows, num_bytes adds up to the exact bytes of the validation texts.
    """

    def __init__(self, store: TokenStore, seq_len: int, *, max_rows: int | None = None) -> None:
        if max_rows is not None and max_rows < 1:
            raise ValueError(f"max_rows={max_rows!r} must be at least 1, or None for all rows")
        self._dataset = PackedDataset(store, seq_len, seed=0)
        # The last token is never an input with a target, hence the - 1.
        num_rows = max(1, -(-(store.num_tokens - 1) // seq_len))
        self.num_rows = num_rows if max_rows is None else min(num_rows, max_rows)

    @property
    def store(self) -> TokenStore:
        return self._dataset.store

    def batch(self, first_row: int, count: int) -> PackedBatch:
        store = self._dataset.store
        rows = [self._row(index) for index in range(first_row, first_row + count)]
        return _assemble(rows, store.bytes_per_token, pad_id=store.pad_id)

    def _row(self, index: int) -> Row:
        store, seq_len = self._dataset.store, self._dataset.seq_len
        left = min(seq_len + 1, store.num_tokens - index * seq_len) if index < self.num_rows else 0
        tokens = np.full(seq_len + 1, store.pad_id, dtype=np.int32)
        starts = np.zeros(0, dtype=np.int64)
        if left > 1:
            piece = self._dataset._read(index * seq_len, left)
            tokens[:left], starts = piece.tokens, piece.starts
        else:
            left = 0
        if left <= seq_len:  # padding is a run of its own
            starts = np.append(starts, left)
        return Row(tokens, starts)


def valid_batches(
    store: TokenStore, seq_len: int, rows_per_batch: int, *, max_rows: int | None = None
) -> Iterator[PackedBatch]:
    """The validation documents in batches of one shape; `max_rows` limits the evaluation to a fixed sample."""
    if rows_per_batch < 1:
        raise ValueError(f"rows_per_batch={rows_per_batch!r} must be at least 1")
    validation = ValidationSet(store, seq_len, max_rows=max_rows)
    for first_row in range(0, validation.num_rows, rows_per_batch):
        yield validation.batch(first_row, rows_per_batch)


def _assemble(rows: list[Row], bytes_per_token: np.ndarray, *, pad_id: int | None = None) -> PackedBatch:
    if not rows:
        raise ValueError("count=0: a batch has at least one row")
    stacked = np.stack([row.tokens for row in rows])
    seq_len = stacked.shape[1] - 1
    targets = stacked[:, 1:].astype(np.int64)
    for row, row_targets in zip(rows, targets, strict=True):
        row_targets[row.starts[row.starts > 0] - 1] = IGNORED
    if pad_id is not None:
        targets[targets == pad_id] = IGNORED
    borders = [row.starts[row.starts < seq_len] + n * seq_len for n, row in enumerate(rows)]
    counted = targets[targets != IGNORED]
    return PackedBatch(
        tokens=stacked[:, :-1].astype(np.int64).ravel(),
        targets=targets.ravel(),
        cu_seqlens=np.concatenate([*borders, [len(rows) * seq_len]]).astype(np.int32),
        num_targets=len(counted),
        num_bytes=int(bytes_per_token[counted].sum(dtype=np.int64)),
    )
