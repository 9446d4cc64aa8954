"""Charts: bars, lines and pies whose numbers are known, with labels in the stroke font.

A bar of value v ends at a whole pixel (the axis has an integer number of pixels per unit), so the value can be measured
in the picture. Questions ask for values, extremes, sums and comparisons; ties are never asked about.
"""

import math

from perilune.data.generated import SplitMix
from perilune.data.scenes.paths import Segment, write_path
from perilune.data.scenes.questions import listing
from perilune.data.scenes.sample import Draft, PlacedText, Question, Sample, ScenesConfig
from perilune.data.scenes.shapes import MIN_CONTRAST, Shape, contrast
from perilune.data.scenes.stroke_font import place, text_shape, text_width
from perilune.data.scenes.svg import Picture, write_svg

LETTERS = 7  # height of capitals in labels

_NAMES = (("A", "B", "C", "D", "E", "F"), ("Jan", "Feb", "Mar", "Apr", "May", "Jun"), ("Q1", "Q2", "Q3", "Q4"))
_VALUE = ("What is the value of {}?", "How large is {}?", "Read the value of {}.")
_MOST = ("Which one has the highest value?", "What is the largest one?", "Which is highest?")
_LEAST = ("Which one has the lowest value?", "What is the smallest one?", "Which is lowest?")
_SUM = ("What is the sum of {} and {}?", "How much are {} and {} together?")
_MORE = ("Is {} higher than {}?", "Is the value of {} above that of {}?")
_COUNT = {
    "bar": ("How many bars are there?", "Count the bars."),
    "line": ("How many points does the line have?", "Count the points."),
    "pie": ("How many slices does the pie have?", "Count the slices."),
}


