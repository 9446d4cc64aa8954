"""A font of straight strokes, defined here: letters, digits and punctuation as polylines on a small grid.

A glyph is a list of strokes; a stroke is a string of points, two characters each: x in 0..8, then y in 0..d
(hexadecimal). Capitals and digits reach from y = 0 to the baseline at y = a (10), small letters start at y = 4, tails
end at y = d (13):

    "T": "0060 303a"    from (0,0) to (6,0), then from (3,0) to (3,10)

O is wide and 0 is narrow with a slash, I has bars, l has a hook, 1 has a foot: a reader can always tell what is
written. A text becomes ONE path, so its source is short: `text_path("Hi", 10, 20, 10)`. `size` is the height of
capitals in pixels (10: the natural one, with every corner on the pixel grid; with tails the line is 14 pixels high).
"""

from dataclasses import dataclass

from perilune.data.scenes.paths import Segment, write_path
from perilune.data.scenes.sample import PlacedText
from perilune.data.scenes.shapes import Box, Shape

NATURAL_SIZE = 10
SPACING = 4  # from the right edge of a glyph's lines to the left edge of the next glyph's lines
SPACE_WIDTH = 3

_GLYPHS = {
    **{"A": "0a20406a 1656", "B": "050040515445050a5a69665545", "C": "61501001091a5a69", "D": "004062684a0a00"},
    **{"E": "60000a6a 0555", "F": "60000a 0555", "G": "61501001091a5a696535", "H": "000a 606a 0565"},
    **{"I": "0040 202a 0a4a", "J": "50594a1a09", "K": "000a 6006 246a", "L": "000a5a", "M": "0a00 004680 808a"},
    **{"N": "0a00 006a 6a60", "O": "204062684a2a080220", "P": "0a005061645505", "Q": "204062684a2a080220 477b"},
    **{"R": "0a005061645505 356a", "S": "6150100104155566695a1a09", "T": "0060 303a", "U": "00091a5a6960"},
    **{"V": "002a4a60", "W": "00091a3a495a7a8980 4549", "X": "006a 600a", "Y": "003560 353a", "Z": "006061090a6a"},
    **{"a": "0444555a1a09081757", "b": "000a 05144455594a1a09", "c": "55441405091a4a59"},
    **{"d": "505a 55441405091a4a59", "e": "075755441405091a5a", "f": "4030212a 0444"},
    **{"g": "545c4d1d 5544140508194958", "h": "000a 051444555a", "i": "040a 0002", "j": "242c1d0d 2022"},
    **{"k": "000a 5408 265a", "l": "00091a2a", "m": "040a 051434454a 455474858a", "n": "040a 051444555a"},
    **{"o": "144455594a1a090514", "p": "040d 05144455594a1a09", "q": "545d 55441405091a4a59", "r": "040a 062444"},
    **{"s": "5544140506174758594a1a09", "t": "11192a4a 0444", "u": "04091a4a59 545a", "v": "042a4a64"},
    **{"w": "04091a3a495a7a8984 4749", "x": "045a 540a", "y": "043a 641d", "z": "045455090a5a"},
    **{"0": "104051594a1a090110 1842", "1": "0220 202a 0a4a", "2": "0110405154090a5a"},
    **{"3": "011040515445254556594a1a09", "4": "300757 444a", "5": "5000044455594a1a09"},
    **{"6": "51401001091a4a59564505", "7": "0050512a", "8": "104051544515040110 1506091a4a595645"},
    **{"9": "091a4a5951401001041555"},
    **{".": "080a", ",": "181a0c", ":": "0406 080a", ";": "1416 181a0c", "!": "0006 080a"},
    **{"?": "01104051533536 383a", "-": "0646", "+": "0646 2428", "=": "0545 0848", "/": "0a40"},
    **{"%": "0a60 0020220200 48686a4a48", "(": "20020a2c", ")": "00222a0c", "'": "0003", '"': "0003 2023"},
    **{"#": "202a 505a 0373 0777", "$": "5140100104154556594a1a09 303a", "&": "6a13112030414307091a3a66"},
    **{"*": "2226 0345 0543", "<": "430649", ">": "034609", "_": "0a5a", "[": "20000c2c", "]": "00202c0c"},
    "@": "63332426378781701001091a7a 6367",
}
CHARACTERS = "".join(_GLYPHS)


@dataclass(frozen=True, kw_only=True)
class Glyph:
    strokes: tuple[tuple[tuple[int, int], ...], ...]
    width: int


def _read_glyph(text: str) -> Glyph:
    strokes = tuple(
        tuple((int(stroke[i], 16), int(stroke[i + 1], 16)) for i in range(0, len(stroke), 2)) for stroke in text.split()
    )
    return Glyph(strokes=strokes, width=max(x for stroke in strokes for x, _ in stroke))


GLYPHS: dict[str, Glyph] = {character: _read_glyph(text) for character, text in _GLYPHS.items()}


def text_width(text: str, size: int = NATURAL_SIZE) -> int:
    """Pixels from the left edge of the first line to the right edge of the last, without the stroke's width."""
    units = sum(GLYPHS[c].width if c != " " else SPACE_WIDTH for c in text) + SPACING * (len(text) - 1)
    return _scaled(units, size)


def text_path(text: str, x: int, y: int, size: int = NATURAL_SIZE) -> str:
    """Path data of a text whose first glyph's lines start at x and whose capitals' tops lie at y."""
    segments: list[Segment] = []
    pen = 0
    for character in text:
        if character == " ":
            pen += SPACE_WIDTH + SPACING
            continue
        glyph = GLYPHS[character]
        for stroke in glyph.strokes:
            for number, (dx, dy) in enumerate(stroke):
                point = (x + _scaled(pen + dx, size), y + _scaled(dy, size))
                segments.append(("L" if number else "M", point))
        pen += glyph.width + SPACING
    return write_path(segments)


def stroke_width(size: int) -> int:
    return 2 if size < 16 else size // 8


def text_shape(text: str, x: int, y: int, colour: str, size: int = NATURAL_SIZE, width: int | None = None) -> Shape:
    """The text as one shape of a scene."""
    data = text_path(text, x, y, size)
    return Shape(kind="path", path=data, stroke=colour, stroke_width=width or stroke_width(size))


def text_box(text: str, x: int, y: int, size: int = NATURAL_SIZE, width: int | None = None) -> Box:
    """The box of the strokes, half their width included; the tip of a sharp corner may pass it by less than a pixel."""
    ys = [dy for c in text if c != " " for stroke in GLYPHS[c].strokes for _, dy in stroke]
    reach = ((width or stroke_width(size)) + 1) // 2
    top, bottom = y + _scaled(min(ys), size), y + _scaled(max(ys), size)
    return x - reach, top - reach, x + text_width(text, size) + reach, bottom + reach


def place(text: str, x: int, y: int, size: int = NATURAL_SIZE, width: int | None = None) -> PlacedText:
    return PlacedText(text=text, box=text_box(text, x, y, size, width))


def _scaled(units: int, size: int) -> int:
    return (2 * units * size + NATURAL_SIZE) // (2 * NATURAL_SIZE)
