"""Generated SVG is hostile input: this is the gate in front of the renderer.

    clean = clean_svg(source, width=112, height=112)        # CleanSvg, or HostileInput with the rule that was broken

The source is parsed by defusedxml (no DTD, no entities, nothing external), every element and attribute has to be on the
lists below, every value is read by its own small grammar (`perilune.data.svg_values`), and the result is written anew
from what was understood: not one byte of the input is passed on. What is allowed draws static shapes and moves them:

    svg, g                                                  presentation attributes, g also `transform`
    rect circle ellipse line polyline polygon path          geometry, presentation, `transform`
    animate animateTransform set                            inside a shape or group

There is no way left to name another document or element: no href, url(), style, class, id, image, use, text (fonts
differ between machines), filter, gradient, script or event handler, and no namespace but SVG's.

The canvas is the task's: width and height are overwritten; a viewBox is kept when its sides are within 1..4096.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from perilune.data.hostile import HostileInput, RendererMissing, shown
from perilune.data.svg_values import (
    Reading,
    format_number,
    read_colour,
    read_dashes,
    read_keyword,
    read_number,
    read_path,
    read_points,
    read_seconds,
    read_transform,
    read_view_box,
    split_numbers,
)

SVG_NAMESPACE = "http://www.w3.org/2000/svg"
MAX_BYTES = 64 * 1024
MAX_ELEMENTS = 1000
MAX_DEPTH = 32
MAX_ANIMATIONS = 200
MAX_KEYFRAMES = 64
MAX_REPEATS = 1000
MAX_SCALE = 1000.0
"""The most that nested `scale` transforms may enlarge or shrink together."""

SHAPES = ("rect", "circle", "ellipse", "line", "polyline", "polygon", "path")
ANIMATIONS = ("animate", "animateTransform", "set")

Read = Callable[[str, Reading], str]
_coordinate = read_number
_length = partial(read_number, low=0)
_share = partial(read_number, low=0, high=1)


def _keywords(*words: str) -> Read:
    return partial(read_keyword, words=words)


PRESENTATION: Mapping[str, Read] = {
    "fill": read_colour,
    "stroke": read_colour,
    "fill-rule": _keywords("nonzero", "evenodd"),
    "fill-opacity": _share,
    "stroke-opacity": _share,
    "opacity": _share,
    "stroke-width": partial(read_number, low=0, high=1000),
    "stroke-linecap": _keywords("butt", "round", "square"),
    "stroke-linejoin": _keywords("miter", "round", "bevel"),
    "stroke-miterlimit": partial(read_number, low=1, high=100),
    "stroke-dasharray": read_dashes,
    "stroke-dashoffset": _coordinate,
}
_DRAWN = {**PRESENTATION, "transform": read_transform}
_BOX = {"x": _coordinate, "y": _coordinate, "width": _length, "height": _length}
_RADII = {"rx": _length, "ry": _length}
_CENTRE = {"cx": _coordinate, "cy": _coordinate}
ATTRIBUTES: Mapping[str, Mapping[str, Read]] = {
    "svg": {"width": _length, "height": _length, "viewBox": read_view_box, **PRESENTATION},
    "g": _DRAWN,
    "rect": {**_BOX, **_RADII, **_DRAWN},
    "circle": {**_CENTRE, "r": _length, **_DRAWN},
    "ellipse": {**_CENTRE, **_RADII, **_DRAWN},
    "line": {"x1": _coordinate, "y1": _coordinate, "x2": _coordinate, "y2": _coordinate, **_DRAWN},
    "polyline": {"points": read_points, **_DRAWN},
    "polygon": {"points": read_points, **_DRAWN},
    "path": {"d": read_path, **_DRAWN},
}

ANIMATED: Mapping[str, Read] = {
    name: read
    for attributes in ATTRIBUTES.values()
    for name, read in attributes.items()
    if read not in (read_transform, read_view_box, read_path, read_points, read_dashes)
}
"""What `animate` and `set` may change: numbers, colours and keywords."""
_TIMING: Mapping[str, Read] = {
    "dur": partial(read_seconds, low=0.001),
    "begin": read_seconds,
    "fill": _keywords("freeze", "remove"),
}


@dataclass(frozen=True, kw_only=True)
class CleanSvg:
    """A source that is safe to draw and to show: written by this module, in the task's size."""

    source: str
    width: int
    height: int
    num_elements: int
    num_animations: int


@dataclass(kw_only=True, eq=False)
class Node:
    tag: str
    attributes: dict[str, str]
    children: list["Node"] = field(default_factory=list)
    scale: float = 1.0


def clean_svg(source: str | bytes, *, width: int, height: int) -> CleanSvg:
    """The source, understood and written anew for a canvas of `width` x `height`, or HostileInput."""
    tree = _Gate()
    _parse(decode_source(source, MAX_BYTES), tree)
    root = tree.root
    if root is None:
        raise HostileInput("markup", "there is no <svg> element")
    _force_canvas(root, width, height)
    return CleanSvg(
        source=_write(root),
        width=width,
        height=height,
        num_elements=tree.num_elements,
        num_animations=tree.num_animations,
    )


