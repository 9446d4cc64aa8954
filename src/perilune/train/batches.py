"""From the data room to tensors: the tokenizer and token store of a run, and its micro-batches on the device.

Row i of a run is a function of (corpus, tokenizer, seq_len, seed, i) alone. Optimizer step s takes the rows
[s * global_batch_rows, (s + 1) * global_batch_rows) whatever the number of ranks: part r of w takes the r-th of w
slices, cut into micro-batches. A probe (data/probes) takes the place of a corpus: its rows come from no text.

With pictures (data/vision_rows.py) some rows of a run hold them, by its fusion schedule. A micro-batch is of one kind,
text or vision, so that the two losses are two numbers. Rows of each kind are cut into parts by themselves, and every
part has as many micro-batches of a kind as the longest: ranks of sharded data parallel gather every layer together, so
each has to run what any of them runs. Where rows are lacking, the first row of the step comes again as a filler, with
no target: it adds nothing to loss or gradients, and its attention logits are seen by the rank that has it as a row.

Dialogues (data/chat_rows.py) take the place of a corpus as well. Which of their rows hold pictures follows from the
files, and rows of the two kinds are cut apart in the same way.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from perilune.data import (
    Corpus,
    CorpusConfig,
    CorpusSummary,
    Fusion,
    PackedBatch,
    PackedDataset,
    Progress,
    Tokenizer,
    ValidationSet,
    VisionDataConfig,
    VisionRows,
    tokenize_corpus,
    train_tokenizer,
)
from perilune.data.chat_rows import ChatDataConfig, ChatRows
from perilune.data.packing import IGNORED
from perilune.data.probes import ProbeConfig, ProbeRows
from perilune.data.svg_guard import check_parser
from perilune.data.tokenizer import MIN_VOCAB_SIZE, Digits
from perilune.data.vision_documents import dialect, dialect_fingerprint
from perilune.model import Decoder, MediaInput
from perilune.model.moe import Router
from perilune.train.ranks import Part


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    vocab_size: int = 4096
    """Size of the tokenizer trained on the corpus; the model's vocab_size must be at least this."""
    digits: Digits = 3
    """That a token of this tokenizer holds at most. One by one, small models copy and add numbers sooner: groups of
    three are a thousand tokens, each to be learnt by itself."""
    seq_len: int = 512
    cache_dir: str = ".cache/perilune"
    tokenizer: str | None = None
    """A tokenizer.json to use; None: one trained on the corpus."""
    probe: ProbeConfig | None = None
    """Generated rows of a task that asks for memory, in place of the corpus."""
    vision: VisionDataConfig | None = None
    """Pictures beside the corpus; the model needs a vision tower (model.vision)."""
    chat: ChatDataConfig | None = None
    """Dialogues in place of the corpus: such a run is fine-tuned to chat, and served as a chat model."""

    def __post_init__(self) -> None:
        if self.chat is not None and (self.probe is not None or self.vision is not None):
            other = "probe" if self.probe is not None else "vision"
            raise ValueError(
                f"data.chat and data.{other} are both set: dialogues bring their own; leave one of them out"
            )
        if self.vision is not None and self.probe is not None:
            raise ValueError("data.probe and data.vision are both set: a probe has no pictures; leave one of them out")
        if self.seq_len < 2:
            raise ValueError(f"data.seq_len is {self.seq_len!r}, expected at least 2 tokens")

    @property
    def has_pictures(self) -> bool:
        return self.vision is not None and self.vision.fusion.share > 0


@dataclass(frozen=True, kw_only=True, eq=False)
class RunData:
    corpus: CorpusSummary
    tokenizer: Tokenizer
    train: PackedDataset | ProbeRows | ChatRows
    valid: ValidationSet | ProbeRows | ChatRows | None
    """None when the corpus holds nothing out."""
    vision: VisionRows | None = None
    """Rows with pictures, made while they are needed."""
    vision_valid: VisionRows | None = None

    def close(self) -> None:
        """End what works ahead; reading on starts it again."""
        if self.vision is not None:
            self.vision.close()


