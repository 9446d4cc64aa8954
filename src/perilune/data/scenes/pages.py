"""Small HTML pages in a subset of CSS that can also be drawn exactly as SVG.

    page  = style box*
    style = `<style>body{margin:0;background:COLOUR}div{position:absolute;box-sizing:border-box}p{margin:0}</style>`
    box   = `<div style="left:Xpx;top:Ypx;width:Wpx;height:Hpx;background:COLOUR` border `">` inner `</div>`
    border = nothing | `;border:Npx solid COLOUR`
    row   = a box with `;display:flex;gap:Gpx;padding:Ppx` whose inner is bars
    bar   = `<p style="width:Wpx;height:Hpx;background:COLOUR"></p>`
    inner = box* (placed from the inside of the border) | bar*

Lengths are whole pixels and text is drawn as bars, so the page needs no font and its picture is the same in a browser
and in resvg: `lower` gives the shapes. A bar never shrinks, because a row is made wide enough.
"""

from dataclasses import dataclass

from perilune.data.generated import SplitMix
from perilune.data.scenes.questions import box_text, listing, plural, with_article
from perilune.data.scenes.sample import Draft, Question, Sample, ScenesConfig
from perilune.data.scenes.shapes import MIN_CONTRAST, Shape, contrast
from perilune.data.scenes.svg import Picture, write_svg

_STYLE = "<style>body{{margin:0;background:{}}}div{{position:absolute;box-sizing:border-box}}p{{margin:0}}</style>"
_COUNT_BOXES = ("How many boxes are there?", "Count the boxes.")
_COUNT_BARS = ("How many small bars are in the {} box?", "Count the bars inside the {} box.")
_WHERE = ("Where is the {} box? Answer with a box.", "Give the box of the {} box.")
_BACKGROUND = ("What colour is the page?", "What is the background colour?")


@dataclass(frozen=True, kw_only=True)
class Bar:
    width: int
    height: int
    colour: str


@dataclass(frozen=True, kw_only=True)
class PageBox:
    left: int
    top: int
    width: int
    height: int
    colour: str
    border: int = 0
    border_colour: str = ""
    boxes: "tuple[PageBox, ...]" = ()
    bars: tuple[Bar, ...] = ()
    gap: int = 0
    padding: int = 0


def write_html(boxes: tuple[PageBox, ...], background: str) -> str:
    return _STYLE.format(background) + "".join(map(_write_box, boxes))


def _write_box(box: PageBox) -> str:
    style = f"left:{box.left}px;top:{box.top}px;width:{box.width}px;height:{box.height}px;background:{box.colour}"
    if box.border:
        style += f";border:{box.border}px solid {box.border_colour}"
    if box.bars:
        style += f";display:flex;gap:{box.gap}px;padding:{box.padding}px"
    bars = "".join(
        f'<p style="width:{bar.width}px;height:{bar.height}px;background:{bar.colour}"></p>' for bar in box.bars
    )
    return f'<div style="{style}">{"".join(map(_write_box, box.boxes))}{bars}</div>'


def lower(boxes: tuple[PageBox, ...], x: int = 0, y: int = 0) -> list[Shape]:
    """The rectangles a browser paints, bottom first, for boxes placed from (x, y)."""
    shapes: list[Shape] = []
    for box in boxes:
        left, top = x + box.left, y + box.top
        inner = left + box.border, top + box.border
        if box.border:
            shapes.append(Shape(kind="rect", numbers=(left, top, box.width, box.height), fill=box.border_colour))
        inside = (*inner, box.width - 2 * box.border, box.height - 2 * box.border)
        shapes.append(Shape(kind="rect", numbers=inside, fill=box.colour))
        shapes.extend(lower(box.boxes, *inner))
        pen = inner[0] + box.padding
        for bar in box.bars:
            numbers = (pen, inner[1] + box.padding, bar.width, bar.height)
            shapes.append(Shape(kind="rect", numbers=numbers, fill=bar.colour))
            pen += bar.width + box.gap
    return shapes


def page(dice: SplitMix, config: ScenesConfig, size: tuple[int, int]) -> Draft:
    """A header with a row of bars, then a column of boxes or a grid of cards."""
    width, height = size
    background = dice.choose(("white", "white", "silver", "pink", "black"))
    boxes: list[PageBox] = []
    top = 0
    if dice.below(2):
        top = dice.between(14, 22)
        boxes.append(_row(dice, config, 0, 0, width, top, background))
    columns = dice.between(1, 2)
    rows = dice.between(1, 2)
    gap = dice.between(4, 10)
    each = (width - gap * (columns + 1)) // columns
    tall = (height - top - gap * (rows + 1)) // rows
    for row in range(rows):
        for column in range(columns):
            if rows * columns > 2 and dice.below(5) == 0:
                continue
            left, start = gap + column * (each + gap), top + gap + row * (tall + gap)
            way = dice.below(3)
            if way == 0:
                boxes.append(_row(dice, config, left, start, each, tall, background))
            else:
                boxes.append(_card(dice, config, left, start, each, tall, background, nested=way == 2))
    if not boxes:
        boxes.append(_row(dice, config, gap, top + gap, each, tall, background))
    return _draft(dice, config, size, tuple(boxes), background)


