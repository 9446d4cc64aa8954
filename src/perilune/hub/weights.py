"""A model's weights under public names, one tensor at a time, both ways.

`PublicWeights` shows a model as the tensors of a public folder. `load_weights` fills a model from such tensors, which
may lie in a folder: then each is read when its turn comes, and memory holds the model and one entry of it (for the
routed experts of a layer, their stack).
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from perilune.hub import kimi_k25
from perilune.hub.entries import Entry, FormatError
from perilune.hub.packed_int4 import UnpackedFolder, group_size_of
from perilune.hub.targets import format_from, format_of
from perilune.hub.tensor_files import TensorFolder, TensorKind
from perilune.model import Decoder, ModelConfig
from perilune.model.config import ComputeDtype
from perilune.model.linear import HALF
from perilune.model.side_by_side import round_matrices

LEFT_OUT = "rotary_emb.inv_freq"
"""Tensors of this name follow from the config; some folders hold them."""


class PublicWeights(Mapping[str, Tensor]):
    """The tensors of a model under the names that are written; each is made when it is asked for."""

    def __init__(self, model: Decoder) -> None:
        self._state = model.state_dict()
        self._parts: dict[str, tuple[Entry, int]] = {}
        for entry in format_of(model.config).entries(model.config):
            self._parts |= {names[0]: (entry, number) for number, names in enumerate(entry.public)}

    def __getitem__(self, name: str) -> Tensor:
        entry, number = self._parts[name]
        return entry.split(self._state[entry.ours].detach())[number].contiguous()

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def kinds(self) -> dict[str, TensorKind]:
        """Dtype and shape of all of them."""
        entries = dict.fromkeys(entry for entry, _ in self._parts.values())
        return {name: kind for entry in entries for name, kind in _kinds(entry, self._state).items()}


def _kinds(entry: Entry, state: Mapping[str, Tensor]) -> dict[str, TensorKind]:
    """What the public tensors of an entry are, without their numbers."""
    parts = entry.split(state[entry.ours].to("meta"))
    return {
        names[0]: TensorKind(dtype=part.dtype, shape=tuple(part.shape))
        for names, part in zip(entry.public, parts, strict=True)
    }


def public_weights(model: Decoder) -> dict[str, Tensor]:
    """All of them at once, on the CPU."""
    return {name: tensor.cpu() for name, tensor in PublicWeights(model).items()}


def load_weights(model: Decoder, tensors: Mapping[str, Tensor], fmt: ModuleType | None = None) -> None:
    """Fill a model from public tensors; every tensor must be used and every weight found, with the right shape."""
    own = dict(model.state_dict())
    fmt = fmt or format_of(model.config)
    inside = fmt is kimi_k25 and kimi_k25.are_module_names(tensors)
    entries = kimi_k25.module_entries(model.config) if inside else fmt.entries(model.config)
    matched(entries, own, tensors)
    with torch.no_grad():
        for entry in entries:
            own.pop(entry.ours).copy_(entry.read(tensors))
    assert not own, f"no format entry for {sorted(own)}"


def matched(
    entries: list[Entry], state: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> dict[str, tuple[str, TensorKind]]:
    """For every public name the one under which the tensor is there, and what it should be.

    FormatError names a tensor that nothing asks for, one that is missing, or one of another shape.
    """
    unknown = set(tensors) - {name for entry in entries for name in entry.names()}
    unknown = {name for name in unknown if not name.endswith(LEFT_OUT)}
    if unknown:
        raise FormatError(f"the weights hold {len(unknown)} tensors this architecture lacks, e.g. {min(unknown)!r}")
    result = {}
    for entry in entries:
        for there, (name, kind) in zip(entry.found(tensors), _kinds(entry, state).items(), strict=True):
            shape = _shape(tensors, there)
            # Axes of one element may be left out: convolutions are [P, 1, W] or [P, W].
            if [side for side in shape if side != 1] != [side for side in kind.shape if side != 1]:
                raise FormatError(f"{there!r} has shape {shape}, the config asks for {kind.shape}")
            result[name] = (there, kind)
    return result


def _shape(tensors: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
    """Without reading it, where it lies in a file."""
    lazy = isinstance(tensors, TensorFolder | UnpackedFolder)
    return tensors.kind(name).shape if lazy else tuple(tensors[name].shape)


def from_pretrained(
    folder: str | Path, *, device: str | torch.device = "cpu", dtype: ComputeDtype = "float32"
) -> Decoder:
    """Read a model folder, to compute in `dtype`. In float32 all parameters are float32, whatever is stored; in half
    precision matrices are made so from the beginning, so that what is stored in bfloat16 never takes twice its size."""
    path = Path(folder)
    public = read_config(path)
    config, tensors = model_config(public), open_tensors(path, public)
    with torch.device("meta"):  # no random numbers for weights that are read
        model = Decoder(config)
    model.set_compute_dtype(dtype)
    if model.compute_dtype in HALF:
        round_matrices(model, model.compute_dtype)
    model.to_empty(device=device)
    model.discard_step_statistics()  # the only tensors that no folder holds
    load_weights(model, tensors, format_from(public))
    return model


def load_folder(model: Decoder, folder: str | Path) -> None:
    """Give a model the weights of a folder; FormatError unless it is the same model, up to its positions and dtype."""
    public = read_config(Path(folder))
    theirs = model_config(public)
    if _comparable(theirs) != _comparable(model.config):
        raise FormatError(f"{folder} holds another model: {theirs!r}, expected {model.config!r}")
    load_weights(model, open_tensors(Path(folder), public), format_from(public))


def _comparable(config: ModelConfig) -> ModelConfig:
    """Without what may differ between a model and that whose weights it starts from."""
    return replace(
        config,
        layer_types=config.layer_pattern(),
        mla=replace(config.mla, rope=None),
        compute_dtype="float32",
        initializer_range=0.02,
    )


def folder_config(folder: str | Path) -> ModelConfig:
    """What model a folder holds; no weight is read."""
    return model_config(read_config(Path(folder)))


def model_config(public: dict[str, Any]) -> ModelConfig:
    try:
        return format_from(public).from_public(public)
    except FormatError:
        raise
    except (ValueError, TypeError, KeyError) as error:
        raise FormatError(f"config.json does not describe a model: {error}") from None


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder."""
    path = folder / "config.json"
    try:
        public = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FormatError(f"{folder} holds no config.json: expected a folder written by `perilune export`") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(public, dict):
        raise FormatError(f"{path} is not an object: expected the settings of a model")
    return public


def open_tensors(folder: Path, public: Mapping[str, Any]) -> TensorFolder | UnpackedFolder:
    """The tensors of a folder by name, unpacked where they are stored in four bits; nothing is read yet."""
    group_size, tensors = group_size_of(public), TensorFolder(folder)
    return tensors if group_size is None else UnpackedFolder(tensors, group_size)
