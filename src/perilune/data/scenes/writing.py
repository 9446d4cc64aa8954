"""Scenes of text: one to three lines of words, numbers and codes, some on a coloured label.

Half of what is written is random letters and digits, so that it has to be read and cannot be guessed.
"""

from perilune.data.generated import SplitMix
from perilune.data.scenes.questions import box_text, listing
from perilune.data.scenes.sample import Draft, PlacedText, Question, Sample, ScenesConfig
from perilune.data.scenes.shapes import MIN_CONTRAST, Shape, contrast, luma
from perilune.data.scenes.stroke_font import place, text_shape, text_width
from perilune.data.scenes.svg import Picture, write_svg

WORDS = (
    *(
        "Moon",
        "orbit",
        "tide",
        "Comet",
        "crater",
        "signal",
        "Beacon",
        "rover",
        "Open",
        "closed",
        "Sale",
        "Exit",
        "Stop",
    ),
    *(
        "Go",
        "menu",
        "Mail",
        "north",
        "South",
        "east",
        "West",
        "Hello",
        "world",
        "Sun",
        "Mars",
        "Venus",
        "apple",
        "Book",
    ),
    *("chair", "Door", "earth", "Fish", "Garden", "house", "Ink", "jump", "Kite", "lamp", "Music", "night", "Ocean"),
    *("paper", "Queen", "river", "Stone", "tree", "Under", "valley", "Winter", "box", "Yellow", "zebra", "light"),
)
MIN_LUMA = 75
_LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz23456789"
_READ = ("What does the text say?", "Read the text.", "What is written here?")
_READ_COLOUR = ("What is written in {}?", "Read the {} text.")
_LINES = ("How many lines of text are there?", "Count the lines of text.")
_WHERE = ('Where is the text "{}"? Answer with a box.', 'Give the box of "{}".')
_COLOUR = ('What colour is the text "{}"?', 'In which colour is "{}" written?')


def random_text(dice: SplitMix, width: int, size: int) -> str:
    """A word, two words, a number or a code that fits into `width` pixels."""
    while True:
        way = dice.below(6)
        if way < 2:
            text = dice.choose(WORDS)
        elif way == 2:
            text = f"{dice.choose(WORDS)} {dice.choose(WORDS)}"
        elif way == 3:
            text = dice.choose(
                (f"{dice.below(10000)}", f"${dice.below(100)}.{dice.below(100):02}", f"{dice.below(100)}%")
            )
        else:
            text = "".join(dice.choose(_LETTERS) for _ in range(dice.between(3, 7)))
        if text_width(text, size) <= width:
            return text


def readable_on(dice: SplitMix, ground: str, colours: tuple[str, ...]) -> str:
    """A colour much lighter or darker than the ground: for thin strokes a difference of hue is not enough."""
    good = [colour for colour in (*colours, "black", "white") if abs(luma(colour) - luma(ground)) >= MIN_LUMA]
    return dice.choose(good)


def text_scene(dice: SplitMix, config: ScenesConfig, size: tuple[int, int]) -> Draft:
    width, height = size
    shapes: list[Shape] = []
    texts: list[PlacedText] = []
    colours: list[str] = []
    background = "white" if dice.below(4) else dice.choose(("black", "silver", "yellow", "pink"))
    y = dice.between(6, height // 3)
    for _ in range(dice.between(1, 3)):
        letters = dice.choose((7, 10, 10, 14))
        line = letters * 14 // 10
        if y + line + 8 > height:
            break
        text = random_text(dice, width - 16, letters)
        x = dice.between(8, width - 8 - text_width(text, letters))
        ground = background
        if dice.below(3) == 0:
            labels = [colour for colour in config.colours if contrast(colour, background) >= MIN_CONTRAST]
            ground = dice.choose(labels)
            numbers = (x - 5, y - 4, text_width(text, letters) + 10, line + 7)
            shapes.append(Shape(kind="rect", numbers=numbers, fill=ground))
        pen = 1 if letters == 7 else 2
        colour = readable_on(dice, ground, config.colours)
        shapes.append(text_shape(text, x, y, colour, letters, pen))
        texts.append(place(text, x, y, letters, pen))
        colours.append(colour)
        y += line + dice.between(9, 20)
    picture = Picture(width=width, height=height, shapes=tuple(shapes), background=background)
    sample = Sample(
        kind="text",
        size=size,
        shapes=picture.shapes,
        svg=write_svg(picture),
        background=background,
        caption=_caption(texts, colours, background),
        texts=tuple(texts),
    )
    return Draft(sample=sample, questions=lambda: _questions(dice, texts, colours, config.max_questions))


def _caption(texts: list[PlacedText], colours: list[str], background: str) -> str:
    parts = [f'"{text.text}" in {colour}' for text, colour in zip(texts, colours)]
    return f"The text {listing(parts)} on a {background} background."


def _questions(dice: SplitMix, texts: list[PlacedText], colours: list[str], limit: int) -> tuple[Question, ...]:
    everything = " / ".join(text.text for text in texts)
    asked = [Question(prompt=dice.choose(_READ), answer=everything, task="ocr")]
    number = dice.below(len(texts))
    text, colour = texts[number], colours[number]
    more = [Question(prompt=dice.choose(_LINES), answer=str(len(texts)), task="count")]
    if colours.count(colour) == 1 and len(texts) > 1:
        more.append(Question(prompt=dice.choose(_READ_COLOUR).format(colour), answer=text.text, task="ocr"))
    if [other.text for other in texts].count(text.text) == 1:
        more.append(Question(prompt=dice.choose(_WHERE).format(text.text), answer=box_text(text.box), task="box"))
        more.append(Question(prompt=dice.choose(_COLOUR).format(text.text), answer=colour, task="colour"))
    return tuple((asked + dice.sample(more, len(more)))[:limit])
