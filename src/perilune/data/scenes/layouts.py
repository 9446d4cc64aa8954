"""Small user interfaces: dialogs, forms, lists and cards, with labels in the stroke font.

A layout is a list of widgets (role, label, box), and the shapes that draw them. Questions ask for widgets by role and
label, so a model learns to find a button by what it says.
"""

from collections import Counter
from dataclasses import dataclass, field

from perilune.data.generated import SplitMix
from perilune.data.scenes.questions import box_text, listing, plural, with_article
from perilune.data.scenes.sample import Draft, PlacedText, Question, Sample, ScenesConfig
from perilune.data.scenes.shapes import Box, Shape, contrast
from perilune.data.scenes.stroke_font import place, text_shape, text_width
from perilune.data.scenes.svg import Picture, write_svg

LETTERS = 7

_TITLES = (
    "Login",
    "Search",
    "Profile",
    "Delete?",
    "Settings",
    "Sign in",
    "New file",
    "Upload",
    "Inbox",
    "Music",
    "To do",
)
_BUTTONS = ("OK", "Cancel", "Save", "Yes", "No", "Send", "Next", "Back", "Buy", "Open", "Close", "Apply", "Retry")
_FIELDS = ("Name", "Email", "City", "Phone", "Age", "Code", "User", "Date", "Zip")
_ITEMS = (
    "Milk",
    "Bread",
    "Eggs",
    "Tea",
    "Rice",
    "Mail Tom",
    "Call Ada",
    "Pay rent",
    "Buy shoes",
    "Walk",
    "Read",
    "Cook",
)
_CARDS = ("Moon", "Mars", "Sun", "Venus", "Earth", "Pluto", "Titan", "Europa", "Io", "Ceres")
_WHERE = ('Where is the {} "{}"? Answer with a box.', 'Give the box of the {} "{}".', 'Locate the {} labelled "{}".')
_COUNT = ("How many {} are there?", "Count the {}.")
_TITLE = ("What is the title?", "Read the title.")
_LABELS = ("What do the {} say?", "Read the labels of the {}.")


@dataclass(frozen=True, kw_only=True)
class Widget:
    role: str
    label: str
    box: Box


