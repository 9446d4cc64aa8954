"""Pictures and videos of a chat request: from their addresses to patches.

`data:` URLs are read here, in base64 and within the limits; nothing else is fetched unless whoever starts the server
gives it a `Fetch`, which then has to guard every address itself (see `image_urls`). Every error names the place of the
picture in the body and never repeats its content.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence

from perilune.data.chat import Attachment
from perilune.data.chat_messages import ChatMessage, MediaPart
from perilune.data.images import ProcessorConfig, image_media, load_frames, load_image, video_media
from perilune.serve.limits import Limits
from perilune.serve.refusals import Refusal, shown

Fetch = Callable[[str, int], Awaitable[bytes]]
"""(url, max_bytes) -> content; raises ValueError with the reason it did not."""
DATA_URL = re.compile(r"data:(?:[\w.+-]+/[\w.+-]+)?((?:;[\w.+-]+=[\w.+-]+)*);base64,", re.ASCII)


def places(messages: Sequence[ChatMessage]) -> Iterator[tuple[str, MediaPart]]:
    """Every picture and video in order, with its path."""
    for number, message in enumerate(messages):
        for index, part in enumerate(message.parts):
            if isinstance(part, MediaPart):
                yield f"messages[{number}].content[{index}].{part.kind}_url.url", part


async def fetched(messages: Sequence[ChatMessage], limits: Limits, fetch: Fetch | None) -> dict[str, bytes]:
    """Contents of the pictures that are not `data:` URLs, by path."""
    contents: dict[str, bytes] = {}
    for path, part in places(messages):
        if part.source[:5].lower() == "data:":
            continue
        if fetch is None:
            raise Refusal(
                f"{path} is {shown(part.source)}: this server takes data: URLs only (data:image/png;base64,...)",
                param=path,
                code="invalid_image_url",
            )
        try:
            contents[path] = await fetch(part.source, limits.image.max_bytes)
        except ValueError as error:
            raise Refusal(f"{path} could not be fetched: {error}", param=path, code="invalid_image_url") from None
    return contents


def attachments(
    messages: Sequence[ChatMessage],
    contents: dict[str, bytes],
    limits: Limits,
    processor: ProcessorConfig,
    max_tokens: int,
) -> list[Attachment]:
    """Patches of every picture and video, in order; all together at most `max_tokens` tokens. Slow: it decodes."""
    found: list[Attachment] = []
    tokens = 0
    for path, part in places(messages):
        content = contents.get(path)
        if content is None:
            content = _decoded(path, part.source, limits)
        try:
            if part.kind == "image":
                picture = image_media(load_image(content, limits.image, name="picture"), processor)
                found.append(picture)
                tokens += picture.num_tokens
            else:
                frames, times = load_frames(content, limits.image, name="video")
                video = video_media(frames, times, processor)
                found.append(video)
                tokens += sum(chunk.num_tokens for _, chunk in video)
        except ValueError as error:
            raise Refusal(f"{path} cannot be used: {error}", param=path, code="invalid_image") from None
        if tokens > max_tokens:
            raise Refusal(
                f"the pictures up to {path} have {tokens:,} tokens, and the context is {max_tokens:,} tokens",
                param=path,
                code="context_length_exceeded",
            )
    return found


def _decoded(path: str, url: str, limits: Limits) -> bytes:
    match = DATA_URL.match(url, endpos=min(len(url), 256))
    if match is None:
        raise Refusal(
            f"{path} is {shown(url[:40])}, expected data:image/png;base64,...", param=path, code="invalid_image_url"
        )
    if (len(url) - match.end()) * 3 // 4 - 2 > limits.image.max_bytes:
        raise Refusal(f"{path} has more than {limits.image.max_bytes:,} bytes", param=path, code="image_too_large")
    try:
        return base64.b64decode(url[match.end() :], validate=True)
    except (binascii.Error, ValueError):
        raise Refusal(f"{path} is not base64 after its comma", param=path, code="invalid_image_url") from None


__all__ = ["Fetch", "attachments", "fetched", "places"]
