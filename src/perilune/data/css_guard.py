"""Generated CSS is hostile input too: rules and declarations from a short list, written anew.

    clean_rules("h1{color:navy}.card{padding:8px}")     -> the same, or HostileInput
    clean_declarations("width:40px;background:#eee")

Selectors are element names, .class names (`is_class_name`, as in a page) and both joined by spaces or commas. Values
are numbers with a unit, colours and the keywords of each property. There are no functions, strings, comments, escapes,
at-rules or custom properties: so no url(), no @import, no expression and nothing that two parsers could read in two
ways.
"""

import re
from collections.abc import Mapping

from perilune.data.hostile import HostileInput, shown
from perilune.data.svg_values import COLOUR_NAMES

MAX_RULES = 200
MAX_DECLARATIONS = 2000
MAX_PIXELS = 4096.0
MAX_FONT_PIXELS = 200.0

_NUMBER = re.compile(r"(-?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+))(px|%|em|rem|fr|)")
_HEX = re.compile(r"#(?:[0-9a-fA-F]{3}|[0-9a-fA-F]{6})")
_CLASS = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,31}")
_ELEMENT = re.compile(r"[A-Za-z][A-Za-z0-9]{0,15}")
_COMMENT = re.compile(r"/\*.*?(?:\*/|\Z)", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:([0-9a-fA-F]{1,6})[ \t\r\n\f]?|(.))", re.DOTALL)
_URL = re.compile(r"url\s*\(")
_RULE = re.compile(r"([^{}]*)\{([^{}]*)\}")

_LINES = frozenset({"none", "solid", "dashed", "dotted", "double"})
_SIDES = ("top", "right", "bottom", "left")
_ALIGN = frozenset({"start", "end", "center", "stretch", "flex-start", "flex-end", "space-between", "space-around"})
_ALIGN = _ALIGN | {"space-evenly", "baseline"}
NUMBER, COLOUR = "<number>", "<colour>"


def _properties() -> dict[str, frozenset[str]]:
    """Property -> what its value may be made of: NUMBER, COLOUR and keywords."""
    length = frozenset({NUMBER, "auto"})
    known: dict[str, frozenset[str]] = {
        "display": frozenset({"block", "inline", "inline-block", "flex", "inline-flex", "grid", "none", "table"}),
        "position": frozenset({"static", "relative", "absolute"}),
        "box-sizing": frozenset({"border-box", "content-box"}),
        "overflow": frozenset({"hidden", "visible"}),
        "float": frozenset({"left", "right", "none"}),
        "clear": frozenset({"left", "right", "both", "none"}),
        "color": frozenset({COLOUR}),
        "background": frozenset({COLOUR}),
        "background-color": frozenset({COLOUR}),
        "border": _LINES | {NUMBER, COLOUR},
        "border-color": frozenset({COLOUR}),
        "border-style": _LINES,
        "border-width": frozenset({NUMBER}),
        "border-radius": frozenset({NUMBER}),
        "border-collapse": frozenset({"collapse", "separate"}),
        "border-spacing": frozenset({NUMBER}),
        "outline": _LINES | {NUMBER, COLOUR},
        "margin": length,
        "padding": frozenset({NUMBER}),
        "width": length,
        "height": length,
        "min-width": length,
        "min-height": length,
        "max-width": frozenset({NUMBER, "none"}),
        "max-height": frozenset({NUMBER, "none"}),
        "gap": frozenset({NUMBER}),
        "row-gap": frozenset({NUMBER}),
        "column-gap": frozenset({NUMBER}),
        "flex": frozenset({NUMBER, "auto", "none"}),
        "flex-grow": frozenset({NUMBER}),
        "flex-shrink": frozenset({NUMBER}),
        "flex-basis": length,
        "flex-direction": frozenset({"row", "column", "row-reverse", "column-reverse"}),
        "flex-wrap": frozenset({"wrap", "nowrap"}),
        "align-items": _ALIGN,
        "align-content": _ALIGN,
        "align-self": _ALIGN | {"auto"},
        "justify-content": _ALIGN,
        "justify-items": _ALIGN,
        "justify-self": _ALIGN | {"auto"},
        "grid-template-columns": length,
        "grid-template-rows": length,
        "opacity": frozenset({NUMBER}),
        "z-index": length,
        "font-size": frozenset({NUMBER}),
        "font-weight": frozenset({NUMBER, "normal", "bold"}),
        "font-style": frozenset({"normal", "italic"}),
        "font-family": frozenset({"sans-serif", "serif", "monospace"}),
        "line-height": frozenset({NUMBER, "normal"}),
        "letter-spacing": frozenset({NUMBER, "normal"}),
        "text-align": frozenset({"left", "right", "center", "justify"}),
        "text-decoration": frozenset({"none", "underline", "line-through"}),
        "text-transform": frozenset({"none", "uppercase", "lowercase", "capitalize"}),
        "vertical-align": frozenset({"top", "middle", "bottom", "baseline"}),
        "white-space": frozenset({"normal", "nowrap"}),
        "list-style": frozenset({"none", "disc", "circle", "square", "decimal"}),
        "list-style-type": frozenset({"none", "disc", "circle", "square", "decimal"}),
        "visibility": frozenset({"visible", "hidden"}),
    }
    for side in _SIDES:
        known[side] = length
        known[f"margin-{side}"] = length
        known[f"padding-{side}"] = frozenset({NUMBER})
        known[f"border-{side}"] = known["border"]
    return known


