"""From the data room to tensors: the tokenizer and token store of a run, and its micro-batches on the device.

Row i of a run is a function of (corpus, tokenizer, seq_len, seed, i) alone. Optimizer step s takes the rows
[s * global_batch_rows, (s + 1) * global_batch_rows) whatever the number of ranks: rank r of w takes the r-th of w equal
slices, cut into micro-batches.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from perilune.data import (
    Corpus,
    CorpusConfig,
    CorpusSummary,
    PackedDataset,
    Progress,
    Tokenizer,
    ValidationSet,
    tokenize_corpus,
    train_tokenizer,
)
from perilune.train import ranks


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    vocab_size: int = 4096
    """Size of the tokenizer trained on the corpus; the model's vocab_size must be at least this."""
    seq_len: int = 512
    cache_dir: str = ".cache/perilune"

    def __post_init__(self) -> None:
        if self.seq_len < 2:
            raise ValueError(f"data.seq_len is {self.seq_len!r}, expected at least 2 tokens")


@dataclass(frozen=True, kw_only=True, eq=False)
class RunData:
    corpus: CorpusSummary
    tokenizer: Tokenizer
    train: PackedDataset
    valid: ValidationSet | None
    """None when the corpus holds nothing out."""


def open_data(config: DataConfig, *, seed: int, progress: Progress | None = None) -> RunData:
    """Tokenizer and token store of the corpus, built on first use and cached by content."""
    corpus = Corpus(config.corpus, progress=progress)
    tokenizer = train_tokenizer(corpus, config.vocab_size, cache_dir=config.cache_dir, progress=progress)
    stores = tokenize_corpus(corpus, tokenizer, cache_dir=config.cache_dir, progress=progress)
    return RunData(
        corpus=corpus.summary,
        tokenizer=tokenizer,
        train=PackedDataset(stores.train, config.seq_len, seed),
        valid=ValidationSet(stores.valid, config.seq_len) if stores.valid.num_tokens else None,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """Packed rows on the device; counts stay on the host, so that using them waits for nothing."""

    tokens_BT: torch.Tensor
    targets_BT: torch.Tensor
    cu_seqlens: torch.Tensor
    num_targets: int
    num_bytes: int


def micro_batches(
    rows_of: PackedDataset | ValidationSet, *, first_row: int, rows: int, micro_batch_rows: int, device: torch.device
) -> Iterator[MicroBatch]:
    """This rank's share of the rows [first_row, first_row + rows), `micro_batch_rows` at a time."""
    share = rows // ranks.world_size()
    start = first_row + ranks.rank() * share
    for offset in range(0, share, micro_batch_rows):
        batch = rows_of.batch(start + offset, min(micro_batch_rows, share - offset))
        yield MicroBatch(
            tokens_BT=_to_device(batch.tokens, device)[None],
            targets_BT=_to_device(batch.targets, device)[None],
            cu_seqlens=_to_device(batch.cu_seqlens, device),
            num_targets=batch.num_targets,
            num_bytes=batch.num_bytes,
        )


def _to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
