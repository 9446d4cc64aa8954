"""Questions about scenes whose answers follow from geometry: captions, counts, boxes, places.

Only unambiguous questions are asked: a shape is named by colour and kind when no other shape has both; "left of" means
that one box ends before the other starts; "larger" means by a third at least; "inside" means every pixel. Answers come
from boxes and masks of the shapes (see shapes.py).
"""

from collections import Counter
from collections.abc import Callable

import numpy as np

from perilune.data.generated import SplitMix
from perilune.data.scenes.sample import Question
from perilune.data.scenes.shapes import Box, Shape, box, mask
from perilune.data.scenes.svg import Picture

NUMBER_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
LARGER = 4 / 3

_COUNT_ALL = ("How many shapes are there?", "Count the shapes.", "What is the number of shapes in the picture?")
_COUNT_SOME = ("How many {} are there?", "Count the {}.", "What is the number of {} in the picture?")
_BOX = (
    "Where is the {}? Answer with a box.",
    "Give the box of the {}.",
    "Locate the {} as [left, top, right, bottom].",
)
_COLOUR = ("What colour is the {}?", "Which colour does the {} have?", "Name the colour of the {}.")
_CAPTION = ("Describe the picture.", "What does the picture show?", "Write a caption.")
_RELATION = {
    "left of": ("Is the {} left of the {}?", "Is the {} to the left of the {}?"),
    "above": ("Is the {} above the {}?", "Does the {} lie above the {}?"),
    "inside": ("Is the {} inside the {}?", "Does the {} lie inside the {}?"),
    "overlap": ("Do the {} and the {} overlap?", "Does the {} touch the {}?"),
    "larger": ("Is the {} larger than the {}?", "Does the {} cover more area than the {}?"),
}


def plural(name: str) -> str:
    return name + "s"


def describe(shape: Shape) -> str:
    return f"{shape.colour} {shape.name}"


def box_text(place: Box) -> str:
    return "[" + ", ".join(map(str, place)) + "]"


