"""Rows of dialogues for supervised fine-tuning, addressed by number like those of a corpus.

Epoch e is a permutation of the dialogues, decided by (seed, e) alone. They are laid into rows one after another; one
that does not fit the rest of a row begins the next, and what is left of a row is padding, a run of its own without a
target. Documents never touch: each is a run for attention, states and positions. A dialogue longer than a row, or one
whose pictures or videos cannot be read, is left out and counted by its reason.

    rows = ChatRows(ChatDataConfig(sources=("chats.jsonl",)), tokenizer, seq_len=1024, seed=0)
    batch = rows.batch(first_row=0, count=4)
"""

import hashlib
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np

from perilune.data.chat_messages import ChatError
from perilune.data.dialogue_store import Documents, stored_documents
from perilune.data.dialogues import Dialogue, DialogueError, UnusableMedia, document_of, read_dialogues
from perilune.data.images import ProcessorConfig
from perilune.data.packing import PackedBatch, permutation
from perilune.data.tokenizer import Tokenizer
from perilune.data.vision_documents import VisionDocument
from perilune.data.vision_rows import VisionRow, assemble, lay_row

VERSION = 1  # part of the fingerprint: raise it when the same number gives another row


@dataclass(frozen=True, kw_only=True)
class ChatDataConfig:
    sources: tuple[str, ...] = ()
    """Files of JSON lines (also .zst), see data/dialogues.py."""
    valid_fraction: float = 0.02
    """Share of the dialogues held out, by the hash of their content."""
    processor: ProcessorConfig = field(default_factory=ProcessorConfig)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sources", tuple(self.sources))  # JSON has no tuples
        if not 0 <= self.valid_fraction < 1:
            raise ValueError(f"chat.valid_fraction is {self.valid_fraction!r}, expected at least 0 and below 1")


@dataclass(frozen=True, kw_only=True, eq=False)
class _Kept:
    """A dialogue that fits, with its tokens; pictures are decoded again when a row needs them."""

    dialogue: Dialogue
    document: VisionDocument
    has_pictures: bool

    @property
    def places(self) -> int:
        # The last token is a target only.
        return len(self.document.tokens) - 1


