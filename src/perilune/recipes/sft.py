"""Supervised fine-tuning: a trained run, or a model folder, learns to answer in Kimi's chat format.

    config = sft(folder, sources=("chats.jsonl",))

What follows from the model that is fine-tuned:
- weights, tokenizer and budgets of pictures are its own; the optimizer starts anew;
- the learning rate rises over 10 steps to a tenth of the run's own (FOLDER_LR for a folder, which has none), ten times
  that with adapters, and falls linearly to 0: choices, not measured optima;
- rows have at least ROW_TOKENS tokens, as dialogues are not cut; tokens in a batch stay the same.

RECIPES are dialogues that need no file: zero-vision fine-tuning and its control arms (data/picture_dialogues.py).
"""

from dataclasses import replace
from pathlib import Path

from perilune import hub
from perilune.data.chat_rows import ChatDataConfig
from perilune.data.images import ProcessorConfig
from perilune.data.media import PATCH_SIZE
from perilune.data.picture_dialogues import KINDS, Kind, write_dialogues
from perilune.hub.opened import open_tokenizer, read_processor
from perilune.model.lora import LoraConfig
from perilune.train import RunConfig, RunError, ScheduleConfig
from perilune.train.run_folder import TOKENIZER, read_config

RECIPES = KINDS
LR_SHARE = 0.1
FOLDER_LR = 2e-5
LORA_LR_FACTOR = 10.0
"""What adapters want above the weights themselves, in practice about ten times."""
ROW_TOKENS = 1024
FOLDER_BATCH_TOKENS = 32_768
NO_LORA = LoraConfig()


def sft(folder: str | Path, *, sources: tuple[str, ...], lora: LoraConfig = NO_LORA) -> RunConfig:
    """The run that fine-tunes the model in `folder` on the dialogues of `sources`."""
    folder = Path(folder)
    source = read_config(folder)
    if source.data.probe is not None:
        raise RunError(f"{source.name!r} was trained on a probe, whose tokens are no text: it cannot learn to chat")
    is_folder = hub.is_model_folder(folder)
    trained = source.data.seq_len
    length = ROW_TOKENS if is_folder else max(trained, ROW_TOKENS)
    batch_tokens = FOLDER_BATCH_TOKENS if is_folder else source.trainer.global_batch_rows * trained
    micro_tokens = length if is_folder else source.trainer.micro_batch_rows * trained
    rows = max(1, batch_tokens // length)
    optimizer = source.optimizer
    faster = LORA_LR_FACTOR if lora.rank else 1.0
    lr = faster * (FOLDER_LR if is_folder else _base_lr(source))
    adam_lr = None if is_folder or optimizer.adam_lr is None else lr * optimizer.adam_lr / optimizer.lr
    return replace(
        source,
        name=f"{source.name}-sft",
        start_from=str(folder),
        lora=lora,
        data=replace(
            source.data,
            vocab_size=open_tokenizer(folder).vocab_size,
            tokenizer=str(folder / TOKENIZER),
            seq_len=length,
            vision=None,
            chat=ChatDataConfig(sources=sources, processor=processor_of(source, folder)),
        ),
        optimizer=replace(optimizer, lr=lr, adam_lr=adam_lr),
        schedule=ScheduleConfig(kind="wsd", warmup_steps=10, decay_fraction=1.0, decay_shape="linear"),
        trainer=replace(
            source.trainer,
            global_batch_rows=rows,
            micro_batch_rows=min(rows, max(1, micro_tokens // length)),
            eval_rows=32,
            eval_every=25,
            sample_prompts=(),
        ),
    )


def _base_lr(source: RunConfig) -> float:
    """A tenth of that of the pre-training; a run that was fine-tuned has taken its tenth already."""
    if source.data.chat is None:
        return LR_SHARE * source.optimizer.lr
    return source.optimizer.lr / (LORA_LR_FACTOR if source.lora.rank else 1.0)


def processor_of(source: RunConfig, folder: Path) -> ProcessorConfig:
    """Budgets of pictures: those of the folder, or of the largest picture the run was trained on."""
    if hub.is_model_folder(folder):
        return read_processor(folder)
    if source.data.chat is not None:
        return source.data.chat.processor
    if source.data.vision is None:
        return ProcessorConfig()
    most = max(width * height for width, height in source.data.vision.scenes.sizes) // PATCH_SIZE**2
    return ProcessorConfig(max_patches=most, max_patches_per_frame=most)


def recipe_sources(name: str, *, cache_dir: str | Path, count: int, seed: int) -> tuple[str, ...]:
    """The file with the dialogues of a recipe, written on first use."""
    kind: Kind | None = next((kind for kind in KINDS if kind == name.replace("-", "_")), None)
    if kind is None:
        raise RunError(f"unknown recipe {name!r} of dialogues: known are {', '.join(KINDS)}")
    return (str(write_dialogues(kind, Path(cache_dir) / "dialogues", count=count, seed=seed)),)
