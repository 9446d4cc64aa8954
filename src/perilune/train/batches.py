"""From the data room to tensors: the tokenizer and token store of a run, and its micro-batches on the device.

Row i of a run is a function of (corpus, tokenizer, seq_len, seed, i) alone. Optimizer step s takes the rows
[s * global_batch_rows, (s + 1) * global_batch_rows) whatever the number of ranks: rank r of w takes the r-th of w equal
slices, cut into micro-batches. A probe (data/probes) takes the place of a corpus: its rows come from no text.
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
from perilune.data.probes import ProbeConfig, ProbeRows
from perilune.data.tokenizer import MIN_VOCAB_SIZE
from perilune.train import ranks


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    vocab_size: int = 4096
    """Size of the tokenizer trained on the corpus; the model's vocab_size must be at least this."""
    seq_len: int = 512
    cache_dir: str = ".cache/perilune"
    tokenizer: str | None = None
    """A tokenizer.json to use; None: one trained on the corpus."""
    probe: ProbeConfig | None = None
    """Generated rows of a task that asks for memory, in place of the corpus."""

    def __post_init__(self) -> None:
        if self.seq_len < 2:
            raise ValueError(f"data.seq_len is {self.seq_len!r}, expected at least 2 tokens")


@dataclass(frozen=True, kw_only=True, eq=False)
class RunData:
    corpus: CorpusSummary
    tokenizer: Tokenizer
    train: PackedDataset | ProbeRows
    valid: ValidationSet | ProbeRows | None
    """None when the corpus holds nothing out."""


def open_data(config: DataConfig, *, seed: int, progress: Progress | None = None) -> RunData:
    """Tokenizer and token store of the corpus, built on first use and cached by content."""
    if config.probe is not None:
        return _open_probe(config, config.probe, seed=seed)
    corpus = Corpus(config.corpus, progress=progress)
    if config.tokenizer is None:
        tokenizer = train_tokenizer(corpus, config.vocab_size, cache_dir=config.cache_dir, progress=progress)
    else:
        tokenizer = Tokenizer.load(config.tokenizer)
        if tokenizer.vocab_size != config.vocab_size:
            raise ValueError(
                f"data.tokenizer {config.tokenizer!r} has {tokenizer.vocab_size} tokens, but data.vocab_size is "
                f"{config.vocab_size!r}: make them equal"
            )
    stores = tokenize_corpus(corpus, tokenizer, cache_dir=config.cache_dir, progress=progress)
    return RunData(
        corpus=corpus.summary,
        tokenizer=tokenizer,
        train=PackedDataset(stores.train, config.seq_len, seed),
        valid=ValidationSet(stores.valid, config.seq_len) if stores.valid.num_tokens else None,
    )


def _open_probe(config: DataConfig, probe: ProbeConfig, *, seed: int) -> RunData:
    """A probe's numbers are no text: its tokenizer has learned nothing, and is there because every run has one."""
    shape = {"seq_len": config.seq_len, "vocab_size": config.vocab_size}
    train = ProbeRows(probe, **shape, seed=seed)
    return RunData(
        corpus=CorpusSummary(
            num_documents={"train": 0, "valid": 0}, num_bytes={"train": 0, "valid": 0}, fingerprint=train.fingerprint
        ),
        tokenizer=Tokenizer.train([], max(MIN_VOCAB_SIZE, config.vocab_size)),
        train=train,
        valid=ProbeRows(probe, **shape, seed=seed, held_out=True),
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
    rows_of: PackedDataset | ValidationSet | ProbeRows,
    *,
    first_row: int,
    rows: int,
    micro_batch_rows: int,
    device: torch.device,
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
