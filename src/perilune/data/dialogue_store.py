"""Tokens of dialogues on disk, so that fine-tuning begins at once when it is begun again.

    stored_documents(dialogues, settings, sources=files, tokenizer=tokenizer, cache_dir=folder, make=make)

One file for each (content of the files, tokenizer, settings, code that makes tokens), named by the hash of all of them:
dialogues-KEY.npz, compressed. Pictures are not in it, and dialogues whose pictures lie in files of their own are not
stored: those files may change. A file that cannot be read is made again; one that cannot be written is done without.
"""

import hashlib
import json
import os
import secrets
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from perilune.data.dialogues import Dialogue
from perilune.data.tokenizer import Tokenizer

VERSION = 1  # part of the file's name: raise it when the same input gives another file
MADE_BY = (
    "chat.py", "chat_messages.py", "dialogues.py", "tool_declarations.py", "images.py", "image_files.py", "video.py",
    "chat_rows.py",
)  # fmt: skip
"""Sources beside this one that tokens are a function of."""


@dataclass(kw_only=True)
class Documents:
    """Of the dialogues that can be trained on: their numbers, tokens and sides."""

    numbers: list[int] = field(default_factory=list)
    tokens: list[np.ndarray] = field(default_factory=list)
    """int32"""
    predicted: list[np.ndarray] = field(default_factory=list)
    """bool"""
    held_out: list[bool] = field(default_factory=list)
    left_out: list[tuple[str, str, str]] = field(default_factory=list)
    """Why, where and what of the others."""

    def add(self, number: int, tokens: np.ndarray, predicted: np.ndarray, *, held_out: bool) -> None:
        self.numbers.append(number)
        self.tokens.append(tokens)
        self.predicted.append(predicted)
        self.held_out.append(held_out)


def stored_documents(
    dialogues: Sequence[Dialogue],
    settings: str,
    *,
    sources: Sequence[str | Path],
    tokenizer: Tokenizer,
    cache_dir: str | Path | None,
    make: Callable[[], Documents],
) -> Documents:
    """What `make` gives, from the disk where it was made before. `settings` names all that `make` depends on beside the
    files and the tokenizer."""
    if cache_dir is None or _has_picture_files(dialogues):
        return make()
    path = Path(cache_dir) / f"dialogues-{_key(settings, sources, tokenizer)}.npz"
    found = _load(path)
    if found is None:
        found = make()
        _save(path, found)
    return found


def _has_picture_files(dialogues: Sequence[Dialogue]) -> bool:
    pictures = (part for each in dialogues for message in each.messages for part in message.media)
    return any(part.source[:5].lower() != "data:" for part in pictures)


def _key(settings: str, sources: Sequence[str | Path], tokenizer: Tokenizer) -> str:
    digest = hashlib.sha256(f"{VERSION}\n{tokenizer.fingerprint}\n{settings}\n".encode())
    for path in (*(Path(__file__).with_name(name) for name in MADE_BY), *map(Path, sources)):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:24]


def _save(path: Path, documents: Documents) -> None:
    lengths = [len(each) for each in documents.tokens]
    tokens = np.concatenate([np.zeros(0, np.int32), *documents.tokens])
    is_small = bool((tokens < 1 << 16).all())
    arrays: dict[str, np.ndarray] = {
        "numbers": np.array(documents.numbers, dtype=np.int64),
        "lengths": np.array(lengths, dtype=np.int64),
        "tokens": tokens.astype(np.uint16) if is_small else tokens,
        "predicted": np.packbits(np.concatenate([np.zeros(0, bool), *documents.predicted])),
        "held_out": np.array(documents.held_out, dtype=bool),
        "left_out": np.frombuffer(json.dumps(documents.left_out).encode(), dtype=np.uint8),
    }
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.npz")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(aside, allow_pickle=False, **arrays)
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)


def _load(path: Path) -> Documents | None:
    try:
        with np.load(path) as arrays:
            lengths = arrays["lengths"]
            ends = np.cumsum(lengths)[:-1]
            tokens = arrays["tokens"].astype(np.int32)
            predicted = np.unpackbits(arrays["predicted"], count=len(tokens)).astype(bool)
            left_out = [(why, where, what) for why, where, what in json.loads(arrays["left_out"].tobytes())]
            return Documents(
                numbers=arrays["numbers"].tolist(),
                tokens=np.split(tokens, ends) if len(lengths) else [],
                predicted=np.split(predicted, ends) if len(lengths) else [],
                held_out=arrays["held_out"].tolist(),
                left_out=left_out,
            )
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
