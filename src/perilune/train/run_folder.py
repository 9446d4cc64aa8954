"""The folder of a run, and getting a model back out of it.

    runs/NAME/config.json  environment.json  tokenizer.json  metrics.jsonl  report.html  checkpoints/  tensorboard/
              .lock        held while a process trains (run_lock.py)

A run may begin only where no run is, unless it is told to resume or to overwrite. Resuming compares the checkpoint with
the run that is about to continue it: the same model, data, tokenizer, seed and kind of optimizer, or one clear error.
"""

import json
import os
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from perilune import hub
from perilune.data.tokenizer import Tokenizer
from perilune.model import Decoder
from perilune.model.lora import LoraConfig, add_adapters, merge_adapters
from perilune.train import checkpoint
from perilune.train.batches import DataConfig, RunData
from perilune.train.config_file import differences, from_plain, to_plain
from perilune.train.environment import describe_environment
from perilune.train.run_config import RunConfig

CONFIG = "config.json"
ENVIRONMENT = "environment.json"
TOKENIZER = "tokenizer.json"
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
OWN_FILES = (CONFIG, ENVIRONMENT, TOKENIZER, METRICS, "report.html", CHECKPOINTS, "tensorboard")

FIXED_FIELDS = ("seed", "model", "lora", "data.seq_len", "data.vocab_size", "optimizer.kind")
"""What a resumed run may not change. The data itself is compared by its fingerprint."""


class RunError(RuntimeError):
    """A run that cannot begin or continue; the message says why and what to do."""


def check_free(folder: Path, *, resume: bool, overwrite: bool) -> None:
    """RunError unless this run may write to `folder`. Changes nothing."""
    if resume and overwrite:
        raise RunError("a run is either resumed or overwritten: give one of --resume and --overwrite")
    exists = (folder / CONFIG).exists()
    if resume and (folder / "rl.json").exists():
        raise RunError(f"{str(folder)!r} holds a run of `perilune rl`: continue it there, with --resume")
    if resume and not exists:
        raise RunError(f"there is no run in {str(folder)!r} to resume: start it without --resume")
    if exists and not resume and not overwrite:
        raise RunError(
            f"{str(folder)!r} already holds a run: continue it with `{resume_command(folder)}`, "
            "replace it with --overwrite, or give this one another name"
        )


def resume_command(folder: Path) -> str:
    """What to type to continue the run in `folder`."""
    command = ["perilune", "train", folder.name, "--resume"]
    if folder.parent != Path("runs"):
        command += ["--runs", str(folder.parent)]
    return shlex.join(command)


def cannot_write(folder: Path, error: OSError) -> RunError:
    return RunError(
        f"cannot write to the run folder {str(folder)!r}: {error.strerror or error}; free some space or choose another "
        "folder"
    )


def create(folder: Path, config: RunConfig, tokenizer: Tokenizer, *, device: torch.device, fresh: bool) -> None:
    """Make the folder ready to write to; `fresh` removes the run that was there. config.json comes last: it claims."""
    try:
        if fresh and folder.exists():
            _remove_run(folder)
        folder.mkdir(parents=True, exist_ok=True)
        checkpoint.clean_leftovers(folder / CHECKPOINTS)
        tokenizer.save(folder / TOKENIZER)
        write_json(folder / ENVIRONMENT, describe_environment(device))
        write_json(folder / CONFIG, to_plain(config))
    except OSError as error:
        raise cannot_write(folder, error) from error


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """A kill leaves the old file or the new one."""
    partial = path.with_name(f".{path.name}")
    partial.write_text(json.dumps(value, indent=2) + "\n")
    os.replace(partial, path)