def open_data(config: DataConfig, *, seed: int, progress: Progress | None = None) -> RunData:
    """Tokenizer and token store of the corpus, built on first use and cached by content."""
    if config.probe is not None:
        return _open_probe(config, config.probe, seed=seed)
    if config.chat is not None:
        return _open_chat(config, config.chat, seed=seed)
    corpus = Corpus(config.corpus, progress=progress)
    tokenizer = open_tokenizer(config, corpus, progress=progress)
    stores = tokenize_corpus(corpus, tokenizer, cache_dir=config.cache_dir, progress=progress)
    vision, vision_valid = None, None
    if config.vision is not None and config.has_pictures:
        vision = VisionRows(config.vision, tokenizer, seq_len=config.seq_len, seed=seed)
        vision_valid = VisionRows(config.vision, tokenizer, seq_len=config.seq_len, seed=seed, held_out=True)
        vision_valid.row(0)  # what cannot be made is refused now, and here, where the reason is plain
        if config.vision.samples:
            check_parser()  # for what the run draws after its last step
    return RunData(
        corpus=corpus.summary,
        tokenizer=tokenizer,
        train=PackedDataset(stores.train, config.seq_len, seed),
        valid=ValidationSet(stores.valid, config.seq_len) if stores.valid.num_tokens else None,
        vision=vision,
        vision_valid=vision_valid,
    )


def open_tokenizer(config: DataConfig, corpus: Corpus, *, progress: Progress | None = None) -> Tokenizer:
    """The tokenizer that the config names, or one trained on the corpus (and on answers about pictures) and cached."""
    if config.tokenizer is not None:
        return _named_tokenizer(config, config.tokenizer)
    vision = config.vision
    return train_tokenizer(
        corpus,
        config.vocab_size,
        cache_dir=config.cache_dir,
        digits=config.digits,
        progress=progress,
        more_texts=None if vision is None else lambda: dialect(vision),
        more_fingerprint="" if vision is None else dialect_fingerprint(vision),
    )


def _named_tokenizer(config: DataConfig, path: str) -> Tokenizer:
    tokenizer = Tokenizer.load(path)
    if tokenizer.vocab_size != config.vocab_size:
        raise ValueError(
            f"data.tokenizer {path!r} has {tokenizer.vocab_size} tokens, but data.vocab_size is "
            f"{config.vocab_size!r}: make them equal"
        )
    return tokenizer


