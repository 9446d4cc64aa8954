"""Animations of 4 to 16 frames: shapes that move, grow, turn or change colour, as SVG with SMIL.

A shape holds its animations as children (grammar as in svg.py, N and K in seconds, all numbers integers):

    `<animate attributeName="cx" to="90" dur="Ns"/>`                                    an attribute goes to a value
    `<animateTransform attributeName="transform" type="translate" from="0 0" to="DX DY" dur="Ns"/>`           it moves
    `<animateTransform attributeName="transform" type="rotate" from="0 X Y" to="ANGLE X Y" dur="Ns"/>`        it turns
    `<set attributeName="fill" to="COLOUR" begin="Ks"/>`                                            it changes colour

An animation of n frames (n even) lasts n / 2 seconds; frame i shows time i / 2 s. At frame i a value has gone i / n of
its way, and ways are multiples of n, so every frame is again made of integers. All animations run from time 0 to the
end, so nothing depends on what happens after them.
"""

import re
from dataclasses import dataclass, replace

from perilune.data.generated import SplitMix
from perilune.data.scenes.plain import plain_scene
from perilune.data.scenes.questions import describe, listing, scene_questions
from perilune.data.scenes.sample import Draft, Question, Sample, ScenesConfig
from perilune.data.scenes.shapes import COLOURS, MIN_CONTRAST, Shape, box, contrast
from perilune.data.scenes.svg import DialectError, Element, Picture, opening, read_elements, read_shape, write_shape

FRAMES_PER_SECOND = 2
_TRIES = 40
_INTEGER = re.compile(r"-?[0-9]{1,5}")
_TIME = re.compile(r"[0-9]{1,2}s")

_NUMBER_OF = {
    "rect": ("x", "y", "width", "height"),
    "circle": ("cx", "cy", "r"),
    "ellipse": ("cx", "cy", "rx", "ry"),
    "line": ("x1", "y1", "x2", "y2"),
}
_WHAT = ("What happens to the {}?", "What does the {} do?", "How does the {} change?")
_MOVING = ("Which shapes stay as they are?", "What does not change?")


@dataclass(frozen=True, kw_only=True)
class Change:
    """attribute: a number of the shape (goes to `to[0]`), "translate" (by `to`), "rotate" (angle, x, y) or "colour"."""

    attribute: str
    to: tuple[int, ...] = ()
    colour: str = ""
    begin: int = 0  # seconds, of a colour


@dataclass(frozen=True, kw_only=True)
class Animation:
    picture: Picture
    changes: tuple[tuple[Change, ...], ...]  # one tuple per shape
    num_frames: int


# Writing, reading, frames --------------------------------------------------------------------------------------------


def write_animation(animation: Animation) -> str:
    seconds = animation.num_frames // FRAMES_PER_SECOND
    shapes = zip(animation.picture.shapes, animation.changes)
    body = (write_shape(shape, "".join(_write(shape, c, seconds) for c in changes)) for shape, changes in shapes)
    return opening(animation.picture) + "".join(body) + "</svg>"


def _write(shape: Shape, change: Change, seconds: int) -> str:
    if change.attribute == "colour":
        paint = "stroke" if shape.kind == "line" else "fill"
        return f'<set attributeName="{paint}" to="{change.colour}" begin="{change.begin}s"/>'
    to = " ".join(map(str, change.to))
    if change.attribute in ("translate", "rotate"):
        start = " ".join(map(str, (0, *change.to[1:]))) if change.attribute == "rotate" else "0 0"
        kind = f'attributeName="transform" type="{change.attribute}" from="{start}"'
        return f'<animateTransform {kind} to="{to}" dur="{seconds}s"/>'
    return f'<animate attributeName="{change.attribute}" to="{to}" dur="{seconds}s"/>'


def parse_animation(source: str) -> Animation:
    """The animation a source of the dialect describes, or DialectError."""
    width, height, round_pen, elements = read_elements(source)
    background = "white"
    if elements and elements[0].tag == "rect" and "x" not in elements[0].attributes:
        background = elements[0].attributes.get("fill", "")
        elements = elements[1:]
        if background not in COLOURS:
            raise DialectError(f"background has fill={background!r}: expected one of {', '.join(COLOURS)}")
    shapes = tuple(read_shape(replace(element, children=())) for element in elements)
    seconds: set[int] = set()
    changes = tuple(
        tuple(_read(shape, child, seconds) for child in element.children) for shape, element in zip(shapes, elements)
    )
    if len(seconds) > 1:
        raise DialectError(f"dur is {sorted(seconds)} seconds: expected the same for every animation")
    picture = Picture(width=width, height=height, shapes=shapes, background=background, round_pen=round_pen)
    # Colours alone leave the length open; they then last until one second after the last.
    last = max((change.begin for group in changes for change in group), default=0) + 1
    return Animation(
        picture=picture, changes=changes, num_frames=FRAMES_PER_SECOND * (seconds.pop() if seconds else last)
    )


