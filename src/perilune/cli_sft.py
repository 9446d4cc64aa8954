"""`perilune sft RUN|FOLDER --data FILE...`: fine-tune a model on dialogues. The run it leaves is a chat model."""

import math
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perilune.cli import (
    UserError,
    _early_flags,
    _goes_on,
    _parse_run,
    _positional,
    _print_json,
    _resumed_place,
    _run_folder,
    _summary_line,
    _with_set,
)

if TYPE_CHECKING:
    from perilune.model.lora import LoraConfig
    from perilune.train import RunConfig
    from perilune.train.batches import RunData

EXAMPLE = "perilune sft nano --data chats.jsonl"


@dataclass(kw_only=True)
class SftFlags:
    data: tuple[str, ...] = ()
    """Files of dialogues: JSON lines with messages in the OpenAI form, also .zst."""
    recipe: str | None = None
    """Generated dialogues in place of files: zero_vision, text_image or none, its control."""
    dialogues: int = 2000
    """How many a recipe makes."""
    epochs: float = 2.0
    """Passes over the dialogues; --trainer.steps says it in steps instead."""
    adapters: str | None = None
    """Folder to write adapters to, apart from the model, in the files of the PEFT library; needs --lora.rank."""
    resume: bool = False
    """Continue the fine-tuning of this name from its last checkpoint."""
    overwrite: bool = False
    """Replace the run of this name."""
    runs: str = "runs"
    """Folder that holds runs."""
    set: tuple[str, ...] = ()
    """Fields by path with a JSON value, for what has no flag."""
    json: bool = False
    """Print the summary as JSON."""
    quiet: bool = False
    """No progress bar and no lines in between."""


def sft_verb(arguments: list[str]) -> None:
    """Fine-tune a run or a model folder on dialogues; every field of the run is a flag."""
    name, rest = _positional(arguments, "RUN|FOLDER", "a run's name, or a folder of `perilune import`", EXAMPLE)
    early = _early_flags(SftFlags, rest)
    from perilune.train import RunConfig, train

    folder = _run_folder(name, early.runs)
    own_name, runs = _resumed_place(folder) if early.resume else ("", early.runs)
    default = replace(_resumed(folder), name=own_name) if early.resume else _new(folder, early, rest)
    flags, config = _parse_run(
        f"perilune sft {name}",
        "Fine-tune a run or a model folder on dialogues: JSON lines with messages in the OpenAI form. Only what the "
        "assistant says is learnt. Every field of the run is a flag.\n\n"
        f"example: perilune sft {name} --data chats.jsonl --lora.rank 16\n\n"
        f"example: perilune sft {name} --recipe zero_vision --dialogues 5000",
        SftFlags,
        RunConfig,
        _with_set(default, early.set),
        rest,
    )
    _check(flags, config, folder)
    config, data = _opened(config, flags, steps_given=early.resume or _gives_steps(rest, early))
    summary = train(
        config,
        runs_folder=runs,
        resume=flags.resume or _goes_on(Path(runs) / config.name, overwrite=flags.overwrite),
        overwrite=flags.overwrite,
        quiet=flags.quiet or flags.json,
        data=data,
    )
    if not summary:
        return  # one of many ranks: the first one speaks
    summary |= _dialogue_counts(data)
    if flags.adapters is not None:
        summary["adapters"] = _write_adapters(Path(runs) / config.name, flags.adapters)
    if flags.json:
        _print_json(summary)
        return
    print(f"\n{_summary_line(summary)}")
    shown = config.name if Path(runs) == Path("runs") else Path(runs) / config.name
    print(f"talk to it: perilune chat {shown}")


def _new(folder: Path, flags: SftFlags, arguments: list[str]) -> "RunConfig":
    """The fine-tuning of the model in `folder`."""
    from perilune.recipes.sft import recipe_sources, sft
    from perilune.train.run_folder import read_config

    asks_for_help = any(argument in ("-h", "--help") for argument in arguments)
    if flags.data and flags.recipe is not None:
        raise UserError("--data and --recipe both say what to train on: give one of them")
    if flags.recipe is not None and not asks_for_help:
        place = _value_of(arguments, "--data.cache-dir") or read_config(folder).data.cache_dir
        seed = _early_seed(arguments)
        sources = recipe_sources(flags.recipe, cache_dir=place, count=flags.dialogues, seed=seed)
    else:
        sources = tuple(flags.data)
        absent = [path for path in sources if not Path(path).is_file()]
        if absent and not asks_for_help:
            raise UserError(f"--data {absent[0]!r} is not a file: expected JSON lines of dialogues")
    if not (flags.quiet or flags.json or asks_for_help):
        _mention_template(folder)
    return sft(folder, sources=sources, lora=_early_lora(arguments))