@dataclass(kw_only=True)
class _Layout:
    """What is drawn so far."""

    accent: str
    shapes: list[Shape] = field(default_factory=list)
    texts: list[PlacedText] = field(default_factory=list)
    widgets: list[Widget] = field(default_factory=list)

    def fill(self, x: int, y: int, width: int, height: int, colour: str) -> None:
        self.shapes.append(Shape(kind="rect", numbers=(x, y, width, height), fill=colour))

    def outline(self, x: int, y: int, width: int, height: int, colour: str, fill: str = "white") -> None:
        """A box with a border of 2 pixels inside it."""
        numbers = (x + 1, y + 1, width - 2, height - 2)
        self.shapes.append(Shape(kind="rect", numbers=numbers, fill=fill, stroke=colour, stroke_width=2))

    def write(self, text: str, x: int, y: int, colour: str = "black") -> None:
        self.shapes.append(text_shape(text, x, y, colour, LETTERS, 1))
        self.texts.append(place(text, x, y, LETTERS, 1))

    def widget(self, role: str, label: str, x: int, y: int, width: int, height: int) -> None:
        self.widgets.append(Widget(role=role, label=label, box=(x, y, x + width, y + height)))

    def title(self, text: str, x: int, y: int, width: int) -> None:
        self.fill(x, y, width, 15, self.accent)
        self.write(text, x + 6, y + 4, on(self.accent))
        self.widget("title", text, x, y, width, 15)

    def button(self, text: str, x: int, y: int, width: int, *, filled: bool = True) -> None:
        if filled:
            self.fill(x, y, width, 17, self.accent)
        else:
            self.outline(x, y, width, 17, "gray")
        self.write(text, x + (width - text_width(text, LETTERS)) // 2, y + 5, on(self.accent) if filled else "black")
        self.widget("button", text, x, y, width, 17)


def on(ground: str) -> str:
    """Black or white, whichever is easier to read."""
    return max(("black", "white"), key=lambda colour: contrast(colour, ground))


def layout(dice: SplitMix, config: ScenesConfig, size: tuple[int, int]) -> Draft:
    form = dice.choose(tuple(_FORMS))
    drawing = _Layout(
        accent=dice.choose(("blue", "green", "purple", "navy", "teal", "brown", "orange", "black", "red"))
    )
    background = dice.choose(("white", "silver"))
    _FORMS[form](dice, drawing, size)
    picture = Picture(width=size[0], height=size[1], shapes=tuple(drawing.shapes), background=background)
    sample = Sample(
        kind="layout",
        size=size,
        shapes=picture.shapes,
        svg=write_svg(picture),
        background=background,
        caption=_caption(form, drawing.widgets),
        texts=tuple(drawing.texts),
    )
    return Draft(sample=sample, questions=lambda: _questions(dice, drawing.widgets, config.max_questions))


def _dialog(dice: SplitMix, drawing: _Layout, size: tuple[int, int]) -> None:
    width, height = size[0] - dice.between(6, 20), dice.between(62, min(90, size[1] - 6))
    x, y = dice.between(3, size[0] - width - 3), dice.between(3, size[1] - height - 3)
    drawing.outline(x, y, width, height, "gray")
    drawing.title(dice.choose(_TITLES), x, y, width)
    drawing.shapes.append(Shape(kind="circle", numbers=(x + width - 9, y + 7, 4), fill=on(drawing.accent)))
    text = next(t for t in dice.sample(_MESSAGES, len(_MESSAGES)) if text_width(t, LETTERS) <= width - 14)
    drawing.write(text, x + 7, y + 23)
    labels = dice.sample(_BUTTONS, dice.between(1, 2))
    each = (width - 8 - 6 * len(labels)) // 2
    for i, label in enumerate(labels):
        left = x + width - 7 - each if i == 0 else x + 7
        drawing.button(label, left, y + height - 24, each, filled=i == 0)


_MESSAGES = (
    "Are you sure?",
    "File saved",
    "No network",
    "Try again",
    "All done",
    "Disk full",
    "Wait 5 min",
    "2 new items",
)


def _form(dice: SplitMix, drawing: _Layout, size: tuple[int, int]) -> None:
    width = size[0] - 16
    drawing.title(dice.choose(_TITLES), 0, 0, size[0])
    y = 21
    for label in dice.sample(_FIELDS, dice.between(1, min(2, (size[1] - 48) // 30))):
        drawing.write(label, 8, y)
        drawing.outline(8, y + 10, width, 16, "gray")
        drawing.widget("input", label, 8, y + 10, width, 16)
        y += 31
    each = dice.between(40, width)
    drawing.button(dice.choose(_BUTTONS), dice.choose((8, size[0] - 8 - each)), y + 1, each)


def _list(dice: SplitMix, drawing: _Layout, size: tuple[int, int]) -> None:
    drawing.title(dice.choose(_TITLES), 0, 0, size[0])
    rows = dice.between(2, min(5, (size[1] - 20) // 18))
    for i, label in enumerate(dice.sample(_ITEMS, rows)):
        y = 18 + 18 * i
        checked = dice.below(2) == 1
        drawing.outline(7, y + 3, 11, 11, drawing.accent, drawing.accent if checked else "white")
        drawing.write(label, 25, y + 5)
        drawing.widget("checked item" if checked else "open item", label, 0, y, size[0], 18)
        line = (7, y + 18, size[0] - 7, y + 18)
        drawing.shapes.append(Shape(kind="line", numbers=line, stroke="gray", stroke_width=1))


def _cards(dice: SplitMix, drawing: _Layout, size: tuple[int, int]) -> None:
    columns = 2 if size[0] < 168 else 3
    rows = dice.between(1, size[1] // 54)
    each, tall = (size[0] - 6 * (columns + 1)) // columns, (size[1] - 6 * (rows + 1)) // rows
    tall = min(tall, 60)
    labels = dice.sample(_CARDS, columns * rows)
    for i, label in enumerate(labels):
        x, y = 6 + (each + 6) * (i % columns), 6 + (tall + 6) * (i // columns)
        drawing.outline(x, y, each, tall, "gray")
        colour = dice.choose(("red", "orange", "yellow", "green", "cyan", "blue", "purple", "pink"))
        drawing.fill(x + 4, y + 4, each - 8, tall - 22, colour)
        drawing.write(label, x + 6, y + tall - 13)
        drawing.widget("card", label, x, y, each, tall)


_FORMS = {"dialog": _dialog, "form": _form, "list": _list, "page of cards": _cards}


def _caption(form: str, widgets: list[Widget]) -> str:
    parts: list[str] = []
    for role in dict.fromkeys(widget.role for widget in widgets):
        labels = [f'"{widget.label}"' for widget in widgets if widget.role == role]
        parts.append(f"{with_article(role) if len(labels) == 1 else plural(role)} {listing(labels)}")
    text = f"{with_article(form)} with {listing(parts)}."
    return text[0].upper() + text[1:]


def _questions(dice: SplitMix, widgets: list[Widget], limit: int) -> tuple[Question, ...]:
    roles = Counter(widget.role for widget in widgets)
    widget = dice.choose(widgets)
    where = dice.choose(_WHERE).format(widget.role, widget.label)
    asked = [Question(prompt=where, answer=box_text(widget.box), task="box")]
    countable = sorted(set(roles) - {"title"})
    role = dice.choose(countable)
    asked.append(Question(prompt=dice.choose(_COUNT).format(plural(role)), answer=str(roles[role]), task="count"))
    if roles["title"]:
        title = next(widget.label for widget in widgets if widget.role == "title")
        asked.append(Question(prompt=dice.choose(_TITLE), answer=title, task="ocr"))
    role = dice.choose(countable)
    labels = " / ".join(widget.label for widget in widgets if widget.role == role)
    asked.append(Question(prompt=dice.choose(_LABELS).format(plural(role)), answer=labels, task="ocr"))
    return tuple(dice.sample(asked, len(asked))[:limit])
