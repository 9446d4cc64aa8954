"""Extending the context of a trained run: the same model and data in longer rows, for a tenth of its steps.

    config = extend(read_config(folder), folder, length=32_768)

What follows from the run that is extended:
- tokens in a batch stay the same: rows get fewer as they get longer;
- the learning rate rises over 5% of the steps to LR_SHARE of the run's own and falls linearly to 0: a choice, not a
  measured optimum. Weights are those of the run, the optimizer starts anew;
- layers without positions (Kimi Delta Attention, NoPE) need nothing. Rotary positions are extended by YaRN with
  factor = length / length it was trained at (arXiv 2309.00071);
- the tokenizer is the run's own, and documents are joined up to the new length where the corpus says which are held
  out, since rows of short documents teach nothing about distance.
"""

from dataclasses import replace
from pathlib import Path

from perilune.data import CorpusConfig
from perilune.model import ModelConfig, RopeConfig
from perilune.train import RunConfig, ScheduleConfig
from perilune.train.run_folder import TOKENIZER

LR_SHARE = 0.3
CHARACTERS_PER_TOKEN = 4


def extend(source: RunConfig, folder: str | Path, *, length: int, steps: int | None = None) -> RunConfig:
    """The run that continues the one in `folder`, whose config is `source`, in rows of `length` tokens."""
    trained = source.data.seq_len
    if length <= trained:
        raise ValueError(f"length is {length!r}, expected more than the {trained} tokens it was trained at")
    if source.data.probe is not None:
        raise ValueError(f"{source.name!r} was trained on a probe, whose rows end where they end: nothing to extend")
    batch_tokens = source.trainer.global_batch_rows * trained
    micro_tokens = source.trainer.micro_batch_rows * trained
    steps = max(10, source.trainer.steps // 10) if steps is None else steps
    rows = max(1, batch_tokens // length)
    optimizer = source.optimizer
    adam_lr = None if optimizer.adam_lr is None else LR_SHARE * optimizer.adam_lr
    return replace(
        source,
        name=f"{source.name}-{length}",
        start_from=str(folder),
        model=extended_model(source.model, trained=trained, length=length),
        data=replace(
            source.data, seq_len=length, tokenizer=str(Path(folder) / TOKENIZER), corpus=_long_documents(source, length)
        ),
        optimizer=replace(optimizer, lr=LR_SHARE * optimizer.lr, adam_lr=adam_lr),
        schedule=ScheduleConfig(
            kind="wsd", warmup_steps=max(1, round(0.05 * steps)), decay_fraction=1.0, decay_shape="linear"
        ),
        trainer=replace(
            source.trainer,
            steps=steps,
            global_batch_rows=rows,
            micro_batch_rows=min(rows, max(1, micro_tokens // length)),
            eval_rows=max(1, source.trainer.eval_rows * trained // length),
            eval_every=max(1, steps // 4),
            checkpoint_every=0,
        ),
    )


def extended_model(model: ModelConfig, *, trained: int, length: int) -> ModelConfig:
    """The same weights; rotary positions reach `length`."""
    rope = model.mla.rope
    if rope is None or "mla" not in model.layer_pattern():
        return model
    return replace(model, mla=replace(model.mla, rope=extended_rope(rope, trained=trained, length=length)))


def extended_rope(rope: RopeConfig, *, trained: int, length: int) -> RopeConfig:
    """YaRN from the length that plain RoPE was trained at; one that is extended already keeps that length."""
    original = trained if rope.factor == 1.0 else rope.original_max_position_embeddings
    return replace(rope, factor=max(1.0, length / original), original_max_position_embeddings=original)


def _long_documents(source: RunConfig, length: int) -> CorpusConfig:
    corpus = source.data.corpus
    characters = CHARACTERS_PER_TOKEN * length
    if corpus.split_field is None:
        return corpus
    return replace(corpus, max_characters=max(corpus.max_characters, characters), join_characters=characters)