def _read(shape: Shape, element: Element, seconds: set[int]) -> Change:
    given = element.attributes
    where = f"<{element.tag}> at {element.position}"
    paint = "stroke" if shape.kind == "line" else "fill"
    try:
        if element.tag == "set" and set(given) == {"attributeName", "to", "begin"} and given["attributeName"] == paint:
            if given["to"] in COLOURS:
                return Change(attribute="colour", colour=given["to"], begin=_seconds(given["begin"]))
        elif element.tag == "animate" and set(given) == {"attributeName", "to", "dur"}:
            seconds.add(_seconds(given["dur"], least=1))
            if given["attributeName"] in _NUMBER_OF.get(shape.kind, ()):
                return Change(attribute=given["attributeName"], to=(_whole(given["to"]),))
        elif element.tag == "animateTransform" and set(given) == {"attributeName", "type", "from", "to", "dur"}:
            seconds.add(_seconds(given["dur"], least=1))
            to = tuple(map(_whole, given["to"].split(" ")))
            start = {"translate": "0 0", "rotate": " ".join(map(str, (0, *to[1:])))}.get(given["type"])
            lengths = {"translate": 2, "rotate": 3}
            if given["from"] == start and len(to) == lengths[given["type"]] and given["attributeName"] == "transform":
                return Change(attribute=given["type"], to=to)
    except ValueError as error:
        raise DialectError(f"{where}: {error}") from None
    raise DialectError(f"{where} has {given!r}: expected animate, animateTransform or set as the dialect writes them")


def _whole(text: str) -> int:
    if not _INTEGER.fullmatch(text):
        raise ValueError(f"number is {text[:20]!r}, expected an integer")
    return int(text)


def _seconds(text: str, least: int = 0) -> int:
    if not _TIME.fullmatch(text) or not least <= int(text[:-1]) <= 60:
        raise ValueError(f"time is {text[:20]!r}, expected whole seconds such as '4s'")
    return int(text[:-1])


def frame_svg(animation: Animation, index: int) -> str:
    """The still SVG of frame `index`: the dialect, and `transform="rotate(...)"` on a shape that turns."""
    body = []
    for shape, changes in zip(animation.picture.shapes, animation.changes):
        moved, turn = _at(shape, changes, index, animation.num_frames)
        source = write_shape(moved)
        body.append(source if not turn else f'{source[:-2]} transform="rotate({turn})"/>')
    return opening(animation.picture) + "".join(body) + "</svg>"


def frames(animation: Animation) -> tuple[str, ...]:
    return tuple(frame_svg(animation, index) for index in range(animation.num_frames))


