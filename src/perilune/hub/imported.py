"""`perilune import`: a released folder as one of ours, a tensor at a time.

What changes on the way: names and keys become those that we write (lists of layers that count from 1, transformers'
flat keys, what transformers misnames), experts in four bits become bfloat16, `tiktoken.model` becomes tokenizer.json.
Everything else keeps its numbers and its dtype. Memory holds one tensor, however large the model.

Only safetensors are read, and no code of the folder is run or copied.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perilune.data.tiktoken_vocabulary import import_vocabulary
from perilune.data.tokenizer import Tokenizer, TokenizerError
from perilune.hub.entries import FormatError
from perilune.hub.export import (
    MAX_SHARD_BYTES,
    MEDIA_KEYS,
    Progress,
    as_json,
    check_writable,
    code_files,
    generation_config,
    media_token_ids,
    processor_files,
    token_ids,
    tokenizer_files,
    with_token_ids,
    write_folder,
)
from perilune.hub.opened import builtin_template, is_marked_as_chat, read_json, read_processor, read_template
from perilune.hub.packed_int4 import UnpackedFolder
from perilune.hub.targets import Target, choose, format_from, public_config
from perilune.hub.tensor_files import TensorKind
from perilune.hub.weights import matched, model_config, open_tensors, read_config
from perilune.model import Decoder, ModelConfig

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
TEXTS = ("README.md", "LICENSE", "LICENSE.md", "LICENSE.txt", "NOTICE", "THIRD_PARTY_NOTICES.md")
MAX_TEXT_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class Imported:
    folder: Path
    target: Target
    num_tensors: int
    num_bytes: int
    num_parameters: int
    num_unpacked: int
    """Weights that were stored in four bits"""
    tokenizer: str
    """"tiktoken.model", "tokenizer.json" or "none": where it came from"""


def import_folder(
    source: str | Path,
    folder: str | Path,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress | None = None,
) -> Imported:
    """Write `source`, a released model, to `folder` as a model of ours."""
    source, folder = Path(source), Path(folder)
    public = read_config(source)
    config = model_config(public)
    if source.resolve() == folder.resolve():
        raise FormatError(f"{folder} is the folder to read: give another one to write")
    check_writable(folder)
    tensors = open_tensors(source, public)
    with torch.device("meta"):
        state = Decoder(config).state_dict()
    places = matched(format_from(public).entries(config), state, tensors)
    kinds: dict[str, TensorKind] = {}
    for name, (there, kind) in places.items():
        stored = tensors.kind(there).dtype
        if stored not in DTYPES:
            raise FormatError(f"{there!r} is stored as {stored}, expected one of {', '.join(map(str, DTYPES))}")
        kinds[name] = TensorKind(dtype=stored, shape=kind.shape)

    def read(name: str) -> Tensor:
        there, kind = places[name]
        return tensors[there].reshape(kind.shape)

    tokenizer, origin = _tokenizer(source, config)
    target = choose(config)
    files = code_files() | _texts(source)
    ids = {key: _given(public, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if tokenizer is not None:
        ids = {key: ids[key] if ids[key] is not None else value for key, value in token_ids(tokenizer).items()}
        template = read_template(source) or builtin_template()
        files |= tokenizer_files(tokenizer, template, is_chat=is_marked_as_chat(source))
        files["generation_config.json"] = as_json(
            generation_config(tokenizer) | read_json(source / "generation_config.json")
        )
        if config.vision is not None:
            ids |= media_token_ids(tokenizer)
            files |= processor_files(read_processor(source))
    elif config.vision is not None:
        ids |= {key: _given(public, key) for key in MEDIA_KEYS}
        ids["image_token_id"] = ids["image_token_id"] or _given(public, "media_placeholder_token_id")
    written = with_token_ids(public_config(config, target), ids) | _carried(public, kinds)
    write_folder(folder, written, files, kinds, read, max_shard_bytes=max_shard_bytes, progress=progress)
    return Imported(
        folder=folder,
        target=target,
        num_tensors=len(kinds),
        num_bytes=sum(kind.num_bytes for kind in kinds.values()),
        num_parameters=sum(tensor.numel() for name, tensor in state.items() if not name.endswith("_correction_bias")),
        num_unpacked=len(tensors.packed) if isinstance(tensors, UnpackedFolder) else 0,
        tokenizer=origin,
    )


def _tokenizer(source: Path, config: ModelConfig) -> tuple[Tokenizer | None, str]:
    for name in ("tokenizer.json", "tiktoken.model"):
        if not (source / name).exists():
            continue
        try:
            if name == "tokenizer.json":
                return Tokenizer.load(source / name), name
            return import_vocabulary(source, config.vocab_size), name
        except TokenizerError as error:
            raise FormatError(f"the vocabulary cannot be imported: {error}") from error
    return None, "none"


def _texts(source: Path) -> dict[str, str]:
    """What the model's authors say about it goes along."""
    found = {}
    for name in TEXTS:
        path = source / name
        if path.is_file() and path.stat().st_size <= MAX_TEXT_BYTES:
            found[name] = path.read_text(encoding="utf-8", errors="replace")
    return found


def _given(public: dict[str, Any], key: str) -> Any:
    text = public.get("text_config")
    return public.get(key, text.get(key) if isinstance(text, dict) else None)


def _carried(public: dict[str, Any], kinds: dict[str, TensorKind]) -> dict[str, Any]:
    """Keys that say nothing about the shape of the model, but that readers look for."""
    sizes: dict[torch.dtype, int] = {}
    for kind in kinds.values():
        sizes[kind.dtype] = sizes.get(kind.dtype, 0) + kind.num_bytes
    most = max(sizes, key=sizes.__getitem__)
    carried = {"dtype": str(most).removeprefix("torch.")}
    for key in ("model_max_length", "max_position_embeddings"):
        if key in public:
            carried[key] = public[key]
    return carried
