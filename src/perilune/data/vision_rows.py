"""Rows of documents with pictures, addressed by number like those of a corpus.

Documents are packed in groups of GROUP_ROWS rows: the exercises of a group are laid one after another, one that does
not fit the rest of a row begins the next row, and what is left of a row is padding, a run of its own with no target.
Exercises too long for any row are skipped and counted. A group is a pure function of (config, tokenizer, seq_len, seed,
number of the group), so any row can be made at any time, in any process: groups are made ahead (rows_ahead.py).

    rows = VisionRows(VisionDataConfig(), tokenizer, seq_len=256, seed=0)
    batch = rows.batch(first_row=0, count=4)        # a PackedBatch with pixels, grids and media_positions
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from perilune.data.media import Media, merge_media
from perilune.data.packing import IGNORED, PackedBatch
from perilune.data.rows_ahead import Ahead
from perilune.data.scenes import VERSION as SCENES_VERSION
from perilune.data.scenes import icon_pool, page_pool
from perilune.data.tokenizer import Tokenizer
from perilune.data.vision_documents import Exercise, VisionDataConfig, VisionDocument, document, exercise

VERSION = 1  # part of the fingerprint: raise it when the same number gives another row
GROUP_ROWS = 16
MAX_SKIPPED = 200
"""Exercises in a row that are too long before the row length itself is called wrong."""
_EXERCISES_PER_GROUP = 1 << 24
_HELD_OUT = 0x76697364  # keeps the numbers of held-out exercises apart from those trained on


class VisionRowsError(ValueError):
    """Pictures that cannot be laid into rows of this length."""


@dataclass(frozen=True, kw_only=True, eq=False)
class VisionRow:
    """tokens, targets: int32 [T]. starts: where documents (and the padding) begin. media: the pictures, in order."""

    tokens: np.ndarray
    targets: np.ndarray
    starts: np.ndarray
    media: tuple[Media, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    rows: tuple[VisionRow, ...]
    num_documents: int
    num_skipped: int


class VisionRows:
    """Rows without end. `held_out` rows come from the held-out part of the scenes, and count from 0 as well."""

    rows_per_epoch = float("inf")
    num_rows = 1 << 40

    def __init__(
        self, config: VisionDataConfig, tokenizer: Tokenizer, *, seq_len: int, seed: int, held_out: bool = False
    ) -> None:
        if seq_len < 8:
            raise VisionRowsError(f"seq_len={seq_len!r} is too short for a picture and its answer, expected 8 or more")
        self.config = config
        self.tokenizer = tokenizer
        self.seq_len = seq_len
        self.seed = seed
        self.held_out = held_out
        self.num_documents = 0
        self.num_skipped = 0
        """Of the groups made so far."""
        # Held-out rows are the same few at every validation, and made here: they are worth keeping, not a process.
        self._ahead = Ahead(GroupMaker.of(self), num_workers=0 if held_out else config.workers)
        self._group = lru_cache(maxsize=8 if held_out else 2)(self._next_group)

    @property
    def fingerprint(self) -> str:
        """What must agree for a row number to mean the same row."""
        config = self.config
        content = f"vision rows {VERSION} {SCENES_VERSION} {config.scenes!r} {config.tasks!r} {config.train_prompt}"
        shape = f"{self.tokenizer.fingerprint} {self.seq_len} {self.seed} {self.held_out}"
        # A file of icons or pages may change under its name; without them nothing comes from outside. The name of a
        # file of pages is not in the repr of the scenes: rows without one are those of runs that knew no such files.
        icons = f" {icon_pool(config.scenes)!r}" if "icon" in config.scenes.kinds else ""
        pages = f" {page_pool(config.scenes).digest}" if config.scenes.pages else ""
        return hashlib.sha256(f"{content} {shape}{icons}{pages}".encode()).hexdigest()

    def row(self, index: int) -> VisionRow:
        if index < 0:
            raise IndexError(f"row {index} does not exist: rows count from 0")
        number, place = divmod(index, GROUP_ROWS)
        return self._group(number).rows[place]

    def batch(self, first_row: int, count: int) -> PackedBatch:
        """Rows first_row .. first_row + count - 1."""
        rows = [self.row(index) for index in range(first_row, first_row + count)]
        return assemble(rows, self.tokenizer)

    def examples(self, count: int, *, task: str | None = None) -> list[Exercise]:
        """The first `count` exercises (of one task, where given) that rows of this kind are made of."""
        found: list[Exercise] = []
        for number in range(_EXERCISES_PER_GROUP):
            if len(found) == count:
                break
            each = exercise(self.config, self._numbered_seed, number, held_out=self.held_out)
            if each is not None and task in (None, each.task):
                found.append(each)
            elif number > 1000 * (len(found) + 1):
                break  # a task that these scenes hardly ever have
        return found

    @property
    def _numbered_seed(self) -> int:
        return self.seed ^ _HELD_OUT if self.held_out else self.seed

    def _next_group(self, number: int) -> Group:
        group = self._ahead.get(number)
        self.num_documents += group.num_documents
        self.num_skipped += group.num_skipped
        return group

    def close(self) -> None:
        """End the processes that work ahead."""
        self._ahead.close()


@dataclass(frozen=True, kw_only=True)
class GroupMaker:
    """Groups by number; what a worker process is given."""

    config: VisionDataConfig
    tokenizer_json: str
    seq_len: int
    seed: int
    held_out: bool

    @classmethod
    def of(cls, rows: VisionRows) -> "GroupMaker":
        return cls(
            config=rows.config,
            tokenizer_json=rows.tokenizer.to_json(),
            seq_len=rows.seq_len,
            seed=rows._numbered_seed,
            held_out=rows.held_out,
        )

    def __call__(self, number: int) -> Group:
        tokenizer = _tokenizer(self.tokenizer_json)
        packed: list[list[VisionDocument]] = [[]]
        used, num_documents, num_skipped, in_a_row = 0, 0, 0, 0
        next_exercise = number * _EXERCISES_PER_GROUP
        while True:
            each = exercise(self.config, self.seed, next_exercise, held_out=self.held_out)
            next_exercise += 1
            made = None if each is None else document(tokenizer, each, train_prompt=self.config.train_prompt)
            # The last token is a target only, so a document takes one place less than it has tokens.
            if made is None or len(made.tokens) - 1 > self.seq_len:
                num_skipped += 1
                in_a_row += 1
                if in_a_row == MAX_SKIPPED:
                    raise VisionRowsError(self._nothing_fits(None if made is None else len(made.tokens)))
                continue
            in_a_row = 0
            if used + len(made.tokens) - 1 > self.seq_len:
                if len(packed) == GROUP_ROWS:
                    break
                packed.append([])
                used = 0
            packed[-1].append(made)
            used += len(made.tokens) - 1
            num_documents += 1
        rows = tuple(lay_row(documents, self.seq_len, tokenizer.pad_id) for documents in packed)
        return Group(rows=rows, num_documents=num_documents, num_skipped=num_skipped)

    def _nothing_fits(self, length: int | None) -> str:
        if length is None:
            return (
                f"none of {MAX_SKIPPED} samples can be asked any of data.vision.tasks={self.config.tasks!r}: choose "
                "tasks that the kinds of data.vision.scenes have"
            )
        return (
            f"{MAX_SKIPPED} documents with pictures in a row do not fit rows of data.seq_len={self.seq_len} tokens "
            f"(the last has {length}): make rows longer or scenes smaller"
        )


@lru_cache(maxsize=4)
def _tokenizer(content: str) -> Tokenizer:
    return Tokenizer.from_json(content)


def lay_row(documents: Sequence[VisionDocument], seq_len: int, pad_id: int) -> VisionRow:
    """Documents one after another, then padding. They have to fit: each takes one place less than it has tokens."""
    tokens = np.full(seq_len, pad_id, dtype=np.int32)
    targets = np.full(seq_len, IGNORED, dtype=np.int32)
    starts, at = [], 0
    for each in documents:
        length = len(each.tokens) - 1
        tokens[at : at + length] = each.tokens[:-1]
        targets[at : at + length] = np.where(each.predicted[1:], each.tokens[1:], IGNORED)
        starts.append(at)
        at += length
    if at < seq_len:
        starts.append(at)
    media = tuple(item for each in documents for item in each.media)
    return VisionRow(tokens=tokens, targets=targets, starts=np.array(starts, dtype=np.int64), media=media)


def assemble(rows: Sequence[VisionRow], tokenizer: Tokenizer) -> PackedBatch:
    """Rows of equal length as one batch, with the patches of their pictures."""
    if not rows:
        raise ValueError("count=0: a batch has at least one row")
    seq_len = len(rows[0].tokens)
    tokens = np.concatenate([row.tokens for row in rows]).astype(np.int64)
    targets = np.concatenate([row.targets for row in rows]).astype(np.int64)
    borders: list[Any] = [row.starts + n * seq_len for n, row in enumerate(rows)]
    counted = targets[targets != IGNORED]
    media = merge_media([item for row in rows for item in row.media])
    return PackedBatch(
        tokens=tokens,
        targets=targets,
        cu_seqlens=np.concatenate([*borders, [len(tokens)]]).astype(np.int32),
        num_targets=len(counted),
        num_bytes=int(tokenizer.bytes_per_token[counted].sum(dtype=np.int64)),
        pixels=media.pixels,
        grids=media.grids,
        media_positions=np.flatnonzero(tokens == tokenizer.special_ids["<|media_pad|>"]).astype(np.int64),
    )