def decode_source(source: str | bytes, max_bytes: int) -> str:
    """The text, once it is known to be small, UTF-8 and free of NUL; a byte order mark is no reason to guess."""
    if len(source) > max_bytes:
        raise HostileInput("size", f"{len(source):,} characters or bytes; at most {max_bytes:,} bytes are read")
    try:
        data = source.encode("utf-8") if isinstance(source, str) else bytes(source)
        text = data.decode("utf-8")
    except (UnicodeEncodeError, UnicodeDecodeError) as error:
        raise HostileInput("encoding", f"not UTF-8: {error.reason} at {error.start}") from None
    if len(data) > max_bytes:
        raise HostileInput("size", f"{len(data):,} bytes; at most {max_bytes:,} are read")
    if "\0" in text or "\ufeff" in text:
        raise HostileInput("characters", "NUL and byte order marks are not allowed")
    return text


def check_parser() -> None:
    """RendererMissing where generated sources cannot be read at all: to be known before hours of training."""
    try:
        import defusedxml.ElementTree  # noqa: F401
    except ImportError:
        raise RendererMissing("reading generated SVG needs defusedxml: pip install 'perilune[train]'") from None


def _parse(text: str, target: "_Gate") -> None:
    check_parser()
    from defusedxml.common import DefusedXmlException
    from defusedxml.ElementTree import DefusedXMLParser, ParseError

    # The declaration is the one place that could name another encoding; the dialect has none.
    if text.lstrip().startswith("<?xml"):
        raise HostileInput("instruction", "an XML declaration; the source begins with <svg")
    parser: Any = DefusedXMLParser(target=target, forbid_dtd=True, forbid_entities=True, forbid_external=True)
    try:
        parser.feed(text)
        parser.close()
    except DefusedXmlException as error:
        raise HostileInput("doctype", f"{type(error).__name__}: DTDs and entities are not allowed") from None
    except ParseError as error:
        raise HostileInput("markup", f"not well-formed XML: {shown(error, 120)}") from None


class _Gate:
    """The parser's target: refuses while reading, so that nothing forbidden is ever kept."""

    def __init__(self) -> None:
        self.root: Node | None = None
        self.num_elements = 0
        self.num_animations = 0
        self._open: list[Node] = []
        self._reading = Reading()

    def start(self, name: str, attributes: dict[str, str]) -> None:
        tag = _local_name(name)
        self.num_elements += 1
        if self.num_elements > MAX_ELEMENTS:
            raise HostileInput("size", f"more than {MAX_ELEMENTS:,} elements")
        if len(self._open) >= MAX_DEPTH:
            raise HostileInput("depth", f"elements nested deeper than {MAX_DEPTH}")
        parent = self._open[-1] if self._open else None
        self._check_place(tag, parent)
        if tag in ANIMATIONS:
            self.num_animations += 1
            if self.num_animations > MAX_ANIMATIONS:
                raise HostileInput("animation", f"more than {MAX_ANIMATIONS} animations")
            node = Node(tag=tag, attributes=_read_animation(tag, attributes, self._reading))
        else:
            node = Node(tag=tag, attributes=self._read_attributes(tag, attributes))
        if parent is None:
            self.root = node
        else:
            self._check_scale(node, parent, self._reading)
            parent.children.append(node)
        self._open.append(node)

    def end(self, name: str) -> None:
        self._open.pop()

    def data(self, text: str) -> None:
        if text.strip():
            raise HostileInput("text", f"characters between elements: {shown(text.strip())}")

    def pi(self, target: str, text: str | None = None) -> None:
        raise HostileInput("instruction", f"a processing instruction {shown(target)}")

    def close(self) -> Node | None:
        return self.root

    def _check_place(self, tag: str, parent: Node | None) -> None:
        if tag not in ATTRIBUTES and tag not in ANIMATIONS:
            allowed = ", ".join([*ATTRIBUTES, *ANIMATIONS])
            raise HostileInput("element", f"<{shown(tag)}> is not one of {allowed}")
        if (tag == "svg") != (parent is None):
            raise HostileInput("nesting", "<svg> is the outermost element, once")
        if parent is None:
            return
        if tag in ANIMATIONS:
            if parent.tag == "svg" or parent.tag in ANIMATIONS:
                raise HostileInput("nesting", f"<{tag}> belongs inside a shape or group, not inside <{parent.tag}>")
        elif parent.tag not in ("svg", "g"):
            raise HostileInput("nesting", f"<{tag}> inside <{parent.tag}>; shapes hold nothing but animations")

    def _read_attributes(self, tag: str, attributes: Mapping[str, str]) -> dict[str, str]:
        known = ATTRIBUTES[tag]
        found: dict[str, str] = {}
        for name, value in attributes.items():
            if name not in known:
                raise HostileInput("attribute", f"{shown(name)} of <{tag}> is not one of {', '.join(known)}")
            self._reading.begin(f"{name} of <{tag}>")
            found[name] = known[name](value, self._reading)
        return found

    def _check_scale(self, node: Node, parent: Node, reading: Reading) -> None:
        node.scale = parent.scale
        if "transform" in node.attributes:
            node.scale *= reading.scale
            if not 1 / MAX_SCALE <= node.scale <= MAX_SCALE:
                raise HostileInput("transform", f"nested scales multiply to {node.scale:g}; at most {MAX_SCALE:g}")


