"""A model folder, opened: all that a verb needs to generate, serve, evaluate or train on from it."""

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from perilune.data.images import ProcessorConfig
from perilune.data.tokenizer import Tokenizer
from perilune.hub.entries import FormatError
from perilune.hub.weights import from_pretrained
from perilune.model import Decoder
from perilune.model.config import ComputeDtype

MAX_TEMPLATE_BYTES = 2**20
CHAT_MARK = "trained_to_chat"
"""A key of tokenizer_config.json: an export has our chat template whatever it was trained on, so it has to say."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OpenedModel:
    name: str
    model: Decoder
    """In eval mode, on the device that was asked for"""
    tokenizer: Tokenizer
    processor: ProcessorConfig
    """How large pictures may be"""
    stop_ids: frozenset[int]
    """Tokens that end a document or a turn"""
    chat_template: str | None = None
    """Of the folder; None: Kimi's, which is built in. A stranger's program: only for a sandbox"""
    is_chat: bool = False
    """It was trained to answer, not only to continue text"""


def open_folder(
    folder: str | Path, *, device: str | torch.device = "cpu", dtype: ComputeDtype = "float32"
) -> OpenedModel:
    """Open what `perilune export` or `perilune import` wrote, to compute in `dtype` (see `from_pretrained`).

    FormatError or TokenizerError says what is wrong.
    """
    path = Path(folder)
    tokenizer = open_tokenizer(path)
    model = from_pretrained(path, device=device, dtype=dtype).eval()
    if tokenizer.vocab_size > model.config.vocab_size:
        raise FormatError(
            f"{path / 'tokenizer.json'} has {tokenizer.vocab_size} ids, more than the model's {model.config.vocab_size}"
        )
    template = read_template(path)
    return OpenedModel(
        name=path.resolve().name,
        model=model,
        tokenizer=tokenizer,
        processor=read_processor(path),
        stop_ids=stop_ids(path, tokenizer),
        chat_template=template,
        is_chat=template is not None or is_marked_as_chat(path),
    )


def is_marked_as_chat(folder: Path) -> bool:
    return read_json(folder / "tokenizer_config.json").get(CHAT_MARK) is True


def is_chat_run(folder: Path) -> bool:
    """Whether the run in a folder was trained on dialogues, or by rewards for what it said in them. A config that
    cannot be read says neither."""
    try:
        data = read_json(folder / "config.json").get("data")
    except FormatError:
        data = None
    return (isinstance(data, dict) and data.get("chat") is not None) or (folder / "rl.json").exists()


def open_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if path.exists():
        return Tokenizer.load(path)
    if (folder / "tiktoken.model").exists():
        raise FormatError(
            f"{folder} has its vocabulary as tiktoken.model: `perilune import {folder}` makes a folder that can be used"
        )
    raise FormatError(f"{folder} has no tokenizer.json: expected a folder written by `perilune export` or `import`")


def stop_ids(folder: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """The end tokens of our own formats, and those that generation_config.json names."""
    found = read_json(folder / "generation_config.json").get("eos_token_id", [])
    named = found if isinstance(found, list) else [found]
    ids = {token_id for token_id in named if type(token_id) is int and 0 <= token_id < tokenizer.vocab_size}
    return frozenset(ids | {tokenizer.eos_id, tokenizer.special_ids["<|im_end|>"]})


def read_processor(folder: Path) -> ProcessorConfig:
    """Budgets of pictures, in the keys of transformers or of the released folder; the published ones where none are."""
    picture, video = (read_json(folder / f"{kind}preprocessor_config.json") for kind in ("", "video_"))
    released = picture.get("media_proc_cfg") or {}
    budgets = {
        "max_patches": picture.get("max_patches", released.get("in_patch_limit")),
        "max_patches_per_frame": video.get("max_patches", released.get("in_patch_limit_each_frame")),
        "max_patches_per_side": (picture.get("size") or {}).get("max_height", released.get("patch_limit_on_one_side")),
        "fps": video.get("fps", released.get("sample_fps")),
    }
    try:
        return ProcessorConfig(**{name: value for name, value in budgets.items() if value is not None})
    except (ValueError, TypeError) as error:
        raise FormatError(f"{folder / 'preprocessor_config.json'} asks for something else: {error}") from None


def read_template(folder: Path) -> str | None:
    """chat_template.jinja, or the one inside tokenizer_config.json, where older folders keep it; None for our own."""
    found = _template_text(folder)
    return None if found == builtin_template() else found


def builtin_template() -> str:
    """Kimi's chat format as a template, for programs that have no code for it."""
    return (resources.files("perilune.data") / "chat_template.jinja").read_text(encoding="utf-8")


def _template_text(folder: Path) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        if path.stat().st_size > MAX_TEMPLATE_BYTES:
            raise FormatError(f"{path} is {path.stat().st_size:,} bytes, expected at most {MAX_TEMPLATE_BYTES:,}")
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise FormatError(f"{path} is not text: {error}") from None
    found = read_json(folder / "tokenizer_config.json").get("chat_template")
    return found if isinstance(found, str) else None


def read_json(path: Path) -> dict[str, Any]:
    """An object, empty where the file is not there."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise FormatError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise FormatError(f"{path} is not an object")
    return found