class _Drawing:
    """Shapes and texts of a chart while it is drawn."""

    def __init__(self) -> None:
        self.shapes: list[Shape] = []
        self.texts: list[PlacedText] = []

    def write(self, text: str, x: int, y: int, *, align: str = "left") -> None:
        width = text_width(text, LETTERS)
        x -= {"left": 0, "middle": width // 2, "right": width}[align]
        self.shapes.append(text_shape(text, x, y, "black", LETTERS, 1))
        self.texts.append(place(text, x, y, LETTERS, 1))


def chart(dice: SplitMix, config: ScenesConfig, size: tuple[int, int]) -> Draft:
    form = dice.choose(("bar", "line", "pie"))
    drawing = _Drawing()
    if form == "pie":
        values = _pie(dice, config, size, drawing)
    else:
        values = _axes_chart(dice, config, size, drawing, form)
    picture = Picture(width=size[0], height=size[1], shapes=tuple(drawing.shapes))
    unit = "%" if form == "pie" else ""
    said = listing([f"{name} {value}{unit}" for name, value in values])
    sample = Sample(
        kind="chart",
        size=size,
        shapes=picture.shapes,
        svg=write_svg(picture),
        caption=f"A {form} chart: {said}.",
        texts=tuple(drawing.texts),
        values=tuple(values),
    )
    return Draft(sample=sample, questions=lambda: _questions(dice, form, values, unit, config.max_questions))


def _axes_chart(
    dice: SplitMix, config: ScenesConfig, size: tuple[int, int], drawing: _Drawing, form: str
) -> list[tuple[str, int]]:
    width, height = size
    left, bottom = 22, height - 17
    top_value = dice.choose((10, 20, 40))
    pixels_per_unit = max(1, (bottom - 12) // top_value)
    names = dice.choose(_NAMES)
    column = 24 if len(names[0]) > 1 else 15
    count = dice.between(3, min(len(names), (width - left - 4) // column))
    step = (width - left - 4) // count
    values = [(names[i], dice.between(1, top_value)) for i in range(count)]
    for value in (0, top_value // 2, top_value):
        y = bottom - value * pixels_per_unit
        if value:
            grid = (left, y, width - 4, y)
            drawing.shapes.append(Shape(kind="line", numbers=grid, stroke="silver", stroke_width=1))
        drawing.write(str(value), left - 4, y - 3, align="right")
    colour = dice.choose([c for c in config.colours if contrast(c, "white") >= MIN_CONTRAST and c != "black"])
    middles = [left + step * i + step // 2 for i in range(count)]
    tops = [bottom - value * pixels_per_unit for _, value in values]
    if form == "bar":
        half = max(4, step * 3 // 10)
        for x, y in zip(middles, tops):
            drawing.shapes.append(Shape(kind="rect", numbers=(x - half, y, 2 * half, bottom - y), fill=colour))
    else:
        segments: list[Segment] = [("L" if i else "M", (x, y)) for i, (x, y) in enumerate(zip(middles, tops))]
        drawing.shapes.append(Shape(kind="path", path=write_path(segments), stroke=colour, stroke_width=2))
        for x, y in zip(middles, tops):
            drawing.shapes.append(Shape(kind="circle", numbers=(x, y, 3), fill=colour))
    for axis in ((left, bottom, width - 4, bottom), (left, 6, left, bottom)):
        drawing.shapes.append(Shape(kind="line", numbers=axis, stroke="black", stroke_width=2))
    for x, (name, _) in zip(middles, values):
        drawing.write(name, x, bottom + 6, align="middle")
    return values


def _pie(dice: SplitMix, config: ScenesConfig, size: tuple[int, int], drawing: _Drawing) -> list[tuple[str, int]]:
    width, height = size
    colours = dice.sample([c for c in config.colours if contrast(c, "white") >= MIN_CONTRAST], len(config.colours))
    chosen: list[str] = []
    for colour in colours:
        if all(contrast(colour, other) >= MIN_CONTRAST for other in chosen):
            chosen.append(colour)
    count = dice.between(2, min(5, len(chosen)))
    # Shares in steps of 5 percent, none below 10.
    parts = [2] * count
    for _ in range(20 - 2 * count):
        parts[dice.below(count)] += 1
    values = [(colour, 5 * part) for colour, part in zip(chosen, parts)]
    radius = min((width - 44) // 2, height // 2 - 8)
    x, y = radius + 6, height // 2
    done = 0
    for colour, share in values:
        start, end = _on_circle(x, y, radius, done), _on_circle(x, y, radius, done + share)
        arc = (radius, radius, 0.0, float(share > 50), 1.0, *end)
        data = write_path([("M", (x, y)), ("L", start), ("A", arc), ("Z", ())])
        drawing.shapes.append(Shape(kind="path", path=data, fill=colour))
        done += share
    row = 15
    first = height // 2 - row * count // 2
    for i, (colour, share) in enumerate(values):
        drawing.shapes.append(Shape(kind="rect", numbers=(width - 31, first + row * i, 7, 8), fill=colour))
        drawing.write(f"{share}%", width - 21, first + row * i)
    return values


def _on_circle(x: int, y: int, radius: int, percent: int) -> tuple[float, float]:
    angle = 2 * math.pi * percent / 100 - math.pi / 2
    # Thousandths first: a point that lies on the middle between two pixels goes the same way on every machine.
    return x + round(radius * math.cos(angle), 3), y + round(radius * math.sin(angle), 3)


def _questions(dice: SplitMix, form: str, values: list[tuple[str, int]], unit: str, limit: int) -> tuple[Question, ...]:
    (first, one), (second, other) = dice.sample(values, 2)
    numbers = [value for _, value in values]
    asked = [
        Question(prompt=dice.choose(_VALUE).format(first), answer=f"{one}{unit}", task="chart"),
        Question(prompt=dice.choose(_SUM).format(first, second), answer=f"{one + other}{unit}", task="chart"),
        Question(prompt=dice.choose(_COUNT[form]), answer=str(len(values)), task="count"),
    ]
    for prompts, extreme in ((_MOST, max(numbers)), (_LEAST, min(numbers))):
        if numbers.count(extreme) == 1:
            name = values[numbers.index(extreme)][0]
            asked.append(Question(prompt=dice.choose(prompts), answer=name, task="chart"))
    if one != other:
        answer = "yes" if one > other else "no"
        asked.append(Question(prompt=dice.choose(_MORE).format(first, second), answer=answer, task="chart"))
    return tuple(dice.sample(asked, len(asked))[:limit])
