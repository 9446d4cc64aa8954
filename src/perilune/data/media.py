"""Pictures as patches, and the tokens that hold their place in a text. numpy only.

A `Media` is one picture, or one chunk of at most four video frames, cut into patches of 14 x 14 pixels. The language
model sees one token for each 2 x 2 block of patches; the frames of a chunk are averaged, so a chunk costs as many
tokens as one of its frames:

    grid (t, h, w)  ->  t * h * w patches  ->  h * w / 4 tokens

In a document a picture is written

    <|media_begin|> "image" <|media_content|> <|media_pad|> x (h * w / 4) <|media_end|>

and the features of the vision tower take the place of the pads' embeddings, in order. A video is a row of chunks, each
after its time: "00:00:02.000" <|media_begin|> "video" <|media_content|> pads <|media_end|>.

What this module promises: pixels stay uint8 (a quarter of the memory and of the traffic; the device normalises them);
the number of pads in a prompt always equals the number of features its pictures give; text that a person wrote never
becomes a media token: only the words `<image>` and `<video>` of a prompt are replaced, and only when pictures come with
it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from perilune.data.tokenizer import Tokenizer

PATCH_SIZE = 14
MERGE_SIZE = 2  # patches per side of a token
FRAMES_PER_CHUNK = 4
Kind = Literal["image", "video"]
Grid = tuple[int, int, int]

IMAGE_PLACEHOLDER = "<image>"
VIDEO_PLACEHOLDER = "<video>"
_PLACEHOLDERS = re.compile(f"({re.escape(IMAGE_PLACEHOLDER)}|{re.escape(VIDEO_PLACEHOLDER)})")


class MediaError(ValueError):
    """Patches, grids or placeholders that do not fit together."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Media:
    """One picture or one chunk of video frames.

    pixels: uint8 [t * h * w, 3, 14, 14], frame by frame, row by row; red, green, blue; not normalised.
    grid: (t, h, w) in patches; 1 <= t <= 4, h and w even.
    """

    pixels: np.ndarray
    grid: Grid

    def __post_init__(self) -> None:
        check_grid(self.grid)
        t, h, w = self.grid
        expected = (t * h * w, 3, PATCH_SIZE, PATCH_SIZE)
        if self.pixels.dtype != np.uint8 or self.pixels.shape != expected:
            raise MediaError(
                f"pixels are {self.pixels.dtype} {list(self.pixels.shape)}; grid={self.grid!r} needs uint8"
                f" {list(expected)}"
            )

    @property
    def num_tokens(self) -> int:
        return tokens_of_grid(self.grid)


@dataclass(frozen=True, kw_only=True, eq=False)
class MediaBatch:
    """Several `Media` in one array: pixels uint8 [sum of patches, 3, 14, 14] and the grid of each."""

    pixels: np.ndarray
    grids: tuple[Grid, ...]

    @property
    def num_tokens(self) -> int:
        return sum(tokens_of_grid(grid) for grid in self.grids)


@dataclass(frozen=True, kw_only=True, eq=False)
class MediaPrompt:
    """Token ids of a text with pictures in it, and the pictures in the order of their pads."""

    tokens: list[int]
    media: tuple[Media, ...]


def tokens_of_grid(grid: Grid) -> int:
    """How many tokens a grid (t, h, w) costs: h * w / 4, whatever t."""
    _, h, w = grid
    return h * w // MERGE_SIZE**2


def check_grid(grid: Grid) -> None:
    """Raise MediaError unless `grid` is three integers (t, h, w) that a `Media` may have."""
    if len(grid) != 3 or not all(isinstance(n, int) for n in grid):
        raise MediaError(f"grid={grid!r} must be three integers (t, h, w)")
    t, h, w = grid
    if not 1 <= t <= FRAMES_PER_CHUNK:
        raise MediaError(f"grid={grid!r}: t={t} frames; a chunk has 1 to {FRAMES_PER_CHUNK}")
    if h < 1 or w < 1 or h % MERGE_SIZE or w % MERGE_SIZE:
        raise MediaError(f"grid={grid!r}: h={h} and w={w} must be positive and even; pad to multiples of 28")


