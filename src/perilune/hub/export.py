"""A model as a folder that other people's programs read.

    config.json  model*.safetensors  generation_config.json         always
    configuration_perilune.py  modeling_perilune.py  vision_perilune.py
    tokenizer.json  tokenizer_config.json  special_tokens_map.json  with a tokenizer
    chat_template.jinja                                             with a template
    preprocessor_config.json ...                                    with a vision tower
    README.md                                                       with a card
    safety.json  safety.html  safety.md                             with a safety report

Everything is made aside first and config.json is moved last: a folder that has one is complete. Only a new or empty
folder, or one that holds an exported model, is written to.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from torch import Tensor

from perilune.data.images import ProcessorConfig
from perilune.data.media import FRAMES_PER_CHUNK, MERGE_SIZE, PATCH_SIZE
from perilune.data.tokenizer import Tokenizer
from perilune.hub.entries import FormatError
from perilune.hub.opened import CHAT_MARK
from perilune.hub.safety_section import NAMES as SAFETY_FILES
from perilune.hub.targets import CODE_FILES, Target, choose, public_config
from perilune.hub.tensor_files import INDEX, MAX_SHARD_BYTES, TensorKind, write_shards
from perilune.hub.weights import PublicWeights
from perilune.model import Decoder

OWN_FILES = (
    INDEX,
    *CODE_FILES,
    "chat_template.jinja",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "README.md",
    *SAFETY_FILES,
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
)
"""What an export may leave behind, beside the weights and config.json."""

Progress = Callable[[int, int], None]
"""Called with (bytes written, bytes in all)."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    folder: Path
    target: Target
    num_parameters: int


def export_model(
    model: Decoder,
    folder: str | Path,
    *,
    target: str | None = None,
    tokenizer: Tokenizer,
    processor: ProcessorConfig | None = None,
    chat_template: str | None = None,
    card: str | None = None,
    more_files: Mapping[str, str] | None = None,
    is_chat: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress | None = None,
) -> Exported:
    """Write a model and all that belongs to it; `target` is a public type, by default the one that fits. `more_files`
    lie beside it, as the safety report that the card links. `is_chat`: it was trained to answer; the folder says so.
    """
    chosen = choose(model.config, target)
    ids = token_ids(tokenizer)
    files = tokenizer_files(tokenizer, chat_template, is_chat=is_chat) | {
        "tokenizer.json": _with_start(tokenizer),
        "generation_config.json": as_json(generation_config(tokenizer)),
    }
    if model.config.vision is not None:
        ids |= media_token_ids(tokenizer)
        files |= processor_files(processor or ProcessorConfig())
    if card is not None:
        files["README.md"] = card
    files |= dict(more_files or {})
    config = with_token_ids(public_config(model.config, chosen), ids)
    _write_model(model, folder, config, files, max_shard_bytes, progress)
    return Exported(folder=Path(folder), target=chosen, num_parameters=model.num_parameters())