PROPERTIES: Mapping[str, frozenset[str]] = _properties()


def clean_rules(text: str) -> str:
    """The content of a <style> element, understood and written anew."""
    _refuse_constructs(text)
    rules: list[str] = []
    position = 0
    text = text.strip()
    while position < len(text):
        found = _RULE.match(text, position)
        if found is None:
            raise HostileInput("css", f"expected selector{{property:value}}, not {shown(text[position:])}")
        if len(rules) >= MAX_RULES:
            raise HostileInput("size", f"more than {MAX_RULES} CSS rules")
        selectors = ",".join(_clean_selector(selector) for selector in found[1].split(","))
        rules.append(f"{selectors}{{{clean_declarations(found[2])}}}")
        position = found.end()
    return "".join(rules)


def clean_declarations(text: str) -> str:
    """The content of a style attribute or of a rule's braces, understood and written anew."""
    _refuse_constructs(text)
    parts = [part for part in text.split(";") if part.strip()]
    if len(parts) > MAX_DECLARATIONS:
        raise HostileInput("size", f"more than {MAX_DECLARATIONS} CSS declarations")
    return ";".join(map(_clean_declaration, parts))


def _clean_declaration(text: str) -> str:
    name, colon, value = text.partition(":")
    name = name.strip().lower()
    if not colon or name not in PROPERTIES:
        raise HostileInput("css", f"{shown(name)} is not among the properties that are allowed")
    words = value.split()
    if not 1 <= len(words) <= 12:
        raise HostileInput("css", f"{name} has {len(words)} words; 1 to 12 are allowed")
    return f"{name}:{' '.join(_clean_word(name, word) for word in words)}"


def _clean_word(name: str, word: str) -> str:
    allowed = PROPERTIES[name]
    lowered = word.lower()
    if lowered in allowed:
        return lowered
    if COLOUR in allowed and (_HEX.fullmatch(word) or lowered in COLOUR_NAMES or lowered == "transparent"):
        return lowered
    if NUMBER in allowed and (found := _NUMBER.fullmatch(lowered)):
        if len(found[1]) > 12:
            raise HostileInput("number", f"{name}: a number of {len(found[1])} characters")
        value, unit = float(found[1]), found[2]
        limit = MAX_FONT_PIXELS if name in ("font-size", "letter-spacing") else MAX_PIXELS
        largest = limit / 16 if unit in ("em", "rem") else limit
        if abs(value) > largest:
            raise HostileInput("number", f"{name}: {shown(word)} is outside +-{largest:g}")
        return found[1] + unit
    raise HostileInput("css", f"{name}: {shown(word)} is not among the values that are allowed")


def is_class_name(word: str) -> bool:
    """Whether a class may be called so, in a page and in a selector."""
    return _CLASS.fullmatch(word) is not None


def _clean_selector(text: str) -> str:
    parts = text.split()
    if not 1 <= len(parts) <= 4:
        raise HostileInput("css", f"selector {shown(text)} has {len(parts)} parts; 1 to 4 are allowed")
    return " ".join(map(_clean_selector_part, parts))


def _clean_selector_part(part: str) -> str:
    element, dot, name = part.partition(".")
    if (element and not _ELEMENT.fullmatch(element)) or (dot and not is_class_name(name)):
        raise HostileInput("css", f"selector {shown(part)}; element and .class names are allowed")
    return element.lower() + dot + name  # names of classes are told apart by case, those of elements are not


def _refuse_constructs(text: str) -> None:
    """What has no place anywhere in the dialect, named so that a person finds it.

    An address needs a bracket, so nothing that draws it passes, however its name is spelled; "url" alone is an ordinary
    part of words, as of burlywood.
    """
    if _URL.search(_read_as_css(text)):
        raise HostileInput("url", "url() is not allowed")
    refused: tuple[tuple[str, str], ...] = (
        ("@", "at-rules are not allowed"),
        ("\\", "escapes are not allowed"),
        ("/*", "comments are not allowed"),
        ("(", "functions are not allowed"),
        ("<", "markup inside CSS is not allowed"),
        ("!", "!important is not allowed"),
    )
    for word, reason in refused:
        if word in text:
            raise HostileInput("css", reason)


def _read_as_css(text: str) -> str:
    """Without comments and with escapes resolved, in lower case; what a browser would not join is joined here too."""
    return _ESCAPE.sub(_unescaped, _COMMENT.sub("", text)).lower()


def _unescaped(found: re.Match[str]) -> str:
    if found[1] is None:
        return found[2]
    number = int(found[1], 16)
    return chr(number) if number < 0x110000 else "\ufffd"