class ChatRows:
    """Rows without end, epoch after epoch; `held_out` ones come from the dialogues that are not trained on."""

    def __init__(
        self,
        config: ChatDataConfig,
        tokenizer: Tokenizer,
        *,
        seq_len: int,
        seed: int,
        held_out: bool = False,
        cache_dir: str | Path | None = None,
    ) -> None:
        """With `cache_dir` tokens are made once, and read from there afterwards."""
        self.config = config
        self.tokenizer = tokenizer
        self.seq_len = seq_len
        self.seed = seed
        dialogues, self.broken = read_dialogues(config.sources)
        documents = stored_documents(
            dialogues,
            f"{seq_len} {config.valid_fraction!r} {config.processor!r}",
            sources=config.sources,
            tokenizer=tokenizer,
            cache_dir=cache_dir,
            make=lambda: _that_fit(dialogues, config, tokenizer, seq_len),
        )
        for problem in documents.left_out:
            self.broken.add(*problem)
        sides = _sides(dialogues, documents)
        self._kept, self._others = sides[held_out], sides[not held_out]
        if not self._kept and not held_out:
            raise DialogueError(
                f"none of {len(dialogues)} dialogues can be trained on in rows of {seq_len} tokens: {self.broken}"
            )
        self._begin()

    def _begin(self) -> None:
        self._epoch = lru_cache(maxsize=2)(self._lay)
        self._begins = [0]
        """First row of each epoch laid so far."""

    def other_side(self) -> "ChatRows":
        """Rows of the dialogues that these leave to validation, or the other way round; nothing is read again."""
        other = copy(self)
        other._kept, other._others = self._others, self._kept
        other._begin()
        return other

    @property
    def num_dialogues(self) -> int:
        return len(self._kept)

    @property
    def num_rows(self) -> int:
        """Of the first epoch: what a validation reads."""
        return len(self._epoch(0)) if self._kept else 0

    @property
    def rows_per_epoch(self) -> float:
        return float(self.num_rows)

    @property
    def fingerprint(self) -> str:
        """What must agree for a row number to mean the same row."""
        digest = hashlib.sha256(f"chat rows {VERSION} {self.tokenizer.fingerprint} {self.seq_len} {self.seed}".encode())
        for kept in self._kept:
            digest.update(kept.document.tokens.tobytes() + kept.document.predicted.tobytes())
        return digest.hexdigest()

    @property
    def num_with_pictures(self) -> int:
        """Dialogues that hold pictures."""
        return sum(kept.has_pictures for kept in self._kept)

    def row(self, index: int) -> VisionRow:
        documents = [self._whole(self._kept[number]) for number in self._chosen(index)]
        return lay_row(documents, self.seq_len, self.tokenizer.pad_id)

    def has_pictures(self, index: int) -> bool:
        """Whether a row holds pictures; reads none of them."""
        return any(self._kept[number].has_pictures for number in self._chosen(index))

    def batch(self, first_row: int, count: int) -> PackedBatch:
        """Rows first_row .. first_row + count - 1."""
        return self.batch_of(range(first_row, first_row + count))

    def batch_of(self, indices: Sequence[int]) -> PackedBatch:
        return assemble([self.row(index) for index in indices], self.tokenizer)

    def _chosen(self, index: int) -> list[int]:
        """Numbers of the dialogues in a row."""
        if index < 0:
            raise IndexError(f"row {index} does not exist: rows count from 0")
        epoch = 0
        while True:
            if epoch + 1 == len(self._begins):
                self._begins.append(self._begins[epoch] + len(self._epoch(epoch)))
            if index < self._begins[epoch + 1]:
                break
            epoch += 1
        return self._epoch(epoch)[index - self._begins[epoch]]

    def _lay(self, epoch: int) -> list[list[int]]:
        """Numbers of the dialogues in each row of an epoch."""
        rows: list[list[int]] = []
        room = 0
        for number in permutation(len(self._kept), seed=self.seed, epoch=epoch).tolist():
            places = self._kept[number].places
            if not rows or places > room:
                rows.append([])
                room = self.seq_len
            rows[-1].append(number)
            room -= places
        return rows

    def _whole(self, kept: _Kept) -> VisionDocument:
        if not kept.has_pictures:
            return kept.document
        return document_of(kept.dialogue, self.tokenizer, self.config.processor)


def _that_fit(dialogues: Sequence[Dialogue], config: ChatDataConfig, tokenizer: Tokenizer, seq_len: int) -> Documents:
    """The tokens of those that can be trained on, and why the others cannot."""
    found = Documents()
    for number, dialogue in enumerate(dialogues):
        where = f"dialogue {number}"
        try:
            document = document_of(dialogue, tokenizer, config.processor)
        except UnusableMedia as error:
            found.left_out.append((f"unusable: {error.reason}", where, str(error)))
            continue
        except ChatError as error:
            found.left_out.append(("unusable", where, str(error)))
            continue
        if len(document.tokens) - 1 > seq_len:
            found.left_out.append(("too long", where, f"{len(document.tokens)} tokens, rows have {seq_len}"))
        elif not document.predicted[1:].any():
            found.left_out.append(("nothing to learn", where, "no token of it is an assistant's"))
        else:
            held_out = is_held_out(document, config.valid_fraction)
            found.add(number, document.tokens, document.predicted, held_out=held_out)
    return found


def _sides(dialogues: Sequence[Dialogue], documents: Documents) -> tuple[list[_Kept], list[_Kept]]:
    """Those that are trained on, and those held out."""
    sides: tuple[list[_Kept], list[_Kept]] = [], []
    for at, number in enumerate(documents.numbers):
        without = VisionDocument(tokens=documents.tokens[at], predicted=documents.predicted[at], media=())
        dialogue = dialogues[number]
        kept = _Kept(dialogue=dialogue, document=without, has_pictures=dialogue.has_pictures)
        sides[documents.held_out[at]].append(kept)
    return sides


def is_held_out(document: VisionDocument, fraction: float) -> bool:
    """By the hash of its tokens: the same dialogue is on the same side in every file."""
    digest = hashlib.sha256(np.ascontiguousarray(document.tokens, dtype="<i4").tobytes()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64