def save_pretrained(
    model: Decoder,
    folder: str | Path,
    *,
    target: str | None = None,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
    pad_token_id: int | None = None,
    media_token_ids: tuple[int, int, int] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Weights, config and code alone, of a model without a tokenizer of ours.

    `media_token_ids` are those of <|media_begin|>, <|media_pad|> and <|media_end|>, for a model with a vision tower.
    """
    ids = {"bos_token_id": bos_token_id, "eos_token_id": eos_token_id, "pad_token_id": pad_token_id}
    if media_token_ids is not None:
        ids |= dict(zip(MEDIA_KEYS, media_token_ids, strict=True))
    config = with_token_ids(public_config(model.config, choose(model.config, target)), ids)
    _write_model(model, folder, config, {}, max_shard_bytes, None)


def _write_model(
    model: Decoder,
    folder: str | Path,
    config: Mapping[str, Any],
    files: Mapping[str, str],
    max_shard_bytes: int,
    progress: Progress | None,
) -> None:
    weights = PublicWeights(model)
    write_folder(
        folder,
        config,
        {**code_files(), **files},
        weights.kinds(),
        weights.__getitem__,
        max_shard_bytes=max_shard_bytes,
        progress=progress,
    )


# ---------------------------------------------------------------------------------------------------------------------
# What the files say


def code_files() -> dict[str, str]:
    """The model in plain torch, as transformers runs it."""
    package = resources.files("perilune.hub")
    return {name: (package / name).read_text(encoding="utf-8") for name in CODE_FILES}


MEDIA_KEYS = {"vision_start_token_id": "begin", "image_token_id": "pad", "vision_end_token_id": "end"}
"""Keys of config.json, and the special tokens <|media_...|> whose ids they give."""


def token_ids(tokenizer: Tokenizer) -> dict[str, int | None]:
    return {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
    }


def media_token_ids(tokenizer: Tokenizer) -> dict[str, int | None]:
    return {key: tokenizer.special_ids[f"<|media_{part}|>"] for key, part in MEDIA_KEYS.items()}


def with_token_ids(config: dict[str, Any], ids: Mapping[str, Any]) -> dict[str, Any]:
    """Always written, also when unknown: transformers' own defaults lie outside a small vocabulary."""
    config = {**config, **ids}
    if "image_token_id" in ids:
        config["media_placeholder_token_id"] = ids["image_token_id"]  # its name in the released config
    if "text_config" in config:
        text = {key: value for key, value in ids.items() if key not in MEDIA_KEYS}
        config["text_config"] = {**config["text_config"], **text}
    return config


def generation_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """A document ends with one token, a turn of a chat with another; either ends a generation."""
    ends = [tokenizer.eos_id, tokenizer.special_ids["<|im_end|>"]]
    return {**token_ids(tokenizer), "eos_token_id": ends, "do_sample": False}


def tokenizer_files(tokenizer: Tokenizer | None, chat_template: str | None, *, is_chat: bool = False) -> dict[str, str]:
    if tokenizer is None:
        return {}
    names = {
        f"{part}_token": tokenizer.special_name(getattr(tokenizer, f"{part}_id")) for part in ("bos", "eos", "pad")
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **names,
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
        **({CHAT_MARK: True} if is_chat else {}),
    }
    files = {
        "tokenizer.json": tokenizer.to_json(),
        "tokenizer_config.json": as_json(settings),
        "special_tokens_map.json": as_json(names),
    }
    return files if chat_template is None else {**files, "chat_template.jinja": chat_template}


def _with_start(tokenizer: Tokenizer) -> str:
    """tokenizer.json that puts the document-start token before a text, as training, `generate` and the server do.

    Only where special tokens are asked for, which is what others do with a text and do not with a rendered chat.
    """
    start = {"id": "[BOS]", "type_id": 0}
    plain = json.loads(tokenizer.to_json())
    plain["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": start}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [
            {"SpecialToken": start},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 0}},
        ],
        "special_tokens": {"[BOS]": {"id": "[BOS]", "ids": [tokenizer.bos_id], "tokens": ["[BOS]"]}},
    }
    return json.dumps(plain, ensure_ascii=False, separators=(",", ":"))


def processor_files(processor: ProcessorConfig) -> dict[str, str]:
    """Pictures as patches: transformers' processor of Kimi K2.5 with these budgets."""
    side = processor.max_patches_per_side
    picture = {
        "image_processor_type": "Kimi_K25ImageProcessor",
        "processor_class": "Kimi_K25Processor",
        "patch_size": PATCH_SIZE,
        "merge_size": MERGE_SIZE,
        "max_patches": processor.max_patches,
        "size": {"max_height": side, "max_width": side},
    }
    video = {
        "video_processor_type": "Kimi_K25VideoProcessor",
        "processor_class": "Kimi_K25Processor",
        "patch_size": PATCH_SIZE,
        "merge_size": MERGE_SIZE,
        "temporal_patch_size": FRAMES_PER_CHUNK,
        "max_patches": processor.max_patches_per_frame,
        "size": {"max_height": side, "max_width": side},
        "fps": processor.fps,
    }
    return {
        "preprocessor_config.json": as_json(picture),
        "video_preprocessor_config.json": as_json(video),
    }


def as_json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def write_folder(
    folder: str | Path,
    config: Mapping[str, Any],
    files: Mapping[str, str],
    kinds: Mapping[str, TensorKind],
    read: Callable[[str], Tensor],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress | None = None,
) -> None:
    """Weights, the files and config.json, all or nothing."""
    path = Path(folder)
    check_writable(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        write_shards(aside, kinds, read, max_shard_bytes=max_shard_bytes, progress=progress)
        for name, content in files.items():
            (aside / name).write_text(content, encoding="utf-8")
        (aside / "config.json").write_text(as_json(config), encoding="utf-8")
        path.mkdir(exist_ok=True)
        # An older model stops counting first; config.json comes last: a folder that has one is complete.
        (path / "config.json").unlink(missing_ok=True)
        new = sorted(aside.iterdir(), key=lambda file: file.name == "config.json")
        for stale in [*path.glob("model*.safetensors"), *(path / name for name in OWN_FILES)]:
            if stale.name not in {file.name for file in new}:
                stale.unlink(missing_ok=True)
        for file in new:
            os.replace(file, path / file.name)
    except OSError as error:
        raise FormatError(f"{path} could not be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def check_writable(path: Path) -> None:
    """Only a new or empty folder, or one that holds an exported model, may be written to."""
    if path.exists() and not path.is_dir():
        raise FormatError(f"{path} is a file: give a folder to write the model into")
    if path.exists() and any(path.iterdir()) and not is_model_folder(path):
        raise FormatError(f"{path} holds something other than an exported model: give a new folder, or empty it first")


def is_model_folder(folder: str | Path) -> bool:
    """Whether a folder holds a model as `perilune export` and `perilune import` write it, or as it is released."""
    try:
        found = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and "model_type" in found