def _visible(dice: SplitMix, config: ScenesConfig, *grounds: str) -> str:
    good = [c for c in (*config.colours, "white") if all(contrast(c, ground) >= MIN_CONTRAST for ground in grounds)]
    return dice.choose(good)


def _row(dice: SplitMix, config: ScenesConfig, x: int, y: int, width: int, height: int, ground: str) -> PageBox:
    colour = _visible(dice, config, ground)
    padding, gap = dice.between(3, 5), dice.between(2, 6)
    bar = _visible(dice, config, colour)
    tall = dice.between(4, max(5, min(height - 2 * padding, 16)))
    bars: list[Bar] = []
    room = width - 2 * padding
    for _ in range(dice.between(1, 4)):
        wide = dice.between(6, 24)
        if room < wide:
            break
        bars.append(Bar(width=wide, height=tall, colour=bar))
        room -= wide + gap
    return PageBox(left=x, top=y, width=width, height=height, colour=colour, bars=tuple(bars), gap=gap, padding=padding)


def _card(
    dice: SplitMix, config: ScenesConfig, x: int, y: int, width: int, height: int, ground: str, *, nested: bool
) -> PageBox:
    colour = _visible(dice, config, ground)
    border = dice.choose((0, 1, 2, 3))
    border_colour = _visible(dice, config, ground, colour) if border else ""
    inner: list[PageBox] = []
    room_x, room_y = width - 2 * border, height - 2 * border
    if nested and min(room_x, room_y) >= 12:  # a box of 4 pixels with 4 on each side of it
        wide, tall = dice.between(room_x // 3, room_x - 8), dice.between(room_y // 3, room_y - 8)
        left, top = dice.between(4, room_x - wide - 4), dice.between(4, room_y - tall - 4)
        child = _visible(dice, config, colour)
        inner.append(PageBox(left=left, top=top, width=wide, height=tall, colour=child))
    return PageBox(
        left=x,
        top=y,
        width=width,
        height=height,
        colour=colour,
        border=border,
        border_colour=border_colour,
        boxes=tuple(inner),
    )


def _draft(
    dice: SplitMix, config: ScenesConfig, size: tuple[int, int], boxes: tuple[PageBox, ...], background: str
) -> Draft:
    shapes = tuple(lower(boxes))
    picture = Picture(width=size[0], height=size[1], shapes=shapes, background=background)
    parts = []
    for box in boxes:
        inside = ""
        if box.bars:
            bars = f"{box.bars[0].colour} bar"
            inside = f" with {with_article(bars) if len(box.bars) == 1 else f'{len(box.bars)} {plural(bars)}'}"
        elif box.boxes:
            inside = f" with {with_article(box.boxes[0].colour)} box inside"
        parts.append(f"{with_article(box.colour)} box{inside}")
    sample = Sample(
        kind="html",
        size=size,
        shapes=shapes,
        svg=write_svg(picture),
        html=write_html(boxes, background),
        background=background,
        caption=f"A {background} page: {listing(parts)}.",
    )
    return Draft(sample=sample, questions=lambda: _questions(dice, boxes, background, config.max_questions))


def _questions(dice: SplitMix, boxes: tuple[PageBox, ...], background: str, limit: int) -> tuple[Question, ...]:
    every = [inner for box in boxes for inner in (box, *box.boxes)]
    asked = [
        Question(prompt=dice.choose(_COUNT_BOXES), answer=str(len(every)), task="count"),
        Question(prompt=dice.choose(_BACKGROUND), answer=background, task="colour"),
    ]
    # A colour may also be that of a bar or a border: only one that occurs once names a box.
    used = (
        [box.colour for box in every] + [box.border_colour for box in every] + [b.colour for x in every for b in x.bars]
    )
    single = [box for box in boxes if used.count(box.colour) == 1]
    if single:
        box = dice.choose(single)
        place = (box.left, box.top, box.left + box.width, box.top + box.height)
        asked.append(Question(prompt=dice.choose(_WHERE).format(box.colour), answer=box_text(place), task="box"))
        if not box.boxes:
            prompt = dice.choose(_COUNT_BARS).format(box.colour)
            asked.append(Question(prompt=prompt, answer=str(len(box.bars)), task="count"))
    return tuple(dice.sample(asked, len(asked))[:limit])
