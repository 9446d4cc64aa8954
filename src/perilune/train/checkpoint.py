"""Checkpoints that are either complete or absent, written through torch.distributed.checkpoint (DCP).

Training does not wait for any of this (background_save.py). Folder of a run:

    checkpoints/step_00000100/   .metadata, *.distcp (DCP: every tensor), state.json (plain values), manifest.json
    checkpoints/latest           one line, the name of the folder to resume from

A save writes `.partial-step_00000100`, hashes and fsyncs every file into manifest.json, renames the folder to its name
(atomic), and moves `latest` last (atomic). So a kill at any instant leaves `latest` at a complete checkpoint; what a
killed save left behind is removed at the next start. A load verifies the manifest; a checkpoint that is incomplete or
damaged is passed over for the newest complete one, with a message.

Tensors go under flat names, so that DCP can reshard them between world sizes when they are DTensors:

    model.<name>                      parameters and persistent buffers
    optimizer.<parameter>.<entry>     optimizer state, keyed by the parameter's name and not by its number
    rng.<rank>.<generator>            python, numpy, torch, cuda

Values that are no tensors (step, data position, fingerprints, config, optimizer scalars) are JSON: nothing of ours is
pickled into a checkpoint.
"""

import errno
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from perilune.optim.sharded import ShardedMuonClip
from perilune.train import random_state, ranks

PREFIX = "step_"
PARTIAL = ".partial-"
REPLACED = ".replaced-"
LATEST = "latest"
STATE = "state.json"
MANIFEST = "manifest.json"

OnPhase = Callable[[str], None]
"""Called with the name of each phase of a save as it is reached; tests kill the process there."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or none could be read; the message says which and what to do."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """A verified checkpoint, and what was passed over to get to it."""

    folder: Path
    state: dict[str, Any]
    messages: tuple[str, ...]


# ---------------------------------------------------------------------------------------------------------------------
# Saving


def save(
    root: Path,
    *,
    step: int,
    tensors: Mapping[str, torch.Tensor],
    state: Mapping[str, Any],
    keep_last: int | None,
    beside: Sequence[Path] = (),
    group: dist.ProcessGroup | None = None,
    on_phase: OnPhase = lambda phase: None,
) -> Path:
    """Write one complete checkpoint, point `latest` at it, then drop all but the newest `keep_last` (None: no one).

    What `state` says of the files `beside` has to reach the disk before the checkpoint counts. All ranks call it, and
    meet in `group` (None: the default one).
    """
    name = f"{PREFIX}{step:08d}"
    partial, target = root / f"{PARTIAL}{name}", root / name
    try:
        with ranks.Together(group):
            if ranks.rank() == 0:
                _remove(partial)
                partial.mkdir(parents=True)
        on_phase("save:begin")
        _write_tensors(partial, tensors, group)  # DCP tells every rank when one of them fails
        on_phase("save:tensors")
        with ranks.Together(group):
            if ranks.rank() == 0:
                for path in beside:
                    _fsync(path)
                _write_json(partial / STATE, dict(state))
                _write_json(partial / MANIFEST, _manifest(partial))
                _fsync(partial)
                on_phase("save:manifest")
                _move_into_place(partial, target, on_phase)
                on_phase("save:renamed")
                _point_latest(root, name, on_phase)
                on_phase("save:latest")
                if keep_last is not None:
                    _prune(root, newest=step, keep_last=keep_last)
                on_phase("save:pruned")
    except BaseException as error:
        if ranks.rank() == 0:
            for leftover in (partial, root / f"{PARTIAL}{LATEST}"):
                _remove(leftover)
        cause = _operating_system_error(error)
        if cause is None:
            raise
        raise CheckpointError(_explanation(cause, root, step)) from error
    return target


class _Writer(dcp.FileSystemWriter):
    """Says what the system said: torch.save, when a disk is full, raises an error of its own over it.

    On this rank, while the system's error still hangs on to it; what DCP tells other ranks is the last error alone.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            cause = _operating_system_error(error)
            if cause is None or cause is error:
                raise
            raise cause from None


def _write_tensors(folder: Path, tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None) -> None:
    writer = _Writer(folder, single_file_per_rank=True, sync_files=True, thread_count=1)
    _single_process_is_intended()
    dcp.save(dict(tensors), storage_writer=writer, process_group=group, no_dist=not ranks.distributed())