def merge_media(media: Sequence[Media]) -> MediaBatch:
    """Put pictures one after another into one array; nothing is copied twice, an empty list gives an empty batch."""
    pixels = [item.pixels for item in media]
    empty = np.zeros((0, 3, PATCH_SIZE, PATCH_SIZE), dtype=np.uint8)
    return MediaBatch(pixels=np.concatenate(pixels or [empty]), grids=tuple(item.grid for item in media))


def media_tokens(tokenizer: Tokenizer, media: Media, kind: Kind = "image") -> list[int]:
    """The ids that stand for one picture or chunk: begin, the kind as text, content, one pad a token, end."""
    special = tokenizer.special_ids
    return [
        special["<|media_begin|>"],
        *tokenizer.encode(kind),
        special["<|media_content|>"],
        *[special["<|media_pad|>"]] * media.num_tokens,
        special["<|media_end|>"],
    ]


def video_tokens(tokenizer: Tokenizer, chunks: Sequence[tuple[str, Media]]) -> list[int]:
    """The ids of a video: for each chunk its time as text, then its pads."""
    ids: list[int] = []
    for timestamp, media in chunks:
        ids += tokenizer.encode(timestamp) + media_tokens(tokenizer, media, "video")
    return ids


def pad_positions(tokens: Sequence[int] | np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """int64: where in the flat `tokens` every <|media_pad|> is, in order."""
    return np.flatnonzero(np.asarray(tokens).reshape(-1) == tokenizer.special_ids["<|media_pad|>"]).astype(np.int64)


def prompt_tokens(
    tokenizer: Tokenizer,
    text: str,
    *,
    images: Sequence[Media] = (),
    videos: Sequence[Sequence[tuple[str, Media]]] = (),
    allow_special: bool = False,
) -> MediaPrompt:
    """Encode `text` with its pictures.

    Each `<image>` in `text` becomes the next of `images`, each `<video>` the next of `videos`. A kind that has no
    placeholder in the text is put before it, images first, so "What is this?" with one picture just works. A kind with
    some placeholders but not as many as there are pictures is an error. Without pictures nothing is replaced.
    """
    counts = {IMAGE_PLACEHOLDER: len(images), VIDEO_PLACEHOLDER: len(videos)}
    waiting: dict[str, list[tuple[list[int], list[Media]]]] = {
        IMAGE_PLACEHOLDER: [(media_tokens(tokenizer, image), [image]) for image in images],
        VIDEO_PLACEHOLDER: [(video_tokens(tokenizer, video), [media for _, media in video]) for video in videos],
    }
    parts = _split(text, [name for name, count in counts.items() if count])
    front: list[str] = []
    for name, count in counts.items():
        found = parts.count(name) if count else 0
        if count and not found:
            front += [name] * count
        elif found != count:
            raise MediaError(
                f"the prompt has {found} {name} but {count} given; write one {name} for each, or none to put all first"
            )
    tokens: list[int] = []
    order: list[Media] = []
    for part in front + parts:
        if part in waiting and counts[part]:
            ids, media = waiting[part].pop(0)
            tokens += ids
            order += media
        else:
            tokens += tokenizer.encode(part, allow_special=allow_special)
    num_pads, num_features = len(pad_positions(tokens, tokenizer)), sum(item.num_tokens for item in order)
    if num_pads != num_features:  # only allow_special=True lets a text spell a pad of its own
        raise MediaError(
            f"the prompt has {num_pads} <|media_pad|> for {num_features} picture tokens; remove the pads from the text"
        )
    return MediaPrompt(tokens=tokens, media=tuple(order))


def _split(text: str, names: list[str]) -> list[str]:
    """`text` cut at the placeholders of `names`; other placeholders stay ordinary text, so words are not torn."""
    parts: list[str] = [""]
    for part in _PLACEHOLDERS.split(text):
        if part in names:
            parts += [part, ""]
        else:
            parts[-1] += part
    return [part for part in parts if part]