def _remove_run(folder: Path) -> None:
    """Only what a run writes: a wrong path must not cost anybody's work. The config, which claims, goes first."""
    for name in OWN_FILES:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def read_config(folder: Path) -> RunConfig:
    if hub.is_model_folder(folder):
        return _config_of_model(folder)
    path = folder / CONFIG
    try:
        plain = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise RunError(f"{str(folder)!r} is not the folder of a run: it has no {CONFIG}") from error
    except OSError as error:
        raise RunError(f"{str(path)!r} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise RunError(f"{str(path)!r} is not valid JSON: {error}") from error
    try:
        return from_plain(RunConfig, plain)
    except (ValueError, TypeError) as error:
        raise RunError(f"{str(path)!r} is not the config of a run: {error}") from error


def _config_of_model(folder: Path) -> RunConfig:
    """An exported or imported folder is no run: its model, with what a run has by default for the rest."""
    model = hub.folder_config(folder)
    data = DataConfig(vocab_size=min(DataConfig.vocab_size, model.vocab_size))
    return RunConfig(name=folder.resolve().name.lstrip("."), model=model, data=data)


def fingerprints(config: RunConfig, data: RunData) -> dict[str, str]:
    """What the rows of a run follow from, causes first: another corpus gives another tokenizer and other rows."""
    fusion = config.fusion()
    return {
        "corpus_fingerprint": data.corpus.fingerprint,
        "tokenizer_fingerprint": data.tokenizer.fingerprint,
        "data_fingerprint": data.train.fingerprint,
        "pictures_fingerprint": "none" if data.vision is None else data.vision.fingerprint,
        "fusion_fingerprint": "none" if fusion is None else fusion.description,
    }


def check_same_run(saved: Mapping[str, Any], config: RunConfig, data: RunData) -> list[str]:
    """RunError when the checkpoint belongs to another run; else the harmless differences, for the person to read."""
    changed = list(differences(_with_new_fields(saved["config"]), to_plain(config)))
    fatal = [line for line in changed if any(_within(line.split(":")[0], field) for field in FIXED_FIELDS)]
    if fatal:
        raise RunError(
            f"cannot resume with a different configuration: {'; '.join(fatal)} (checkpoint -> now); "
            "use the values of the checkpoint, or start a new run"
        )
    for name, ours in fingerprints(config, data).items():
        theirs = saved.get(name, ours)  # checkpoints did not always name their corpus
        if theirs != ours:
            kind = name.removesuffix("_fingerprint")
            named = {
                "corpus": _named_source(config),
                "pictures": "pictures (data.vision)",
                "fusion": "rows that hold pictures (data.vision.fusion, or the number of steps it is a part of)",
            }.get(kind, kind)
            raise RunError(
                f"cannot resume: the {kind} fingerprint is {_short(ours)!r} but the checkpoint was trained with "
                f"{_short(theirs)!r}: the {named} changed since; restore it, or start a new run"
            )
    return changed


def _named_source(config: RunConfig) -> str:
    if config.data.chat is not None:
        return f"dialogues (data.chat.sources={config.data.chat.sources!r})"
    return f"corpus (data.corpus.source={config.data.corpus.source!r})"


def _short(fingerprint: str) -> str:
    """The beginning of a hash; the whole of one in words."""
    return fingerprint if " " in fingerprint else fingerprint[:12]


def _with_new_fields(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config of a checkpoint, with the defaults of fields that came after it was written: they change nothing."""
    try:
        return to_plain(from_plain(RunConfig, saved))
    except (ValueError, TypeError):
        return saved  # of another version; the comparison names what differs


def _within(name: str, field: str) -> bool:
    return name == field or name.startswith(field + ".")


def load_run(
    folder: str | Path, *, device: str | torch.device = "cpu", merge: bool = True
) -> tuple[Decoder, Tokenizer, RunConfig]:
    """The trained model of a run, or of an exported or imported folder, in eval mode, with its tokenizer and config.

    Adapters (lora) are merged into the weights, unless `merge` is False.
    """
    folder = Path(folder)
    config = read_config(folder)
    if hub.is_model_folder(folder):
        opened = hub.open_folder(folder, device=device)
        return opened.model, opened.tokenizer, config
    found = checkpoint.find(folder / CHECKPOINTS)
    if found is None:
        raise RunError(f"the run in {str(folder)!r} has no checkpoint yet: train it first")
    tokenizer = Tokenizer.load(folder / TOKENIZER)
    if tokenizer.fingerprint != found.state["tokenizer_fingerprint"]:
        raise RunError(
            f"{str(folder / TOKENIZER)!r} has fingerprint {tokenizer.fingerprint[:12]!r}, but the checkpoint was "
            f"trained with {found.state['tokenizer_fingerprint'][:12]!r}: put the tokenizer of the run back"
        )
    saved = _with_new_fields(found.state["config"])
    changed = list(differences(saved["model"], to_plain(config)["model"], "model"))
    if changed:
        raise RunError(
            f"{str(folder / CONFIG)!r} describes another model than the checkpoint: {'; '.join(changed)} "
            "(checkpoint -> config): put the config of the run back"
        )
    model = build_model(config, torch.device(device))
    _restore(found.folder, model, config.lora, merge=merge)
    return model.eval(), tokenizer, config


def _restore(checkpoint_folder: Path, model: Decoder, lora: LoraConfig, *, merge: bool = True) -> None:
    """Weights of a checkpoint into a plain model; those of adapters become a part of them, unless they stay apart."""
    add_adapters(model, lora, seed=0)
    checkpoint.restore_model(checkpoint_folder, model)
    if lora.rank and merge:
        merge_adapters(model)


MAY_CHANGE = ("model.mla.rope", "model.compute_dtype")
"""What of a model may differ from that whose weights it starts from: positions are extended without new weights."""


def load_weights(folder: str | Path, model: Decoder, config: RunConfig) -> None:
    """Give a new model the weights of another run or of a model folder; RunError unless it is the same model."""
    if hub.is_model_folder(folder):
        hub.load_folder(model, folder)
        return
    source = read_config(Path(folder))
    found = checkpoint.find(Path(folder) / CHECKPOINTS)
    if found is None:
        raise RunError(f"start_from is {str(folder)!r}, which has no checkpoint yet: train it first")
    changed = differences(to_plain(source)["model"], to_plain(config)["model"], "model")
    fatal = [line for line in changed if not any(_within(line.split(":")[0], field) for field in MAY_CHANGE)]
    if fatal:
        raise RunError(f"start_from {str(folder)!r} is another model: {'; '.join(fatal)} (there -> here)")
    _restore(found.folder, model, source.lora)


def build_model(config: RunConfig, device: torch.device) -> Decoder:
    """Initialised from the run's seed on the CPU, so that the weights are the same for every device."""
    compute_dtype = "bfloat16" if config.trainer.precision == "bf16" else config.model.compute_dtype
    return Decoder(replace(config.model, compute_dtype=compute_dtype), seed=config.seed).to(device)