def _mention_template(folder: Path) -> None:
    from perilune import hub
    from perilune.hub.opened import read_template

    if hub.is_model_folder(folder) and read_template(folder) is not None and os.environ.get("RANK", "0") == "0":
        note = "brings a chat template of its own; dialogues are written in Kimi's format, and so it is to be asked"
        print(f"perilune: {str(folder)!r} {note}", file=sys.stderr)


def _resumed(folder: Path) -> "RunConfig":
    from perilune.train.run_folder import read_config

    config = read_config(folder)
    if config.data.chat is None:
        raise UserError(f"{str(folder)!r} is not a fine-tuning, so it cannot be resumed: start one with --data FILE")
    return config


def _check(flags: SftFlags, config: "RunConfig", folder: Path) -> None:
    if config.data.chat is None or not config.data.chat.sources:
        raise UserError(f"nothing to train on: give --data FILE... or --recipe zero_vision (example: {EXAMPLE})")
    if not 0 < flags.epochs < math.inf:
        raise UserError(f"--epochs is {flags.epochs!r}, expected a positive number")
    if flags.adapters is not None and not config.lora.rank:
        raise UserError("--adapters names a folder, but lora.rank is 0, so there are none: give --lora.rank 16")
    target = Path(flags.runs) / config.name
    if not flags.resume and target.resolve() == folder.resolve():
        raise UserError(f"--name {config.name!r} is the run that is fine-tuned: give the new one another name")


def _opened(config: "RunConfig", flags: SftFlags, *, steps_given: bool) -> tuple["RunConfig", "RunData"]:
    """The dialogues as rows, and the config with as many steps as the epochs need, unless steps were given."""
    from perilune.cli_serve import _waiting
    from perilune.train.batches import open_data

    with _waiting("reading dialogues", quiet=flags.quiet or flags.json):
        data = open_data(config.data, seed=config.seed)
    if steps_given:
        return config, data
    steps = max(1, math.ceil(flags.epochs * data.train.rows_per_epoch / config.trainer.global_batch_rows))
    return replace(config, trainer=replace(config.trainer, steps=steps)), data


def _dialogue_counts(data: "RunData") -> dict[str, Any]:
    from perilune.data.chat_rows import ChatRows

    assert isinstance(data.train, ChatRows)
    held_out = data.valid.num_dialogues if isinstance(data.valid, ChatRows) else 0
    broken = data.train.broken
    left_out = {"count": broken.count, "reasons": dict(broken.reasons), "examples": broken.examples}
    return {"dialogues": {"train": data.train.num_dialogues, "valid": held_out}, "left_out": left_out}


def _write_adapters(run: Path, folder: str) -> str:
    from perilune.model.lora import save_adapters
    from perilune.train.run_folder import load_run

    model, _, config = load_run(run, merge=False)
    save_adapters(model, folder, config.lora)
    return folder


# ---------------------------------------------------------------------------------------------------------------------
# What has to be known before the defaults are


def _early_lora(arguments: list[str]) -> "LoraConfig":
    """Adapters learn faster, so the default learning rate depends on whether there are any."""
    from perilune.model.lora import LoraConfig

    rank = _value_of(arguments, "--lora.rank")
    return LoraConfig(rank=int(rank)) if rank is not None and rank.isdecimal() else LoraConfig()


def _early_seed(arguments: list[str]) -> int:
    seed = _value_of(arguments, "--seed")
    return int(seed) if seed is not None and seed.isdecimal() else 0


def _gives_steps(arguments: list[str], flags: SftFlags) -> bool:
    by_path = any(assignment.startswith("trainer.steps=") for assignment in flags.set)
    return by_path or _value_of(arguments, "--trainer.steps") is not None


def _value_of(arguments: list[str], flag: str) -> str | None:
    """The value of a flag as it was written, in either form; the full parse complains about it."""
    for argument, following in zip(arguments, [*arguments[1:], ""]):
        if argument == flag:
            return following
        if argument.startswith(f"{flag}="):
            return argument.partition("=")[2]
    return None
