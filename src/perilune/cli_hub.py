"""`perilune export` and `perilune import`: models to and from the folders that other programs read.

`open_model` is how every verb that needs a model gets one, by the name of a run, the folder of a run, or a folder that
was exported or imported.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from perilune.cli import UserError, _parse, _positional, _print_json, _run_folder

if TYPE_CHECKING:
    import torch

    from perilune.data.images import ProcessorConfig
    from perilune.hub import OpenedModel
    from perilune.train import RunConfig


@dataclass(kw_only=True)
class ExportFlags:
    to: Literal["kimi_linear", "deepseek_v3", "kimi_k25", "perilune"] | None = None
    """The public type to write; by default the one that holds the model, else perilune, which holds all."""
    runs: str = "runs"
    """Folder that holds runs."""
    json: bool = False


def export_verb(arguments: list[str]) -> None:
    """Write a run as a folder that transformers reads."""
    example = "perilune export nano ./nano-hf --to kimi_linear"
    name, rest = _positional(arguments, "RUN", "a run's name or folder, or a model folder", example, helps=True)
    folder = None
    if rest and not rest[0].startswith("-"):
        folder, rest = rest[0], rest[1:]
    flags = _parse(
        f"perilune export {name} [FOLDER]",
        "Write a run as a folder that transformers reads: weights, config, tokenizer, chat template, code and a model "
        "card. Without FOLDER it is named after the run and the type.\n\n"
        f"example: perilune export {name} --to kimi_linear",
        ExportFlags,
        rest,
    )
    from perilune import hub
    from perilune.hub.model_card import RunFacts, model_card
    from perilune.hub.safety_section import NAMES as SAFETY_FILES
    from perilune.train.progress import DataProgress

    source = _run_folder(name, flags.runs)
    opened = open_model(name, runs=flags.runs)
    target = hub.choose(opened.model.config, flags.to)
    folder = Path(folder or f"{opened.name}-{target}")
    if hub.is_model_folder(source):
        card = _text(source / "README.md")
    else:
        card = model_card(opened.name, opened.model, target, RunFacts.of(source))
    with DataProgress(quiet=flags.json) as progress:
        exported = hub.export_model(
            opened.model,
            folder,
            target=target,
            tokenizer=opened.tokenizer,
            processor=opened.processor,
            chat_template=opened.chat_template or hub.builtin_template(),
            card=card,
            is_chat=opened.is_chat,
            more_files={name: text for name in SAFETY_FILES if (text := _text(source / name)) is not None},
            progress=lambda done, total: progress("writing weights", done, total),
        )
    if flags.json:
        found = {"folder": str(folder), "model_type": exported.target, "parameters": exported.num_parameters}
        _print_json(found)
        return
    print(f"{folder}: {exported.num_parameters:,} parameters as model_type {exported.target!r}")
    if exported.target == "perilune":
        print("transformers opens it with trust_remote_code=True; no public type holds this model")


@dataclass(kw_only=True)
class ImportFlags:
    runs: str = "runs"
    """Folder in which the model is kept when no other is given."""
    json: bool = False


def import_verb(arguments: list[str]) -> None:
    """Bring a released model into a folder that the other verbs take."""
    example = "perilune import ./Kimi-Linear-48B-A3B-Instruct"
    expected = "a released model: config.json, safetensors, vocabulary"
    source, rest = _positional(arguments, "FOLDER", expected, example, helps=True)
    folder = None
    if rest and not rest[0].startswith("-"):
        folder, rest = rest[0], rest[1:]
    flags = _parse(
        f"perilune import {source} [NEW]",
        "Bring a released model (Kimi-Linear, Kimi K2 or K2.5, or what transformers writes for them) into a folder "
        "that the other verbs take. Without NEW it is kept among the runs, under its own name. Only safetensors are "
        f"read, one tensor at a time.\n\nexample: perilune import {source} ./models/imported",
        ImportFlags,
        rest,
    )
    from perilune import hub
    from perilune.train.progress import DataProgress

    if not Path(source).is_dir():
        raise UserError(f"{source!r} is not a folder: give the folder of a released model, {example!r}")
    name = Path(source).resolve().name
    folder = Path(folder) if folder is not None else Path(flags.runs) / name
    with DataProgress(quiet=flags.json) as progress:
        found = hub.import_folder(source, folder, progress=lambda done, total: progress("copying weights", done, total))
    if flags.json:
        _print_json({**dataclasses.asdict(found), "folder": str(found.folder)})
        return
    unpacked = f", {found.num_unpacked:,} of them unpacked from four bits" if found.num_unpacked else ""
    print(f"{folder}: {found.num_parameters:,} parameters in {found.num_tensors:,} tensors{unpacked}")
    if found.tokenizer == "none":
        print("it has no vocabulary: put its tokenizer.json beside the weights before generating")
    else:
        shown = name if folder == Path("runs") / name else folder
        print(f"vocabulary from {found.tokenizer}; try: perilune generate {shown} --prompt Hello")


# ---------------------------------------------------------------------------------------------------------------------
# Opening


def open_model(name: str, *, runs: str = "runs", device: "str | torch.device" = "cpu") -> "OpenedModel":
    """The model of a run, or of a folder that was exported or imported, with all that belongs to it."""
    from perilune import hub

    folder = _run_folder(name, runs)
    if hub.is_model_folder(folder):
        return hub.open_folder(folder, device=device)
    from perilune.hub.opened import is_chat_run
    from perilune.train.run_folder import load_run

    model, tokenizer, config = load_run(folder, device=device)
    return hub.OpenedModel(
        name=config.name,
        model=model,
        tokenizer=tokenizer,
        processor=_processor(config),
        stop_ids=frozenset({tokenizer.eos_id, tokenizer.special_ids["<|im_end|>"]}),
        is_chat=is_chat_run(folder),
    )


def _processor(config: "RunConfig") -> "ProcessorConfig":
    """The published budgets, or those of the largest picture the run was trained on."""
    from perilune.data.images import ProcessorConfig
    from perilune.data.media import PATCH_SIZE

    if config.data.chat is not None:
        return config.data.chat.processor
    if config.data.vision is None:
        return ProcessorConfig()
    most = max(width * height for width, height in config.data.vision.scenes.sizes) // PATCH_SIZE**2
    return ProcessorConfig(max_patches=most, max_patches_per_frame=most)


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None
