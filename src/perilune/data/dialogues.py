"""Dialogues for supervised fine-tuning: JSON lines in the OpenAI chat form, as tokens with a mask of what is learnt.

    {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}], "tools": [...]}

Pictures stand in messages as `image_url` parts and videos as `video_url` parts: `data:` URLs, or paths beneath the
folder of the file; the path of a video is an animated GIF or WebP, or a folder of frames. A line may have `"thinking":
false` (the assistant answers at once); without it, a dialogue whose assistant turns hold no reasoning is read so too. A
line that cannot be read, or whose pictures and videos cannot, is left out, counted by its reason and shown: one bad row
ends no run.
"""

import base64
import io
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from perilune.data.chat import Attachment, encode, parse_messages, parse_tools, render
from perilune.data.chat_messages import ChatError, ChatMessage, MediaPart, Tool
from perilune.data.image_files import Source
from perilune.data.images import (
    DEFAULT_PROCESSOR,
    ImageError,
    ProcessorConfig,
    image_media,
    load_frames,
    load_image,
    video_media,
)
from perilune.data.tokenizer import Tokenizer, TokenizerError
from perilune.data.vision_documents import VisionDocument

LARGEST_LINE = 64 << 20
SHOWN_PROBLEMS = 5


class DialogueError(ValueError):
    """A file that holds no dialogue."""


class UnusableMedia(ChatError):
    """A picture or video of a dialogue that cannot be used; `reason` is the short form that is counted."""

    def __init__(self, path: str, problem: str, *, reason: str) -> None:
        super().__init__(path, problem)
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class Dialogue:
    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...] = ()
    thinking: bool = True
    folder: Path = Path()
    """Where its pictures and videos lie."""

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
    media = [_attachment(part, dialogue.folder, processor) for message in dialogue.messages for part in message.media]
    try:
        made = encode(tokenizer, segments, media)
    except TokenizerError as error:
        raise ChatError("messages", str(error)) from error
    return VisionDocument(
        tokens=np.array(made.tokens, dtype=np.int32), predicted=np.array(made.produced, dtype=bool), media=made.media
    )


def _attachment(part: MediaPart, folder: Path, processor: ProcessorConfig) -> Attachment:
    field = f"{part.kind}_url"
    try:
        source = _source(part, folder)
        if part.kind == "image":
            return image_media(load_image(source, name=part.kind if isinstance(source, bytes) else None), processor)
        frames, times = load_frames(source, name=part.kind if isinstance(source, bytes) else None)
        return video_media(frames, times, processor)
    except ImageError as error:
        raise UnusableMedia(field, f"cannot be read: {error}", reason=error.reason) from error
    except (OSError, ValueError) as error:  # a name that no file can have, or text that is not base64
        raise UnusableMedia(field, f"cannot be read: {error}", reason="unreadable") from error


def _source(part: MediaPart, folder: Path) -> Source:
    if part.source[:5].lower() == "data:":
        return base64.b64decode(part.source.partition(",")[2], validate=True)
    root = folder.resolve()
    path = (root / part.source).resolve()
    inside = [path, *(each.resolve() for each in path.iterdir())] if part.kind == "video" and path.is_dir() else [path]
    if not all(each.is_relative_to(root) for each in inside):  # frames may be links
        raise ImageError(f"{part.source!r} lies outside the folder of the file", reason="outside the folder")
    return path
