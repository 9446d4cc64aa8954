"""Models to and from folders that transformers, vLLM and SGLang read and write: config.json and safetensors.

model = from_pretrained(folder)            kimi_linear, deepseek_v3 (kimi_k2), kimi_k25, or our own superset of them
save_pretrained(model, folder)             the public type where the model fits one, else model_type "perilune"
"""

import json
import os
import shutil
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from perilune.hub import deepseek_v3, kimi_k25, kimi_linear
from perilune.hub.entries import FormatError
from perilune.model import Decoder, ModelConfig

__all__ = ["FormatError", "from_pretrained", "load_weights", "public_weights", "save_pretrained"]

MAX_SHARD_BYTES = 4 * 2**30


def from_pretrained(folder: str | os.PathLike[str], *, device: str | torch.device = "cpu") -> Decoder:
    """Read a model folder; parameters become float32, whatever dtype is stored."""
    path = Path(folder)
    try:
        public = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FormatError(f"{path} holds no config.json: expected a folder written by save_pretrained") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"{path / 'config.json'} is not valid JSON: {error}") from None
    fmt = _format_of(public)
    model = Decoder(fmt.from_public(public))
    load_weights(model, _read_tensors(path), fmt)
    return model.to(device)


def load_weights(model: Decoder, tensors: dict[str, Tensor], fmt: ModuleType | None = None) -> None:
    """Fill a model from public tensors; every tensor must be used and every weight found, with the right shape."""
    own = dict(model.state_dict())
    fmt = fmt or _format_for(model.config)
    inside = fmt is kimi_k25 and kimi_k25.are_module_names(tensors)
    entries = kimi_k25.module_entries(model.config) if inside else fmt.entries(model.config)
    unknown = set(tensors) - {name for entry in entries for name in entry.names()}
    unknown = {name for name in unknown if not name.endswith("rotary_emb.inv_freq")}
    if unknown:
        raise FormatError(f"the weights hold {len(unknown)} tensors this architecture lacks, e.g. {min(unknown)!r}")
    with torch.no_grad():
        for entry in entries:
            value, target = entry.read(tensors), own.pop(entry.ours)
            if value.shape != target.shape:
                raise FormatError(
                    f"{entry.public[0][0]!r} has shape {tuple(value.shape)}, the config asks for {tuple(target.shape)}"
                )
            target.copy_(value)
    assert not own, f"no format entry for {sorted(own)}"


def public_weights(model: Decoder) -> dict[str, Tensor]:
    """The model's tensors under their public names."""
    state = model.state_dict()
    result: dict[str, Tensor] = {}
    for entry in _format_for(model.config).entries(model.config):
        result |= entry.written(state[entry.ours].detach().cpu())
    return result


def save_pretrained(
    model: Decoder,
    folder: str | os.PathLike[str],
    *,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
    pad_token_id: int | None = None,
    media_token_ids: tuple[int, int, int] | None = None,
) -> None:
    """Write config.json and safetensors. All files are made aside first; a folder without config.json is incomplete.

    `media_token_ids` are those of <|media_begin|>, <|media_pad|> and <|media_end|>, for a model with a vision tower.
    """
    path = Path(folder)
    _check_writable(path)
    config = _format_for(model.config).to_public(model.config)
    # Always written: transformers' own defaults lie outside a small vocabulary.
    ids = {"bos_token_id": bos_token_id, "eos_token_id": eos_token_id, "pad_token_id": pad_token_id}
    config |= ids
    if "text_config" in config:
        config["text_config"] |= ids
    if media_token_ids is not None:
        names = ("vision_start_token_id", "image_token_id", "vision_end_token_id")
        config |= dict(zip(names, media_token_ids, strict=True))
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        try:
            _write_shards(public_weights(model), aside)
        except SafetensorError as error:  # how a full disk looks through safetensors
            raise FormatError(f"the weights could not be written to {path.parent}: {error}") from None
        (aside / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        path.mkdir(exist_ok=True)
        # An older model stops counting first; config.json comes last: a folder that has one is complete.
        (path / "config.json").unlink(missing_ok=True)
        new = sorted(aside.iterdir(), key=lambda file: file.name == "config.json")
        for stale in [*path.glob("model*.safetensors"), path / "model.safetensors.index.json"]:
            if stale.name not in {file.name for file in new}:
                stale.unlink(missing_ok=True)
        for file in new:
            os.replace(file, path / file.name)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _check_writable(path: Path) -> None:
    """Only a new or empty folder, or one that holds an exported model, may be written to."""
    if path.exists() and not path.is_dir():
        raise FormatError(f"{path} is a file: give a folder to write the model into")
    if not path.exists() or not any(path.iterdir()):
        return
    try:
        exported = "model_type" in json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        exported = False
    if not exported:
        raise FormatError(f"{path} holds something other than an exported model: give a new folder, or empty it first")


def _format_of(public: dict[str, Any]) -> ModuleType:
    kind = public.get("model_type")
    if kind == kimi_k25.PUBLIC_TYPE or (kind == kimi_linear.OWN_TYPE and "vision_config" in public):
        return kimi_k25
    if kind in (kimi_linear.PUBLIC_TYPE, kimi_linear.OWN_TYPE):
        return kimi_linear
    if kind in deepseek_v3.PUBLIC_TYPES:
        return deepseek_v3
    known = (kimi_linear.PUBLIC_TYPE, kimi_linear.OWN_TYPE, *deepseek_v3.PUBLIC_TYPES, kimi_k25.PUBLIC_TYPE)
    raise FormatError(f"model_type {kind!r} is not supported: expected one of {', '.join(known)}")


def _format_for(config: ModelConfig) -> ModuleType:
    if kimi_k25.fits(config):
        return kimi_k25
    return deepseek_v3 if deepseek_v3.fits(config) else kimi_linear


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FormatError(f"{folder} holds no .safetensors file")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise FormatError(f"{file} cannot be read: {error}") from None
    return tensors


def _write_shards(tensors: dict[str, Tensor], folder: Path) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > MAX_SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for index, shard in enumerate(shards, start=1):
        file = f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