def listing(parts: list[str]) -> str:
    """a; a and b; a, b and c."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def with_article(words: str) -> str:
    return ("an " if words[0] in "aeiou" else "a ") + words


def caption(picture: Picture) -> str:
    """One sentence with every shape, in the order of the source."""
    counts = Counter(map(describe, picture.shapes))
    parts = [
        with_article(what) if n == 1 else f"{NUMBER_WORDS[n] if n < 13 else n} {plural(what)}"
        for what, n in counts.items()
    ]
    text = f"{listing(parts)} on a {picture.background} background."
    return text[0].upper() + text[1:]


def scene_questions(dice: SplitMix, picture: Picture, limit: int) -> tuple[Question, ...]:
    """At most `limit` questions, of different tasks where possible."""
    facts = _Facts(picture)
    makers: list[Callable[[SplitMix, _Facts], Question | None]] = dice.sample(
        [_count, _box, _spatial, _colour, _caption], 5
    )
    asked: list[Question] = []
    for maker in makers * 2:
        question = maker(dice, facts) if len(asked) < limit else None
        if question is not None and question not in asked:
            asked.append(question)
    return tuple(asked)


class _Facts:
    """Masks are made when a question needs them, once."""

    def __init__(self, picture: Picture) -> None:
        self.picture = picture
        self.shapes = picture.shapes
        names = Counter(map(describe, self.shapes))
        self.unique = [i for i, shape in enumerate(self.shapes) if names[describe(shape)] == 1]
        self._masks: dict[int, np.ndarray] = {}

    def mask(self, index: int) -> np.ndarray:
        if index not in self._masks:
            self._masks[index] = mask(self.shapes[index], self.picture.width, self.picture.height)
        return self._masks[index]


def _caption(dice: SplitMix, facts: _Facts) -> Question:
    return Question(prompt=dice.choose(_CAPTION), answer=caption(facts.picture), task="caption")


def _count(dice: SplitMix, facts: _Facts) -> Question:
    way = dice.below(3)
    if way == 0:
        return Question(prompt=dice.choose(_COUNT_ALL), answer=str(len(facts.shapes)), task="count")
    if way == 1:
        # A square is a rectangle too: the question about rectangles would have two right answers.
        names = [shape.name for shape in facts.shapes]
        kinds = sorted({*names, "circle", "triangle"} - {"rectangle"})
        kind = dice.choose(kinds)
        return Question(
            prompt=dice.choose(_COUNT_SOME).format(plural(kind)), answer=str(names.count(kind)), task="count"
        )
    colours = [shape.colour for shape in facts.shapes]
    colour = dice.choose(sorted({*colours, "red", "blue"}))
    prompt = dice.choose(_COUNT_SOME).format(f"{colour} shapes")
    return Question(prompt=prompt, answer=str(colours.count(colour)), task="count")


def _box(dice: SplitMix, facts: _Facts) -> Question | None:
    whole = [i for i in facts.unique if _shows_its_box(facts, i)]
    if not whole:
        return None
    shape = facts.shapes[dice.choose(whole)]
    return Question(prompt=dice.choose(_BOX).format(describe(shape)), answer=box_text(box(shape)), task="box")


def _shows_its_box(facts: _Facts, index: int) -> bool:
    """Whether what is left to see of a shape reaches all four sides of its box, as far as the whole shape does."""
    whole = facts.mask(index)
    seen = whole.copy()
    for above in range(index + 1, len(facts.shapes)):
        seen &= ~facts.mask(above)
    return bool(seen.any()) and _extent(seen) == _extent(whole)


def _extent(pixels: np.ndarray) -> Box:
    rows, columns = np.flatnonzero(pixels.any(axis=1)), np.flatnonzero(pixels.any(axis=0))
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


def _colour(dice: SplitMix, facts: _Facts) -> Question | None:
    names = Counter(shape.name for shape in facts.shapes)
    once = [shape for shape in facts.shapes if names[shape.name] == 1 and shape.name != "rectangle"]
    if not once:
        return None
    shape = dice.choose(once)
    return Question(prompt=dice.choose(_COLOUR).format(shape.name), answer=shape.colour, task="colour")


def _spatial(dice: SplitMix, facts: _Facts) -> Question | None:
    if len(facts.unique) < 2:
        return None
    first, second = dice.sample(facts.unique, 2)
    # Relations in random order; the first with a clear answer is asked.
    for relation in dice.sample(sorted(_RELATION), len(_RELATION)):
        truth = relation_holds(relation, facts, first, second)
        if truth is not None:
            names = describe(facts.shapes[first]), describe(facts.shapes[second])
            prompt = dice.choose(_RELATION[relation]).format(*names)
            return Question(prompt=prompt, answer="yes" if truth else "no", task="spatial")
    return None


def relation_holds(relation: str, facts: _Facts, first: int, second: int) -> bool | None:
    """Whether shape `first` stands in the relation to shape `second`; None where people could disagree."""
    if relation in ("left of", "above"):
        axis = 0 if relation == "left of" else 1
        one, other = box(facts.shapes[first]), box(facts.shapes[second])
        before, after = one[axis + 2] <= other[axis], other[axis + 2] <= one[axis]
        return before if before != after else None
    one, other = facts.mask(first), facts.mask(second)
    if relation == "larger":
        ratio = one.sum() / other.sum()
        return None if 1 / LARGER < ratio < LARGER else bool(ratio >= LARGER)
    common = int((one & other).sum())
    if relation == "inside":
        if common == one.sum() and first > second:
            return True
        # Partly covered is neither clearly in nor clearly out.
        return False if common == 0 else None
    # Edges that share border pixels only are left alone.
    return True if common >= 12 else (False if common == 0 and _apart(facts, first, second) else None)


def _apart(facts: _Facts, first: int, second: int) -> bool:
    grown = np.pad(facts.mask(first), 2)
    near = np.zeros_like(grown)
    for dx in range(-2, 3):
        for dy in range(-2, 3):
            near |= np.roll(grown, (dy, dx), axis=(0, 1))
    return not (near[2:-2, 2:-2] & facts.mask(second)).any()