def _at(shape: Shape, changes: tuple[Change, ...], index: int, count: int) -> tuple[Shape, str]:
    numbers, turn = list(shape.numbers), ""
    paint = {"fill": shape.fill, "stroke": shape.stroke}
    for change in changes:
        if change.attribute == "colour":
            if index >= change.begin * FRAMES_PER_SECOND:
                paint["stroke" if shape.kind == "line" else "fill"] = change.colour
        elif change.attribute == "translate":
            numbers = [n + change.to[i % 2] * index // count for i, n in enumerate(numbers)]
        elif change.attribute == "rotate":
            angle, x, y = change.to
            turn = f"{angle * index // count} {x} {y}" if index else ""
        else:
            which = _NUMBER_OF[shape.kind].index(change.attribute)
            start = shape.numbers[which]
            numbers[which] = start + (change.to[0] - start) * index // count
    return replace(shape, numbers=tuple(numbers), fill=paint["fill"], stroke=paint["stroke"]), turn


# Making --------------------------------------------------------------------------------------------------------------


def animation_scene(dice: SplitMix, config: ScenesConfig, size: tuple[int, int]) -> Draft:
    count = FRAMES_PER_SECOND * dice.between(
        -(-config.min_frames // FRAMES_PER_SECOND), config.max_frames // FRAMES_PER_SECOND
    )
    few = min(config.max_shapes, 3)
    picture = plain_scene(dice, replace(config, min_shapes=min(config.min_shapes, few), max_shapes=few), size)
    animated: list[tuple[Change, ...]] = []
    while not any(animated):
        animated = [_changes(dice, config, shape, size, count, picture.background) for shape in picture.shapes]
    animation = Animation(picture=picture, changes=tuple(animated), num_frames=count)
    said = [_say(shape, changes) for shape, changes in zip(picture.shapes, animated)]
    sentence = "; ".join(f"the {describe(shape)} {what}" for shape, what in zip(picture.shapes, said))
    sample = Sample(
        kind="animation",
        size=size,
        shapes=picture.shapes,
        svg=write_animation(animation),
        frames=frames(animation),
        background=picture.background,
        caption=f"{sentence[0].upper()}{sentence[1:]}.",
    )
    return Draft(sample=sample, questions=lambda: _questions(dice, picture, said, config.max_questions))


def _changes(
    dice: SplitMix, config: ScenesConfig, shape: Shape, size: tuple[int, int], count: int, background: str
) -> tuple[Change, ...]:
    for _ in range(_TRIES):
        way = dice.choose(("stay", "move", "move", "move", "grow", "turn", "colour"))
        if way == "stay":
            return ()
        changes = _MAKERS[way](dice, config, shape, count, background)
        if changes and all(_inside(shape, changes, index, size, count) for index in (0, count // 2, count - 1)):
            return changes
    return ()


def _move(dice: SplitMix, config: ScenesConfig, shape: Shape, count: int, background: str) -> tuple[Change, ...]:
    # A step per frame of at least two pixels along one axis, or both: a person sees which way it goes.
    steps = (dice.choose((-6, -4, -3, -2, 2, 3, 4, 6)), dice.choose((-4, -2, 2, 4)))
    way = dice.below(3)
    dx, dy = (count * steps[0] if way != 1 else 0), (count * steps[1] if way != 0 else 0)
    if shape.kind in ("polygon", "line"):
        return (Change(attribute="translate", to=(dx, dy)),)
    names = _NUMBER_OF[shape.kind][:2]
    by = zip(names, shape.numbers, (dx, dy))
    return tuple(Change(attribute=name, to=(start + way,)) for name, start, way in by if way)


def _grow(dice: SplitMix, config: ScenesConfig, shape: Shape, count: int, background: str) -> tuple[Change, ...]:
    step = dice.choose((-2, -1, 1, 2)) * count
    sizes = {"circle": (2,), "rect": (2, 3), "ellipse": (2, 3)}.get(shape.kind)
    if sizes is None or any(shape.numbers[i] + step < 4 for i in sizes):
        return ()
    return tuple(Change(attribute=_NUMBER_OF[shape.kind][i], to=(shape.numbers[i] + step,)) for i in sizes)


def _turn(dice: SplitMix, config: ScenesConfig, shape: Shape, count: int, background: str) -> tuple[Change, ...]:
    if shape.kind == "circle":
        return ()
    left, top, right, bottom = box(shape)
    centre = ((left + right) // 2, (top + bottom) // 2)
    return (Change(attribute="rotate", to=(count * dice.choose((-10, -5, 5, 10)), *centre)),)


def _colour(dice: SplitMix, config: ScenesConfig, shape: Shape, count: int, background: str) -> tuple[Change, ...]:
    others = [c for c in config.colours if min(contrast(c, shape.colour), contrast(c, background)) >= MIN_CONTRAST]
    begin = dice.between(1, count // FRAMES_PER_SECOND - 1)
    return (Change(attribute="colour", colour=dice.choose(others), begin=begin),) if others else ()


_MAKERS = {"move": _move, "grow": _grow, "turn": _turn, "colour": _colour}


def _inside(shape: Shape, changes: tuple[Change, ...], index: int, size: tuple[int, int], count: int) -> bool:
    moved, turn = _at(shape, changes, index, count)
    left, top, right, bottom = box(moved)
    if turn:  # the circle around the box holds every turn of it
        reach = (((right - left) ** 2 + (bottom - top) ** 2) ** 0.5) / 2
        x, y = (left + right) / 2, (top + bottom) / 2
        left, top, right, bottom = x - reach - 1, y - reach - 1, x + reach + 1, y + reach + 1
    return left >= 0 and top >= 0 and right <= size[0] and bottom <= size[1]


def _say(shape: Shape, changes: tuple[Change, ...]) -> str:
    if not changes:
        return "stays"
    change = changes[0]
    if change.attribute == "colour":
        return f"turns {change.colour}"
    if change.attribute == "rotate":
        return "turns clockwise" if change.to[0] > 0 else "turns counterclockwise"
    if change.attribute in ("width", "r", "rx"):
        which = _NUMBER_OF[shape.kind].index(change.attribute)
        return "grows" if change.to[0] > shape.numbers[which] else "shrinks"
    if change.attribute == "translate":
        dx, dy = change.to
    else:
        ways = {c.attribute[-1]: c.to[0] - shape.numbers[_NUMBER_OF[shape.kind].index(c.attribute)] for c in changes}
        dx, dy = ways.get("x", 0), ways.get("y", 0)
    return "moves " + listing([word for word in _directions(dx, dy) if word])


def _directions(dx: int, dy: int) -> tuple[str, str]:
    vertical = "up" if dy < 0 else "down" if dy > 0 else ""
    return vertical, "left" if dx < 0 else "right" if dx > 0 else ""


def _questions(dice: SplitMix, picture: Picture, said: list[str], limit: int) -> tuple[Question, ...]:
    names = [describe(shape) for shape in picture.shapes]
    asked: list[Question] = []
    for name, what in dice.sample(list(zip(names, said)), len(names)):
        if names.count(name) == 1:
            asked.append(Question(prompt=dice.choose(_WHAT).format(name), answer=f"it {what}", task="motion"))
    still = [name for name, what in zip(names, said) if what == "stays"]
    if len(set(names)) == len(names):
        answer = listing([f"the {name}" for name in still]) if still else "none"
        asked.append(Question(prompt=dice.choose(_MOVING), answer=answer, task="motion"))
    asked.extend(q for q in scene_questions(dice, picture, limit) if q.task == "count" and "shapes are" in q.prompt)
    return tuple(asked[:limit])