def _open_chat(config: DataConfig, chat: ChatDataConfig, *, seed: int) -> RunData:
    """Dialogues in the tokens of the model that is fine-tuned: another vocabulary would mean other words to it."""
    if config.tokenizer is None:
        raise ValueError("data.chat is set but data.tokenizer is None: name the tokenizer.json of the model")
    if not chat.sources:
        raise ValueError("data.chat.sources is empty: name files of dialogues (--data FILE...), or a --recipe")
    tokenizer = _named_tokenizer(config, config.tokenizer)
    train = ChatRows(chat, tokenizer, seq_len=config.seq_len, seed=seed, cache_dir=config.cache_dir)
    valid = train.other_side()  # tokens of all dialogues take a while: once is enough
    return RunData(
        corpus=CorpusSummary(
            num_documents={"train": train.num_dialogues, "valid": valid.num_dialogues},
            num_bytes={"train": 0, "valid": 0},
            fingerprint=train.fingerprint,
        ),
        tokenizer=tokenizer,
        train=train,
        valid=valid if valid.num_dialogues else None,
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
    media: MediaInput | None = None
    """The pictures of a batch of vision rows; None: a batch of text rows."""
    filler: bool = False
    """Runs only because other ranks have one batch more; nothing in it counts."""


ValidRows = ValidationSet | ProbeRows | VisionRows | ChatRows
Rows = PackedDataset | ValidRows
ALL = Part()


def fused_micro_batches(
    data: RunData,
    fusion: Fusion | None,
    *,
    first_row: int,
    rows: int,
    micro_batch_rows: int,
    device: torch.device,
    part: Part = ALL,
) -> Iterator[MicroBatch]:
    """A part of the rows [first_row, first_row + rows) of a run: its text, then its pictures."""
    for packed in fused_packed(
        data, fusion, first_row=first_row, rows=rows, micro_batch_rows=micro_batch_rows, part=part
    ):
        yield packed.on(device)


def fused_packed(
    data: RunData, fusion: Fusion | None, *, first_row: int, rows: int, micro_batch_rows: int, part: Part = ALL
) -> Iterator["Packed"]:
    """`fused_micro_batches` before they go to the device: what any thread may do."""
    if fusion is None or data.vision is None:
        yield from _cut(data.train, first_row, first_row + rows, micro_batch_rows, part)
        return
    # Rows of one kind have consecutive numbers of their own.
    for source, before in ((data.train, fusion.text_before), (data.vision, fusion.vision_before)):
        yield from _cut(source, before(first_row), before(first_row + rows), micro_batch_rows, part)


def micro_batches(
    rows_of: Rows, *, first_row: int, rows: int, micro_batch_rows: int, device: torch.device, part: Part = ALL
) -> Iterator[MicroBatch]:
    """A part of the rows [first_row, first_row + rows), `micro_batch_rows` at a time."""
    for packed in _cut(rows_of, first_row, first_row + rows, micro_batch_rows, part):
        yield packed.on(device)


@dataclass(frozen=True, kw_only=True, eq=False)
class Packed:
    """A micro-batch on the host."""

    rows: PackedBatch
    filler: bool = False

    def on(self, device: torch.device) -> MicroBatch:
        return _on_device(self.rows, device, filler=self.filler)


def _cut(rows_of: Rows, start: int, stop: int, micro_batch_rows: int, part: Part) -> Iterator[Packed]:
    if isinstance(rows_of, ChatRows):
        yield from _cut_dialogues(rows_of, start, stop, micro_batch_rows, part)
        return
    for first, count in _places(start, stop, micro_batch_rows, part):
        if count > 0:
            yield Packed(rows=rows_of.batch(first, count))
        else:
            yield Packed(rows=without_targets(rows_of.batch(start, 1)), filler=True)


def _cut_dialogues(rows_of: ChatRows, start: int, stop: int, micro_batch_rows: int, part: Part) -> Iterator[Packed]:
    """Rows without pictures, then those with them: ranks meet in the vision tower, or none of them goes there."""
    kinds: tuple[list[int], list[int]] = ([], [])
    for index in range(start, stop):
        kinds[rows_of.has_pictures(index)].append(index)
    for indices in kinds:
        for first, count in _places(0, len(indices), micro_batch_rows, part):
            if count > 0:
                yield Packed(rows=rows_of.batch_of(indices[first : first + count]))
            else:
                yield Packed(rows=without_targets(rows_of.batch_of(indices[:1])), filler=True)


def _places(start: int, stop: int, micro_batch_rows: int, part: Part) -> Iterator[tuple[int, int]]:
    """First row and number of rows of a part's micro-batches; none are left for those that only other parts have."""
    begin, end = part.of(start, stop)
    for first in range(begin, begin + part.largest(start, stop), micro_batch_rows):
        yield first, min(micro_batch_rows, end - first)


def without_targets(batch: PackedBatch) -> PackedBatch:
    return replace(batch, targets=np.full_like(batch.targets, IGNORED), num_targets=0, num_bytes=0)


@contextmanager
def uncounted(model: Decoder, filler: bool) -> Iterator[None]:
    """Routers do not count the tokens of a filler."""
    routers = [module for module in model.modules() if isinstance(module, Router)] if filler else []
    before = [router.counts.clone() for router in routers]
    yield
    for router, counts in zip(routers, before, strict=True):
        router.counts.copy_(counts)


def _on_device(batch: PackedBatch, device: torch.device, *, filler: bool = False) -> MicroBatch:
    return MicroBatch(
        tokens_BT=_to_device(batch.tokens, device)[None],
        targets_BT=_to_device(batch.targets, device)[None],
        cu_seqlens=_to_device(batch.cu_seqlens, device),
        num_targets=batch.num_targets,
        num_bytes=batch.num_bytes,
        media=_media(batch, device),
        filler=filler,
    )


def _media(batch: PackedBatch, device: torch.device) -> MediaInput | None:
    if batch.pixels is None or batch.media_positions is None or not batch.grids:
        return None
    return MediaInput(
        positions=_to_device(batch.media_positions, device),
        pixels=_to_device(batch.pixels, device),
        grids=batch.grids,
    )


def _to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