def _local_name(name: str) -> str:
    namespace, _, local = name.rpartition("}")
    if namespace != "{" + SVG_NAMESPACE:
        raise HostileInput("namespace", f'element {shown(name, 80)} is not in xmlns="{SVG_NAMESPACE}"')
    return local


def _read_animation(tag: str, attributes: Mapping[str, str], reading: Reading) -> dict[str, str]:
    """Attributes of animate, animateTransform or set, each by its own grammar; values are of the animated attribute."""
    name = attributes.get("attributeName", "")
    if tag == "animateTransform":
        kind = attributes.get("type", "translate")
        if name != "transform" or kind not in ("translate", "rotate", "scale"):
            raise HostileInput(
                "animation", f"animateTransform changes transform by translate, rotate or scale, not {shown(kind)}"
            )
        read_value: Read = partial(_read_transform_numbers, kind=kind)
    elif name in ANIMATED:
        read_value = ANIMATED[name]
    else:
        raise HostileInput("animation", f"attributeName {shown(name)} is not one of {', '.join(ANIMATED)}")
    known: dict[str, Read] = {"attributeName": _keywords(name), **_TIMING, "to": read_value}
    known["repeatCount"] = _read_repeats
    if tag != "set":
        known |= {"from": read_value, "by": read_value, "values": partial(_read_list, read=read_value)}
        known |= {"keyTimes": partial(_read_list, read=_share), "calcMode": _keywords("linear", "discrete")}
        known["additive"] = _keywords("replace", "sum")
    if tag == "animateTransform":
        known["type"] = _keywords("translate", "rotate", "scale")
    found: dict[str, str] = {}
    for attribute, value in attributes.items():
        if attribute not in known:
            raise HostileInput("attribute", f"{shown(attribute)} of <{tag}> is not one of {', '.join(known)}")
        reading.begin(f"{attribute} of <{tag}>")
        found[attribute] = known[attribute](value, reading)
    return found


def _read_transform_numbers(text: str, reading: Reading, *, kind: str) -> str:
    numbers = split_numbers(text, reading)
    if len(numbers) not in {"translate": (1, 2), "rotate": (1, 3), "scale": (1, 2)}[kind]:
        raise HostileInput("animation", f"{reading.place}: {len(numbers)} numbers for {kind}")
    if kind == "scale" and not all(abs(number) <= 100 for number in numbers):
        raise HostileInput("transform", f"{reading.place}: scale {shown(text)} is outside -100..100")
    return " ".join(format_number(number) for number in numbers)


def _read_list(text: str, reading: Reading, *, read: Read) -> str:
    parts = text.strip().rstrip(";").split(";")
    if len(parts) > MAX_KEYFRAMES:
        raise HostileInput("animation", f"{reading.place}: {len(parts):,} values; at most {MAX_KEYFRAMES}")
    return ";".join(read(part, reading) for part in parts)


def _read_repeats(text: str, reading: Reading) -> str:
    if text.strip() == "indefinite":
        return "indefinite"
    return read_number(text, reading, low=0, high=MAX_REPEATS)


def _force_canvas(root: Node, width: int, height: int) -> None:
    view_box = root.attributes.pop("viewBox", None)
    own = (root.attributes.pop("width", None), root.attributes.pop("height", None))
    if view_box is None:
        reading = Reading()
        reading.begin("width and height of <svg>")
        view_box = read_view_box(f"0 0 {own[0]} {own[1]}", reading) if own[0] and own[1] else f"0 0 {width} {height}"
    root.attributes = {"width": str(width), "height": str(height), "viewBox": view_box, **root.attributes}


def _write(node: Node) -> str:
    namespace = f' xmlns="{SVG_NAMESPACE}"' if node.tag == "svg" else ""
    # Values are made of digits, letters and "#;,.-+() " by construction; none needs escaping.
    attributes = "".join(f' {name}="{value}"' for name, value in node.attributes.items())
    if not node.children:
        return f"<{node.tag}{namespace}{attributes}/>"
    inner = "".join(_write(child) for child in node.children)
    return f"<{node.tag}{namespace}{attributes}>{inner}</{node.tag}>"
