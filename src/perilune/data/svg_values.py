"""The values of SVG attributes, each read by a small grammar and written anew.

Every function takes the text of one attribute and the `Reading` (where it stands, how much has been read so far) and
gives a canonical text with the same meaning, or raises HostileInput. Numbers are finite and within +-10,000; all
numbers of a document together are counted, so no list is without end. What they come to is larger: the steps of a
relative path add up to 4e7, scales multiply that by up to 1,000 and a small viewBox by up to 4,096. So a coordinate is
finite in float32, but may be more than the renderer bears. There it may refuse or die, which is why it runs in a
process of its own (`perilune.data.render_worker`). The regular expressions match one token at a time and cannot
backtrack over the input.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from perilune.data.hostile import HostileInput, Rule, shown

NUMBERS_LIMIT = 20_000
"""How many numbers a document may hold."""
COMMANDS_LIMIT = 4_000
"""How many path commands a document may hold."""
MAX_NUMBER = 10_000.0
MAX_SECONDS = 60.0
MIN_DASH = 0.1
MAX_DASHES = 16
MAX_CANVAS = 4096.0
MAX_TRANSFORMS = 4
_LONGEST_NUMBER = 24
_SMALLEST = 1e-6

_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_GAP = re.compile(r"[ \t\r\n]*,?[ \t\r\n]*")
_SPACE = re.compile(r"[ \t\r\n]*")
_COLOUR = re.compile(r"#(?:[0-9a-fA-F]{3}|[0-9a-fA-F]{6})")
_FUNCTION = re.compile(r"(translate|rotate|scale)[ \t]*\(([^()]*)\)")

_COLOUR_WORDS = """
aliceblue antiquewhite aqua aquamarine azure beige bisque black blanchedalmond blue blueviolet brown burlywood
cadetblue chartreuse chocolate coral cornflowerblue cornsilk crimson cyan darkblue darkcyan darkgoldenrod
darkgray darkgreen darkgrey darkkhaki darkmagenta darkolivegreen darkorange darkorchid darkred darksalmon
darkseagreen darkslateblue darkslategray darkslategrey darkturquoise darkviolet deeppink deepskyblue dimgray
dimgrey dodgerblue firebrick floralwhite forestgreen fuchsia gainsboro ghostwhite gold goldenrod gray green
greenyellow grey honeydew hotpink indianred indigo ivory khaki lavender lavenderblush lawngreen lemonchiffon
lightblue lightcoral lightcyan lightgoldenrodyellow lightgray lightgreen lightgrey lightpink lightsalmon
lightseagreen lightskyblue lightslategray lightslategrey lightsteelblue lightyellow lime limegreen linen magenta
maroon mediumaquamarine mediumblue mediumorchid mediumpurple mediumseagreen mediumslateblue mediumspringgreen
mediumturquoise mediumvioletred midnightblue mintcream mistyrose moccasin navajowhite navy oldlace olive
olivedrab orange orangered orchid palegoldenrod palegreen paleturquoise palevioletred papayawhip peachpuff peru
pink plum powderblue purple rebeccapurple red rosybrown royalblue saddlebrown salmon sandybrown seagreen
seashell sienna silver skyblue slateblue slategray slategrey snow springgreen steelblue tan teal thistle tomato
turquoise violet wheat white whitesmoke yellow yellowgreen
"""
COLOUR_NAMES = frozenset(_COLOUR_WORDS.split())
_PAINT_WORDS = {"none": "none", "currentcolor": "currentColor", "transparent": "none"}

# How many numbers each path command takes; arcs read two flags of one digit among theirs.
_ARITY = {"M": 2, "L": 2, "H": 1, "V": 1, "C": 6, "S": 4, "Q": 4, "T": 2, "A": 7, "Z": 0}


@dataclass(kw_only=True)
class Reading:
    """Where in a document the reader is, and what the document has used of its limits."""

    place: str = ""
    num_numbers: int = 0
    num_commands: int = 0
    scale: float = 1.0
    """Of the transform read last."""

    def begin(self, place: str) -> None:
        self.place = place

    def count_numbers(self, count: int) -> None:
        self.num_numbers += count
        if self.num_numbers > NUMBERS_LIMIT:
            raise HostileInput("size", f"{self.place}: more than {NUMBERS_LIMIT:,} numbers in the document")

    def count_commands(self, count: int) -> None:
        self.num_commands += count
        if self.num_commands > COMMANDS_LIMIT:
            raise HostileInput("path", f"{self.place}: more than {COMMANDS_LIMIT:,} path commands in the document")


def format_number(value: float) -> str:
    """The shortest text that reads back as the same number."""
    return str(int(value)) if value == int(value) else repr(value)


def read_number(text: str, reading: Reading, *, low: float = -MAX_NUMBER, high: float = MAX_NUMBER) -> str:
    word = text.strip(" \t\r\n")
    if not _NUMBER.fullmatch(word):
        raise HostileInput("number", f"{reading.place}: {shown(text)} is not a plain number")
    reading.count_numbers(1)
    return format_number(_in_range(word, reading, low, high))


def read_keyword(text: str, reading: Reading, *, words: Sequence[str]) -> str:
    word = text.strip(" \t\r\n")
    if word not in words:
        raise HostileInput("keyword", f"{reading.place}: {shown(text)} is not one of {', '.join(words)}")
    return word


def read_colour(text: str, reading: Reading) -> str:
    word = text.strip(" \t\r\n")
    if _COLOUR.fullmatch(word):
        return word
    name = word.lower() if word.isascii() else word
    if name in COLOUR_NAMES:
        return name
    if name in _PAINT_WORDS:
        return _PAINT_WORDS[name]
    rule: Rule = "url" if "url" in name else "colour"
    raise HostileInput(rule, f"{reading.place}: {shown(text)} is not #rgb, #rrggbb, none or the name of a colour")


def read_seconds(text: str, reading: Reading, *, low: float = 0.0) -> str:
    word = text.strip(" \t\r\n")
    unit = 0.001 if word.endswith("ms") else 1.0
    number = word.removesuffix("ms") if unit != 1.0 else word.removesuffix("s")
    if not _NUMBER.fullmatch(number) or not word.endswith("s"):
        raise HostileInput("animation", f"{reading.place}: {shown(text)} is not a time such as 1.5s or 400ms")
    _in_range(number, reading, low / unit, MAX_SECONDS / unit)
    reading.count_numbers(1)
    return format_number(float(number)) + ("ms" if unit != 1.0 else "s")


def read_dashes(text: str, reading: Reading) -> str:
    if text.strip(" \t\r\n") == "none":
        return "none"
    numbers = split_numbers(text, reading)
    # Tiny dashes on a long line are millions of pieces.
    if not 1 <= len(numbers) <= MAX_DASHES or min(numbers) < MIN_DASH:
        raise HostileInput(
            "number", f"{reading.place}: 1 to {MAX_DASHES} dashes, each at least {MIN_DASH:g}, not {shown(text)}"
        )
    return _join(numbers)


def read_points(text: str, reading: Reading) -> str:
    numbers = split_numbers(text, reading)
    if len(numbers) % 2:
        raise HostileInput("number", f"{reading.place}: {len(numbers)} numbers are not pairs of x and y")
    return _join(numbers)


def read_view_box(text: str, reading: Reading) -> str:
    numbers = split_numbers(text, reading)
    if len(numbers) != 4 or not all(1 <= side <= MAX_CANVAS for side in numbers[2:]):
        raise HostileInput(
            "number", f"{reading.place}: expected 4 numbers with sides within 1..{MAX_CANVAS:g}, not {shown(text)}"
        )
    return _join(numbers)


def read_transform(text: str, reading: Reading) -> str:
    """translate(x y), rotate(angle) or rotate(angle x y), scale(s) or scale(x y), a few in a row."""
    functions: list[str] = []
    position, scale = _after(_SPACE, text, 0), 1.0
    while position < len(text):
        found = _FUNCTION.match(text, position)
        if found is None or len(functions) >= MAX_TRANSFORMS:
            raise HostileInput(
                "transform", f"{reading.place}: at most {MAX_TRANSFORMS} of translate, rotate, scale, not {shown(text)}"
            )
        name, numbers = found[1], split_numbers(found[2], reading)
        if len(numbers) not in {"translate": (1, 2), "rotate": (1, 3), "scale": (1, 2)}[name]:
            raise HostileInput("transform", f"{reading.place}: {name} with {len(numbers)} numbers")
        if name == "scale":
            largest = max(map(abs, numbers))
            if not 0.01 <= min(map(abs, numbers)) <= largest <= 100:
                raise HostileInput("transform", f"{reading.place}: scale {shown(found[2])} is outside 0.01..100")
            scale *= largest
        functions.append(f"{name}({_join(numbers)})")
        position = _after(_GAP, text, found.end())
    reading.scale = scale
    return " ".join(functions)


def read_path(text: str, reading: Reading) -> str:
    """Path data: begins with a move, each command has its numbers; written with one letter per command."""
    parts: list[str] = []
    position, command = _after(_SPACE, text, 0), ""
    while position < len(text):
        letter = text[position]
        if letter.upper() in _ARITY and letter.isascii():
            command = letter
            position = _after(_SPACE, text, position + 1)
        elif command in ("", "Z", "z"):
            raise HostileInput("path", f"{reading.place}: a command is missing before {shown(text[position:])}")
        if not parts and command not in ("M", "m"):
            raise HostileInput("path", f"{reading.place}: path data begins with M, not {shown(command)}")
        reading.count_commands(1)
        numbers, position = _path_numbers(text, position, command.upper(), reading)
        parts.append(command + " ".join(map(format_number, numbers)))
        # Pairs that follow a move without a letter are lines.
        command = {"M": "L", "m": "l"}.get(command, command)
    return "".join(parts)


def split_numbers(text: str, reading: Reading) -> list[float]:
    """Numbers parted by white space, at most one comma, or nothing where a sign or point begins the next."""
    numbers: list[float] = []
    position = _after(_SPACE, text, 0)
    while position < len(text):
        found = _NUMBER.match(text, position)
        if found is None:
            raise HostileInput("number", f"{reading.place}: {shown(text[position:])} is not a number")
        reading.count_numbers(1)
        numbers.append(_in_range(found[0], reading, -MAX_NUMBER, MAX_NUMBER))
        position = _after(_GAP, text, found.end())
        if position == len(text) and "," in text[found.end() :]:
            raise HostileInput("number", f"{reading.place}: a comma at the end")
    return numbers


def _path_numbers(text: str, position: int, command: str, reading: Reading) -> tuple[list[float], int]:
    numbers: list[float] = []
    while len(numbers) < _ARITY[command]:
        if command == "A" and len(numbers) in (3, 4):  # a flag is one digit, whatever follows it
            word = text[position : position + 1]
            if word not in ("0", "1"):
                raise HostileInput("path", f"{reading.place}: an arc's flag is 0 or 1, not {shown(word)}")
        else:
            found = _NUMBER.match(text, position)
            if found is None:
                raise HostileInput(
                    "path", f"{reading.place}: {command} takes {_ARITY[command]} numbers, then {shown(text[position:])}"
                )
            word = found[0]
        reading.count_numbers(1)
        numbers.append(_in_range(word, reading, -MAX_NUMBER, MAX_NUMBER))
        position = _after(_GAP, text, position + len(word))
    return numbers, position


def _after(pattern: re.Pattern[str], text: str, position: int) -> int:
    """Where the pattern, which also matches nothing at all, ends."""
    found = pattern.match(text, position)
    return position if found is None else found.end()


def _in_range(word: str, reading: Reading, low: float, high: float) -> float:
    if len(word) > _LONGEST_NUMBER:
        raise HostileInput("number", f"{reading.place}: a number of {len(word):,} characters")
    value = float(word)
    value = value if abs(value) >= _SMALLEST else 0.0
    if not low <= value <= high:
        raise HostileInput("number", f"{reading.place}: {word} is outside {low:g}..{high:g}")
    return value


def _join(numbers: Sequence[float]) -> str:
    return " ".join(map(format_number, numbers))
