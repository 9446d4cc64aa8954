"""The types of the visual corpus: what a sample holds, and what a config may ask for."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, get_args

from perilune.data.scenes.shapes import COLOURS, Box, Shape

SampleKind = Literal["scene", "text", "chart", "layout", "icon", "html", "animation"]
Task = Literal["caption", "count", "box", "ocr", "spatial", "chart", "colour", "motion"]
Primitive = Literal["rect", "circle", "ellipse", "line", "triangle", "diamond", "pentagon", "hexagon", "star"]

SIZE_STEP = 28  # two patches of 14 pixels: the vision tower merges 2 x 2 of them into one token


MIN_SIDES: dict[str, int] = {"text": 84, "chart": 112, "layout": 112, "html": 84}  # what must fit beside each other


class ScenesError(ValueError):
    """A config that cannot be followed, or an icon file that cannot be read."""


@dataclass(frozen=True, kw_only=True)
class Question:
    prompt: str
    answer: str
    task: Task


@dataclass(frozen=True, kw_only=True)
class PlacedText:
    """A string that is drawn, and the box of its strokes."""

    text: str
    box: Box


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One picture (or page, or animation) with its source and what is true of it."""

    kind: SampleKind
    size: tuple[int, int]  # width, height
    shapes: tuple[Shape, ...]  # bottom first; of an animation: those of the first frame
    svg: str = ""  # the source; of an animation: the animated source; of a page: its exact lowering to SVG
    html: str = ""  # the source of a page
    frames: tuple[str, ...] = ()  # of an animation: the still SVG of each frame
    background: str = "white"
    questions: tuple[Question, ...] = ()
    caption: str = ""
    texts: tuple[PlacedText, ...] = ()  # what is written in the picture, in reading order
    values: tuple[tuple[str, int], ...] = ()  # of a chart: label and value of each mark
    origin: str = ""  # of an icon: set/style/name and licence; of a page from a file: who drew it
    png: bytes = field(default=b"", repr=False)  # of a page from a file: its picture, which `svg` need not give

    @property
    def source(self) -> str:
        """What a model writes when asked for the picture's code."""
        return self.html or self.svg


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A sample without its questions, which are made once it is known that the sample is used."""

    sample: Sample
    questions: Callable[[], tuple[Question, ...]]


@dataclass(frozen=True, kw_only=True)
class ScenesConfig:
    """Which samples are made. Every field can be set from a recipe or the command line."""

    kinds: tuple[SampleKind, ...] = ("scene",)
    weights: tuple[float, ...] = ()  # one per kind; empty: equal shares
    sizes: tuple[tuple[int, int], ...] = ((112, 112),)  # width, height: multiples of 28
    min_shapes: int = 1
    max_shapes: int = 6
    primitives: tuple[Primitive, ...] = ("rect", "circle", "ellipse", "line", "triangle", "diamond", "pentagon")
    colours: tuple[str, ...] = (
        *("red", "orange", "yellow", "green", "cyan", "blue", "purple", "pink", "brown", "gray", "black"),
    )
    background_share: float = 0.15  # of plain scenes that are not on white
    grid: int = 1  # plain scenes: every coordinate and length is a multiple of it; 1: any whole pixel
    min_frames: int = 4  # of animations, which have an even number of frames
    max_frames: int = 16
    max_questions: int = 4
    icons: str = (
        ""  # a folder of .svg files (one folder per set) or a .jsonl or .jsonl.zst file; needed for kind "icon"
    )
    icon_sets: tuple[str, ...] = ()  # train on these; empty: on all
    icon_held_out_sets: tuple[str, ...] = ()  # test on these; empty: on icons of icon_sets that training never shows
    icon_styles: tuple[str, ...] = ("outline", "icons")
    icon_max_characters: int = 600  # longer sources are left out
    # a file that `python -m perilune.data.scenes.prerender` wrote: pages with the pictures a browser made of them, for
    # kind "html"; empty: pages are made on the fly
    pages: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        known = get_args(SampleKind)
        if not self.kinds or not set(self.kinds) <= set(known):
            raise ScenesError(f"kinds is {self.kinds!r}: expected some of {', '.join(known)}")
        if self.weights and (len(self.weights) != len(self.kinds) or min(self.weights) < 0 or sum(self.weights) <= 0):
            raise ScenesError(f"weights is {self.weights!r}: expected {len(self.kinds)} shares, one for each of kinds")
        if not self.sizes or any(side < SIZE_STEP or side % SIZE_STEP for size in self.sizes for side in size):
            raise ScenesError(f"sizes is {self.sizes!r}: expected (width, height) in multiples of {SIZE_STEP}")
        for kind in set(self.kinds) & set(MIN_SIDES):
            if min(side for size in self.sizes for side in size) < MIN_SIDES[kind]:
                raise ScenesError(
                    f"sizes is {self.sizes!r}: kind {kind!r} needs sides of at least {MIN_SIDES[kind]} pixels"
                )
        if not 1 <= self.min_shapes <= self.max_shapes:
            raise ScenesError(
                f"min_shapes, max_shapes are {self.min_shapes!r}, {self.max_shapes!r}: expected 1 <= min <= max"
            )
        if not 4 <= self.min_frames <= self.max_frames or self.max_frames // 2 * 2 < self.min_frames:
            raise ScenesError(
                f"min_frames, max_frames are {self.min_frames!r}, {self.max_frames!r}: "
                "expected 4 <= min <= max with an even number among them"
            )
        unknown = set(self.colours) - set(COLOURS)
        if unknown or len(self.colours) < 3:
            raise ScenesError(f"colours is {self.colours!r}: expected at least three of {', '.join(COLOURS)}")
        if not self.primitives or not set(self.primitives) <= set(get_args(Primitive)):
            raise ScenesError(f"primitives is {self.primitives!r}: expected some of {', '.join(get_args(Primitive))}")
        if self.grid < 1:
            raise ScenesError(f"grid is {self.grid!r}: expected a number of pixels, 1 or more")
        if not 0 <= self.background_share <= 1:
            raise ScenesError(f"background_share is {self.background_share!r}: expected a number from 0 to 1")
        if self.pages and "html" not in self.kinds:
            raise ScenesError(f"pages is {self.pages!r}, but kinds is {self.kinds!r}: pages are of kind 'html'")
        if "icon" in self.kinds and not self.icons:
            raise ScenesError("icons is '': kind 'icon' needs a folder of .svg files or a .jsonl(.zst) file of icons")
