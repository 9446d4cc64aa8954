"""Dialogues for supervised fine-tuning: JSON lines in the OpenAI chat form, as tokens with a mask of what is learnt.

    {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}], "tools": [...]}

Pictures stand in messages as `image_url` parts: `data:` URLs, or paths beneath the folder of the file. A line may have
`"thinking": false` (the assistant answers at once); without it, a dialogue whose assistant turns hold no reasoning is
read so too. A line that cannot be read is left out, counted by its reason and shown: one bad row ends no run.
"""

import base64
import binascii
import io
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from perilune.data.chat import encode, parse_messages, parse_tools, render
from perilune.data.chat_messages import ChatError, ChatMessage, Tool
from perilune.data.images import DEFAULT_PROCESSOR, ProcessorConfig, image_media, load_image
from perilune.data.media import Media
from perilune.data.tokenizer import Tokenizer, TokenizerError
from perilune.data.vision_documents import VisionDocument

LARGEST_LINE = 64 << 20
SHOWN_PROBLEMS = 5


class DialogueError(ValueError):
    """A file that holds no dialogue."""


@dataclass(frozen=True, kw_only=True)
class Dialogue:
    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...] = ()
    thinking: bool = True
    folder: Path = Path()
    """Where its pictures lie."""

    @property
    def has_pictures(self) -> bool:
        return any(message.media for message in self.messages)


@dataclass
class Broken:
    """What was left out, and why."""

    reasons: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        return self.reasons.total()

    def add(self, reason: str, where: str, detail: str) -> None:
        self.reasons[reason] += 1
        if len(self.examples) < SHOWN_PROBLEMS:
            self.examples.append(f"{where}: {detail}")

    def __str__(self) -> str:
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.reasons.most_common())
        return (
            f"{self.count} rows left out: {reasons}; e.g. {'; '.join(self.examples)}" if self.count else "all rows read"
        )


def read_dialogues(paths: Sequence[str | Path]) -> tuple[list[Dialogue], Broken]:
    """All dialogues of the files, in order. DialogueError when there is none."""
    found, broken = [], Broken()
    for path in map(Path, paths):
        for number, line in enumerate(_lines(path), start=1):
            where = f"{path.name}, line {number}"
            if not line.strip():
                continue
            try:
                found.append(_dialogue(line, path.parent))
            except ChatError as error:
                broken.add("not a dialogue", where, str(error))
            except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
                broken.add("not JSON", where, str(error))
    if not found:
        raise DialogueError(
            f"{', '.join(map(str, paths))}: no dialogue found, expected JSON lines with messages ({broken})"
        )
    return found, broken


def _lines(path: Path) -> Iterator[bytes]:
    raw: Any = path.open("rb")
    with raw:
        if path.suffix == ".zst":
            import zstandard

            raw = io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(raw))
        while line := raw.readline(LARGEST_LINE):
            yield line


def _dialogue(line: bytes, folder: Path) -> Dialogue:
    plain = json.loads(line)
    if not isinstance(plain, dict):
        raise ChatError("line", f"is a JSON {type(plain).__name__}, expected an object with messages")
    messages = parse_messages(plain.get("messages"))
    said = [message for message in messages if message.role == "assistant"]
    if not said:
        raise ChatError("messages", "hold no assistant message: nothing to learn")
    thinking = plain.get("thinking")
    if thinking is None:
        thinking = any(message.reasoning for message in said)
    if not isinstance(thinking, bool):
        raise ChatError("thinking", f"is {thinking!r}, expected true or false")
    return Dialogue(
        messages=messages, tools=parse_tools(plain.get("tools") or []), thinking=thinking, folder=folder
    )  # fmt: skip


def document_of(
    dialogue: Dialogue, tokenizer: Tokenizer, processor: ProcessorConfig = DEFAULT_PROCESSOR
) -> VisionDocument:
    """Tokens of a dialogue; only what the assistant wrote is predicted. ChatError says what cannot be used."""
    segments = render(
        dialogue.messages, dialogue.tools, thinking=dialogue.thinking, add_generation_prompt=False
    )  # fmt: skip
    media = [
        _picture(part.kind, part.source, dialogue.folder, processor)
        for message in dialogue.messages
        for part in message.media
    ]
    try:
        made = encode(tokenizer, segments, media)
    except TokenizerError as error:
        raise ChatError("messages", str(error)) from error
    return VisionDocument(
        tokens=np.array(made.tokens, dtype=np.int32), predicted=np.array(made.produced, dtype=bool), media=made.media
    )


def _picture(kind: str, source: str, folder: Path, processor: ProcessorConfig) -> Media:
    if kind != "image":
        raise ChatError("messages", f"hold a {kind}: only pictures are read from files of dialogues")
    try:
        if source[:5].lower() == "data:":
            content = base64.b64decode(source.partition(",")[2], validate=True)
            return image_media(load_image(content), processor)
        root = folder.resolve()
        path = (root / source).resolve()
        if not path.is_relative_to(root):
            raise ChatError("image_url", f"is {source!r}, which lies outside the folder of the file")
        return image_media(load_image(path), processor)
    except (binascii.Error, ValueError) as error:
        if isinstance(error, ChatError):
            raise
        raise ChatError("image_url", f"cannot be read: {error}") from error