def _manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and sha256 of every file, each of them flushed to the disk."""
    entries = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        _fsync(path)
        entries[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    return entries


def _move_into_place(partial: Path, target: Path, on_phase: OnPhase) -> None:
    # The name is taken only by a checkpoint that the run was not resumed from: damaged, or never reached by `latest`.
    replaced = target.with_name(REPLACED + target.name)
    if target.exists():
        _remove(replaced)
        os.replace(target, replaced)
        on_phase("save:set_aside")
    os.replace(partial, target)
    _fsync(target.parent)
    _remove(replaced)


def _point_latest(root: Path, name: str, on_phase: OnPhase) -> None:
    pointer = root / f"{PARTIAL}{LATEST}"
    with pointer.open("w") as file:
        file.write(name + "\n")
        file.flush()
        os.fsync(file.fileno())
    on_phase("save:pointer_written")
    os.replace(pointer, root / LATEST)
    _fsync(root)


def _prune(root: Path, *, newest: int, keep_last: int) -> None:
    """Keep the newest `keep_last` up to the one just written; later steps are of a run that was abandoned."""
    steps = sorted(_steps(root))
    kept = set([step for step in steps if step <= newest][-max(1, keep_last) :])
    for step in steps:
        if step not in kept:
            _remove(root / f"{PREFIX}{step:08d}")


def clean_leftovers(root: Path) -> None:
    """Remove what saves that were killed left behind."""
    if root.is_dir():
        for path in [*root.glob(f"{PARTIAL}*"), *root.glob(f"{REPLACED}*")]:
            _remove(path)


def _explanation(cause: OSError, root: Path, step: int) -> str:
    full = cause.errno in (errno.ENOSPC, errno.EDQUOT)
    reason = "the disk is full" if full else f"{cause.strerror or cause}"
    fix = "free some space" if full else "make the folder writable"
    return (
        f"checkpoint of step {step} could not be written to {str(root)!r}: {reason}; "
        f"earlier checkpoints are untouched: {fix} and resume"
    )


def _operating_system_error(error: BaseException | None) -> OSError | None:
    """The OSError behind `error`; DCP wraps what a rank raised into its own exception type."""
    if error is None or isinstance(error, OSError):
        return error
    for wrapped in getattr(error, "failures", {}).values():
        found = _operating_system_error(wrapped[0])
        if found is not None:
            return found
    return _operating_system_error(error.__cause__ or error.__context__)


# ---------------------------------------------------------------------------------------------------------------------
# Finding and loading


def find(root: Path) -> Found | None:
    """The checkpoint `latest` names, or else the newest complete one; None when there is none at all."""
    steps = sorted(_steps(root), reverse=True) if root.is_dir() else []
    names = [f"{PREFIX}{step:08d}" for step in steps]
    pointed = _pointed_at(root)
    if pointed is not None:
        names = [pointed, *(name for name in names if name != pointed)]
    messages: list[str] = []
    for name in names:
        damage = damage_of(root / name)
        if damage is None:
            state = json.loads((root / name / STATE).read_text())
            if messages:
                messages.append(f"continuing from the complete checkpoint {name}")
            return Found(folder=root / name, state=state, messages=tuple(messages))
        messages.append(f"checkpoint {name} is damaged: {damage}")
    if messages:
        raise CheckpointError(f"no complete checkpoint in {str(root)!r}: " + "; ".join(messages))
    return None


def damage_of(folder: Path) -> str | None:
    """What is wrong with a checkpoint, in words; None when every file has the bytes its manifest promises."""
    if not folder.is_dir():
        return "the folder is missing"
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__})"
    for name, expected in manifest.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected["bytes"]:
            return f"{name} has {path.stat().st_size} bytes, expected {expected['bytes']}"
        if _sha256(path) != expected["sha256"]:
            return f"{name} does not match its sha256"
    return None


def load_tensors(
    folder: Path,
    like: Mapping[str, torch.Tensor] | None = None,
    *,
    only_like: bool = False,
    without: Collection[str] = (),
    alone: bool = False,
) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint by name: into those of `like`, and the others (unless `only_like`) into new CPU ones.

    A DTensor in `like` receives its own shard, whatever the sharding at the time of the save. Those named in `without`
    are left where they are. All ranks load together, unless `alone`.
    """
    reader = dcp.FileSystemReader(folder)
    into = dict(like or {})
    for name, entry in _saved(reader).items():
        if name not in into and name not in without and not only_like:
            into[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    _single_process_is_intended()
    dcp.load(into, storage_reader=reader, no_dist=alone or not ranks.distributed())
    return into


def _saved(reader: dcp.FileSystemReader) -> dict[str, TensorStorageMetadata]:
    """Shape and dtype of every tensor of a checkpoint; we store nothing else in the DCP part."""
    entries = reader.read_metadata().state_dict_metadata
    return {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


# ---------------------------------------------------------------------------------------------------------------------
# What goes in: model and optimizer (random_state.py: the generators)


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {f"model.{name}": tensor for name, tensor in model.state_dict().items()}


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """State by parameter name. Parameters that never had a gradient have no state, and need none on load."""
    return {
        f"optimizer.{name}.{entry}": value
        for name, parameter in model.named_parameters()
        for entry, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor)
    }


def optimizer_scalars(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """The entries of the optimizer state that are plain numbers, for state.json."""
    scalars = {}
    for name, parameter in model.named_parameters():
        entries = optimizer.state.get(parameter, {})
        plain = {key: value for key, value in entries.items() if not isinstance(value, torch.Tensor)}
        if plain:
            scalars[name] = plain
    return scalars


def restore(
    folder: Path,
    state: Mapping[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    elsewhere: Collection[str] = (),
) -> dict[str, torch.Tensor]:
    """Bring model, optimizer and random generators to where the checkpoint left them; returns all tensors by name.

    elsewhere: names of weights that other ranks have in place of this one (stages of a pipeline).
    """
    parameters = dict(model.named_parameters())
    saved = _saved(dcp.FileSystemReader(folder))
    like = _fitting_model_tensors(folder, model, elsewhere)
    theirs = {f"model.{name}" for name in elsewhere}
    entries: dict[str, tuple[nn.Parameter, str]] = {}
    # Distributed MuonClip keeps of some matrices only what a rank owns: it has the tensors to load into.
    own = optimizer.checkpoint_tensors() if isinstance(optimizer, ShardedMuonClip) else {}
    for name in saved:
        if name.startswith("optimizer."):
            parameter_name, entry = name.removeprefix("optimizer.").rsplit(".", 1)
            if parameter_name in elsewhere:
                theirs.add(name)
                continue
            parameter = parameters[parameter_name]
            entries[name] = (parameter, entry)
            # An entry shaped like its parameter is sharded like it; step counters and the like are plain.
            if parameter_name + "." + entry in own:
                like[name] = own[parameter_name + "." + entry]
            elif saved[name].size == parameter.shape:
                like[name] = torch.empty_like(parameter, dtype=saved[name].properties.dtype, requires_grad=False)
    loaded = load_tensors(folder, like, without=theirs)
    optimizer.state.clear()
    for name, (parameter, entry) in entries.items():
        optimizer.state[parameter][entry] = loaded[name]
    for parameter_name, plain in state.get("optimizer_scalars", {}).items():
        if parameter_name not in elsewhere:
            optimizer.state[parameters[parameter_name]].update(plain)
    random_state.restore(loaded)
    return loaded


def restore_model(folder: Path, model: nn.Module) -> None:
    """Weights and buffers only, of a model that is whole; on many ranks each reads by itself."""
    load_tensors(folder, _fitting_model_tensors(folder, model), only_like=True, alone=True)


def _fitting_model_tensors(folder: Path, model: nn.Module, elsewhere: Collection[str] = ()) -> dict[str, torch.Tensor]:
    weights = model_tensors(model)
    saved = _saved(dcp.FileSystemReader(folder))
    known = {*weights, *(f"model.{name}" for name in elsewhere)}
    absent = sorted(known - set(saved))
    unknown = sorted(name for name in saved if name.startswith("model.") and name not in known)
    if absent or unknown:
        raise CheckpointError(
            f"checkpoint {str(folder)!r} does not fit this model: it lacks {absent[:3]!r}, has unknown {unknown[:3]!r}"
        )
    return weights


# ---------------------------------------------------------------------------------------------------------------------
# Files


def _steps(root: Path) -> list[int]:
    digits = [path.name.removeprefix(PREFIX) for path in root.glob(f"{PREFIX}*") if path.is_dir()]
    return [int(text) for text in digits if text.isdecimal()]


def _pointed_at(root: Path) -> str | None:
    try:
        name = (root / LATEST).read_text().strip()
    except (OSError, ValueError):
        return None
    return name if name.startswith(PREFIX) else None


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")
    _fsync(path)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _single_process_is_intended() -> None:
    """DCP warns on every call outside of torch.distributed, also when told `no_dist=True`.

    For good, not within a `catch_warnings`: that one is not made for a save in a thread beside the loop.
    """
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
