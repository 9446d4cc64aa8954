"""Icons of real sets (Tabler, Feather, Lucide, ...) in the dialect: one path each, on the grid of the sample.

    a folder      one folder per set, .svg files inside it (a folder of files is one set of the folder's name); a file
                  LICENSE beside them is not read: the licence field stays empty
    a .jsonl or   one icon a line, with the fields "source" (owner/set), "licence", "name", "style" (outline, filled,
    .jsonl.zst    icons) and "svg"

Every element becomes path data, scaled and rounded to whole pixels; strokes get one colour, the rounded width and a
round pen, and are written in one order (icon_parts.py). What this cannot say (transforms, several colours, ellipses
that are turned, sources longer than `icon_max_characters`) is left out and counted by reason in `IconPool.skipped`. So
is what nobody meant to draw: a file that cannot be read, a square, a pen or a point out of all proportion. Icons are
drawn in the training process, where a coordinate that the renderer does not bear would end the run.

Of four training samples one is an icon as it is; the others are turned or mirrored, and of these half are put together
from the lines of two. Held-out samples are icons as they are.

Sets borrow from each other, so the test side gives way: a held-out icon whose drawing nearly equals one of training
(see `_cells`) is dropped, and counted too. A turned or mixed drawing that nearly equals a held-out icon is not shown.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from perilune.data.generated import SplitMix
from perilune.data.scenes.icon_parts import WAYS, in_order, mixed, turned
from perilune.data.scenes.paths import PathError, Segment, flatten, parse_path, write_path
from perilune.data.scenes.record_files import read_lines
from perilune.data.scenes.sample import Draft, Question, Sample, ScenesConfig, ScenesError
from perilune.data.scenes.shapes import Shape, luma
from perilune.data.scenes.svg import Picture, write_svg

GRID = 112  # where drawings are compared and held-out icons chosen, whatever the size of a sample
MAX_LUMA = 175  # yellow and cyan lines are hard to see on white
# Two drawings are the same when this share of the cells of each lies in or beside cells of the other. It drops too much
# rather than too little: of a fork of a set, icons that were redrawn a little go too.
NEAR = 0.97
MAX_BYTES = 64 * 1024  # of one icon; the longest of the known sets has 5,236
MAX_SPAN = 4096.0
# In sides of the icon's square: points of known sets lie within 1.5 of it; the radii of arcs that are nearly straight
# reach 372.
MAX_POINT = 4.0
MAX_RADIUS = 500.0
MIN_RADIUS = 1e-4  # squares of what is smaller vanish
MAX_NAME = 100
_STEPS = np.linspace(0, 1, 60)  # along a line that crosses the whole grid: under half a cell
_TAG = re.compile(r"<([A-Za-z][\w:-]*)((?:\s+[\w:-]+\s*=\s*(?:\"[^\"]*\"|'[^']*'))*)\s*/?>")
_ATTRIBUTE = re.compile(r"([\w:-]+)\s*=\s*(?:\"([^\"]*)\"|'([^']*)')")
_DRAWN = {"path", "line", "polyline", "polygon", "circle", "ellipse", "rect"}
_IGNORED = {"svg", "title", "desc"}
_REFUSED = {"transform", "style", "opacity", "clip-path", "mask", "filter", "stroke-dasharray"}
_ASK = ("What is the icon's name?", "Which icon is this?", "Name the icon.")


@dataclass(frozen=True, kw_only=True)
class Icon:
    """segments are absolute, in units of a square of side `span`."""

    set_name: str
    licence: str
    name: str
    style: str
    span: float
    stroke_width: float  # 0: the icon is filled
    segments: tuple[Segment, ...]

    def data(self, side: int) -> str:
        """Canonical path data on a square of `side` pixels."""
        return write_path([_scale(segment, side / self.span) for segment in self.segments])

    @property
    def origin(self) -> str:
        return f"{self.set_name}/{self.style}/{self.name} {self.licence}".strip()


@dataclass(frozen=True, kw_only=True)
class IconPool:
    train: tuple[Icon, ...]
    held_out: tuple[Icon, ...]
    skipped: tuple[tuple[str, int], ...]  # reason, count
    held_out_drawings: "Drawings" = field(repr=False, compare=False)  # follow from held_out


@dataclass(frozen=True, kw_only=True, eq=False)
class Drawings:
    """Many drawings as the cells they pass through, float32 [n, 625]; `grown` with neighbours; `sizes` how many."""

    cells: np.ndarray
    grown: np.ndarray
    sizes: np.ndarray

    @classmethod
    def of(cls, icons: Sequence[Icon]) -> "Drawings":
        cells = np.stack([_cells(icon) for icon in icons])
        return cls(cells=cells, grown=np.stack([_grown(each) for each in cells]), sizes=cells.sum(axis=1))

    def near(self, icons: Sequence[Icon]) -> list[bool]:
        """Of each icon, whether one of these drawings nearly equals it."""
        found: list[bool] = []
        for first in range(0, len(icons), 256):  # products of a few MB
            asked = Drawings.of(icons[first : first + 256])
            within = asked.cells @ self.grown.T / asked.sizes[:, None]
            around = asked.grown @ self.cells.T / self.sizes
            found.extend((np.minimum(within, around).max(axis=1) >= NEAR).tolist())
        return found


class _Unfit(ValueError):
    """An icon the dialect cannot say; the message is the reason that is counted."""


# Reading -------------------------------------------------------------------------------------------------------------


def read_icons(place: str, skipped: Counter[str] | None = None) -> Iterator[dict[str, str]]:
    """The records of a folder or file; ScenesError names what is wrong.

    Of a folder, files that cannot be read are left out; `skipped` counts their reasons.
    """
    path = Path(place)
    if path.is_dir():
        skipped = Counter() if skipped is None else skipped
        for file in sorted(path.rglob("*.svg")):
            relative = file.relative_to(path)
            parts = relative.parts if len(relative.parts) > 1 else (path.name, *relative.parts)
            style = parts[1] if len(parts) > 2 else "outline"
            try:
                svg = _read_svg(file)
            except _Unfit as unfit:
                skipped[str(unfit)] += 1
                continue
            yield {"source": parts[0], "licence": "", "name": file.stem, "style": style, "svg": svg}
        return
    if not path.is_file():
        raise ScenesError(f"icons is {place!r}: expected a folder of .svg files or a .jsonl(.zst) file")
    for number, line in enumerate(read_lines(path, "icons"), 1):
        try:
            record = json.loads(line)
            yield {key: str(record[key]) for key in ("source", "licence", "name", "style", "svg")}
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ScenesError(
                f"icons {place!r} line {number}: {error!r}; expected source, licence, name, style, svg"
            ) from None


def _read_svg(file: Path) -> str:
    """The text of one file of a folder that somebody else filled: it may be a folder, a pipe or no text at all."""
    from perilune.data.image_files import read_source  # reads with Pillow, which scenes without icons need not
    from perilune.data.image_limits import ImageError, ImageLimits

    try:
        _, content = read_source(file, ImageLimits(max_bytes=MAX_BYTES))
        return content.decode("utf-8")
    except ImageError as error:
        raise _Unfit("too many bytes" if error.reason == "too many bytes" else "unreadable file") from None
    except UnicodeDecodeError:
        raise _Unfit("not UTF-8") from None


def normalise(record: dict[str, str]) -> Icon:
    """An icon as one list of segments, or ValueError with the reason."""
    if len(record["svg"]) > MAX_BYTES:
        raise _Unfit("too many bytes")
    if not record["name"].isprintable() or len(record["name"]) > MAX_NAME:
        raise _Unfit("name")
    for opens, closes in (("<!--", "-->"), ("<?", "?>")):
        if record["svg"].rfind(opens) > record["svg"].rfind(closes):  # each would be searched to the end of the text
            raise _Unfit("declarations or entities")
    svg = re.sub(r"<!--.*?-->|<\?.*?\?>", "", record["svg"], flags=re.DOTALL)
    if "<!" in svg or "&" in svg:
        raise _Unfit("declarations or entities")
    span, stroke_width = 24.0, 2.0
    filled = False
    segments: list[Segment] = []
    for match in _TAG.finditer(svg):
        tag = match[1]
        given = {name: double or single for name, double, single in _ATTRIBUTE.findall(match[2])}
        if tag not in _DRAWN | _IGNORED:
            raise _Unfit(f"element {tag}")
        if refused := _REFUSED & set(given):
            raise _Unfit(f"attribute {min(refused)}")
        if tag == "svg":
            span, stroke_width, filled = _read_root(given)
        elif tag in _DRAWN:
            if given.get("stroke") == "none" and given.get("fill") == "none":
                continue  # the invisible square by which some sets keep their size
            if not filled and given.get("fill", "none") != "none":
                raise _Unfit("filled parts in an outline icon")
            segments.extend(_segments(tag, given))
    if not segments:
        raise _Unfit("nothing drawn")
    _check_proportions(span, None if filled else stroke_width, segments)
    return Icon(
        set_name=record["source"],
        licence=record["licence"],
        name=record["name"],
        style=record["style"],
        span=span,
        stroke_width=0.0 if filled else stroke_width,
        segments=tuple(segments) if filled else in_order(segments),
    )


def _read_root(given: dict[str, str]) -> tuple[float, float, bool]:
    view = given.get("viewBox", "0 0 24 24").replace(",", " ").split()
    if len(view) != 4 or view[2] != view[3] or (float(view[0]), float(view[1])) != (0, 0):
        raise _Unfit("viewBox is not a square from 0 0")
    return float(view[2]), float(given.get("stroke-width", 2)), given.get("fill", "black") != "none"


def _check_proportions(span: float, stroke_width: float | None, segments: Sequence[Segment]) -> None:
    """Comparisons that nan fails too."""
    if not 1 <= span <= MAX_SPAN:
        raise _Unfit(f"viewBox is not a square of 1 to {MAX_SPAN:g}")
    if stroke_width is not None and not 0 < stroke_width <= span:
        raise _Unfit("stroke out of range")
    for kind, numbers in segments:
        points = numbers
        if kind == "A":
            radii, turn, points = numbers[:2], numbers[2], numbers[5:]
            if not all(radius == 0 or MIN_RADIUS * span <= abs(radius) <= MAX_RADIUS * span for radius in radii):
                raise _Unfit("radius out of range")
            if not math.isfinite(turn):
                raise _Unfit("number")
        if not all(abs(point) <= MAX_POINT * span for point in points):
            raise _Unfit("point out of range")


def _segments(tag: str, given: dict[str, str]) -> list[Segment]:
    def number(name: str) -> float:
        return float(given.get(name, "0"))

    if tag == "path":
        found = parse_path(given.get("d", ""))
        if any(kind == "A" and numbers[2] % 180 and numbers[0] != numbers[1] for kind, numbers in found):
            raise _Unfit("turned ellipse")
        return found
    if tag == "line":
        return [("M", (number("x1"), number("y1"))), ("L", (number("x2"), number("y2")))]
    if tag in ("polyline", "polygon"):
        found = parse_path("M" + given.get("points", ""))
        return found + ([("Z", ())] if tag == "polygon" else [])
    if tag in ("circle", "ellipse"):
        x, y = number("cx"), number("cy")
        rx, ry = (number("r"), number("r")) if tag == "circle" else (number("rx"), number("ry"))
        arcs: list[Segment] = [("A", (rx, ry, 0.0, 1.0, 0.0, x + side * rx, y)) for side in (1, -1)]
        return [("M", (x - rx, y)), *arcs]
    x, y, w, h = (number(name) for name in ("x", "y", "width", "height"))
    r = min(float(given.get("rx", given.get("ry", "0"))), w / 2, h / 2)
    if not r:
        return parse_path(f"M{x} {y}h{w}v{h}h{-w}z")
    arc = f"a{r} {r} 0 0 1"
    top, side = w - 2 * r, h - 2 * r
    return parse_path(
        f"M{x + r} {y}h{top}{arc} {r} {r}v{side}{arc} {-r} {r}h{-top}{arc} {-r} {-r}v{-side}{arc} {r} {-r}z"
    )


def _scale(segment: Segment, factor: float) -> Segment:
    kind, numbers = segment
    if kind != "A":
        return kind, tuple(factor * number for number in numbers)
    rx, ry, turn, large, sweep, x, y = numbers
    if turn % 180:  # of a circle, which looks the same at every turn
        turn = 0.0
    return kind, (factor * rx, factor * ry, turn, large, sweep, factor * x, factor * y)


# Pools ---------------------------------------------------------------------------------------------------------------


def icon_pool(config: ScenesConfig) -> IconPool:
    """The icons a config trains and tests on; read once per process."""
    path = Path(config.icons)
    stamp = path.stat().st_mtime_ns if path.exists() else 0
    return _pool(
        *(config.icons, stamp, config.icon_sets, config.icon_held_out_sets),
        *(config.icon_styles, config.icon_max_characters),
    )


@lru_cache(maxsize=4)
def _pool(
    place: str, stamp: int, sets: tuple[str, ...], test_sets: tuple[str, ...], styles: tuple[str, ...], longest: int
) -> IconPool:
    from perilune.data.scenes.make import is_held_out

    skipped: Counter[str] = Counter()
    train: dict[str, Icon] = {}
    held_out: dict[str, Icon] = {}
    for record in read_icons(place, skipped):
        tests = any(name in record["source"] for name in test_sets)
        if record["style"] not in styles or not (tests or not sets or any(name in record["source"] for name in sets)):
            continue
        try:
            icon = normalise(record)
            data = icon.data(GRID)
        except (_Unfit, PathError) as error:
            skipped[str(error) if isinstance(error, _Unfit) else "path data"] += 1
            continue
        except ValueError:
            skipped["number"] += 1
            continue
        if not data or len(data) > longest:
            skipped["nothing drawn" if not data else "too long"] += 1
            continue
        (held_out if tests or (not test_sets and is_held_out(data)) else train).setdefault(data, icon)
    kept, dropped = _without_near(train, held_out)
    if dropped:
        skipped["held out, but nearly equal to one of training"] += dropped
    if not train or not kept:
        raise ScenesError(
            f"icons {place!r} give {len(train)} for training and {len(kept)} for testing with icon_sets={sets!r}, "
            f"icon_held_out_sets={test_sets!r}, icon_styles={styles!r}: expected some of each; skipped: {dict(skipped)}"
        )
    return IconPool(
        train=tuple(train.values()),
        held_out=kept,
        skipped=tuple(sorted(skipped.items())),
        held_out_drawings=Drawings.of(kept),
    )


def _without_near(train: dict[str, Icon], held_out: dict[str, Icon]) -> tuple[tuple[Icon, ...], int]:
    if not train or not held_out:
        return tuple(held_out.values()), 0
    asked = tuple(held_out.values())
    near = Drawings.of(tuple(train.values())).near(asked)
    kept = tuple(icon for icon, is_near in zip(asked, near) if not is_near)
    return kept, len(asked) - len(kept)


def _cells(icon: Icon) -> np.ndarray:
    """float32 [25 * 25]: the cells of a coarse grid that the icon's lines pass through.

    Icons are drawn on a grid of 24 units: cells lie around its points, so that a line on the grid is far from a border.
    """
    cells = np.zeros((25, 25), dtype=np.float32)
    for line in flatten([_scale(segment, 24 / icon.span) for segment in icon.segments], steps=6):
        points = np.asarray(line)
        along = points[:-1, None] + (points[1:] - points[:-1])[:, None] * _STEPS[:, None]
        places = np.clip(along.reshape(-1, 2) + 0.5, 0, 24).astype(np.intp)
        cells[places[:, 1], places[:, 0]] = 1
    return cells.ravel()


def _grown(cells: np.ndarray) -> np.ndarray:
    """The cells and their eight neighbours."""
    grid = np.pad(cells.reshape(25, 25), 1)
    rows = np.maximum(np.maximum(grid[:-2], grid[1:-1]), grid[2:])
    return np.maximum(np.maximum(rows[:, :-2], rows[:, 1:-1]), rows[:, 2:]).ravel()


# Making --------------------------------------------------------------------------------------------------------------


def icon_scene(dice: SplitMix, config: ScenesConfig, size: tuple[int, int], *, held_out: bool) -> Draft:
    """One icon as large as fits, in a dark colour on white."""
    pool = icon_pool(config)
    known = icon = dice.choose(pool.held_out if held_out else pool.train)
    if not held_out and dice.below(4):
        icon = _changed(icon, pool, dice, config.icon_max_characters)
    as_it_is = icon is known
    side = min(size)
    colour = dice.choose([c for c in config.colours if luma(c) <= MAX_LUMA] or ["black"])
    data = icon.data(side)
    if icon.stroke_width:
        width = max(1, round(icon.stroke_width * side / icon.span))
        shape = Shape(kind="path", path=data, stroke=colour, stroke_width=width)
    else:
        shape = Shape(kind="path", path=data, fill=colour)
    picture = Picture(width=size[0], height=size[1], shapes=(shape,), round_pen=bool(icon.stroke_width))
    words = icon.name.replace("-", " ")
    colours = Question(prompt="What colour is the icon?", answer=colour, task="colour")
    asked: tuple[Question, ...] = (colours,)
    if as_it_is:  # a mirrored arrow is not what its name says
        asked = (Question(prompt=dice.choose(_ASK), answer=words, task="caption"), colours)
    sample = Sample(
        kind="icon",
        size=size,
        shapes=picture.shapes,
        svg=write_svg(picture),
        caption=f"A {colour} icon: {words}." if as_it_is else f"A {colour} icon.",
        origin=icon.origin,
    )
    return Draft(sample=sample, questions=lambda: asked[: config.max_questions])


def _changed(icon: Icon, pool: IconPool, dice: SplitMix, longest: int) -> Icon:
    """The icon turned, mirrored or mixed with another; itself where that comes too near to a held-out one."""
    segments = icon.segments
    other = dice.choose(pool.train)
    same_pen = icon.stroke_width and (other.span, other.stroke_width) == (icon.span, icon.stroke_width)
    if same_pen and dice.below(2):
        segments = mixed(segments, turned(other.segments, dice.below(WAYS), icon.span), dice)
    segments = turned(segments, dice.below(WAYS), icon.span)
    found = replace(
        icon, segments=in_order(segments) if icon.stroke_width else segments, style=f"{icon.style}, changed"
    )
    if len(found.data(GRID)) > longest or any(pool.held_out_drawings.near([found])):
        return icon
    return found
