"""Hostile SVG: every case is refused by name, every mutation ends in a picture or a PictureError."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.data import render_worker
from perilune.data.hostile import HostileInput, PictureError, RendererMissing, RenderFailed
from perilune.data.pictures import draw_svg, draw_svgs, svg_worker
from perilune.data.raster import decode_png, encode_png, rasterize
from perilune.data.render_worker import RenderWorker
from perilune.data.svg_guard import clean_svg

NS = 'xmlns="http://www.w3.org/2000/svg"'
XLINK = 'xmlns:xlink="http://www.w3.org/1999/xlink"'
VALID = (
    f'<svg {NS} viewBox="0 0 112 112"><rect x="10" y="12" width="40" height="30" fill="red"/>'
    '<circle cx="70" cy="60" r="20" fill="none" stroke="#00f" stroke-width="3"/>'
    '<g transform="translate(5 6) rotate(30 40 40)"><polygon points="20,80 40,100 5,95" fill="green"/></g>'
    '<path d="M5 5h10v10C1 2 3 4 5 6a3 3 0 01 4 4z" fill="black"/></svg>'
)


def svg(inner: str, attributes: str = "") -> str:
    return f"<svg {NS} {attributes}>{inner}</svg>"


def path(data: str) -> str:
    return svg(f'<path d="{data}"/>')


def animated(attributes: str, tag: str = "animate") -> str:
    return svg(f'<rect width="9" height="9"><{tag} {attributes}/></rect>')


LAUGHS = (
    '<!DOCTYPE lolz [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;"><!ENTITY c "&b;&b;&b;&b;&b;&b;">]>'
    f"<svg {NS}>&c;</svg>"
)
NESTED_USE = '<g id="a"><rect/></g>' + "".join(
    f'<g id="{chr(98 + n)}"><use href="#{chr(97 + n)}"/><use href="#{chr(97 + n)}"/></g>' for n in range(20)
)
HOSTILE: dict[str, tuple[str, str | bytes]] = {
    "billion laughs": ("doctype", LAUGHS),
    "external entity": (
        "doctype",
        f'<!DOCTYPE svg [<!ENTITY x SYSTEM "file:///etc/passwd">]><svg {NS}>&x;</svg>',
    ),
    "parameter entity": ("doctype", f'<!DOCTYPE svg [<!ENTITY % x SYSTEM "http://a.invalid/x"> %x;]><svg {NS}/>'),
    "plain doctype": ("doctype", f'<!DOCTYPE svg PUBLIC "-//W3C//DTD SVG 1.1//EN" "svg11.dtd"><svg {NS}/>'),
    "undefined entity": ("markup", svg("&nbsp;")),
    "style sheet instruction": ("instruction", f'<?xml-stylesheet href="http://a.invalid/x.css"?><svg {NS}/>'),
    "inner instruction": ("instruction", svg("<?php x ?>")),
    "xml declaration": ("instruction", f'<?xml version="1.0"?><svg {NS}/>'),
    "utf-7 declaration": ("instruction", f'<?xml version="1.0" encoding="utf-7"?><svg {NS}/>'),
    "utf-16 bytes": ("encoding", f"<svg {NS}/>".encode("utf-16")),
    "utf-16 without a mark": ("characters", f"<svg {NS}/>".encode("utf-16-le")),
    "latin-1 bytes": ("encoding", svg("é").encode("latin-1")),
    "overlong utf-8": ("encoding", b"\xc0\xbcsvg/>"),
    "half a surrogate pair": ("encoding", svg("\ud800")),
    "byte order mark": ("characters", "\ufeff" + svg("")),
    "null byte": ("characters", svg("\0")),
    "control character": ("markup", svg("\x08")),
    "empty": ("markup", ""),
    "white space": ("markup", "  \n "),
    "no markup": ("markup", "a red circle"),
    "cut short": ("markup", VALID[:-8]),
    "two roots": ("markup", svg("") + svg("")),
    "crossed tags": ("markup", svg("<g><rect></g></rect>")),
    "duplicate attribute": ("markup", svg('<rect x="1" x="2"/>')),
    "no namespace": ("namespace", "<svg><rect/></svg>"),
    "html namespace": ("namespace", svg('<p xmlns="http://www.w3.org/1999/xhtml"/>')),
    "html root": ("namespace", "<html><body/></html>"),
    "namespaced attribute": ("attribute", svg('<rect xml:base="http://a.invalid/"/>')),
    "script": ("element", svg("<script>alert(1)</script>")),
    "script in CDATA": ("element", svg("<script><![CDATA[alert(1)]]></script>")),
    "style element": ("element", svg("<style>@import 'http://a.invalid/x.css';</style>")),
    "foreignObject": ("element", svg("<foreignObject><g/></foreignObject>")),
    "image file": ("element", svg(f'<image {XLINK} xlink:href="file:///etc/passwd" width="9" height="9"/>')),
    "image data": ("element", svg('<image href="data:image/png;base64,iVBORw0KGgo=" width="9" height="9"/>')),
    "feImage": ("element", svg('<filter><feImage href="http://a.invalid/"/></filter>')),
    "use": ("element", svg('<use href="#x"/>')),
    "use of another file": ("element", svg(f'<use {XLINK} xlink:href="other.svg#x"/>')),
    "use bomb": ("attribute", svg(NESTED_USE)),
    "use of itself": ("element", svg('<defs><g><use href="#a"/></g></defs>')),
    "link": ("element", svg('<a href="javascript:alert(1)"><rect/></a>')),
    "filter bomb": ("element", svg('<filter id="f"><feGaussianBlur stdDeviation="1000"/></filter>' * 20)),
    "turbulence": ("element", svg('<feTurbulence numOctaves="1000000"/>')),
    "pattern": ("element", svg('<pattern width="0.0001" height="0.0001"/>')),
    "mask": ("element", svg("<mask/>")),
    "clipPath": ("element", svg("<clipPath/>")),
    "gradient": ("element", svg("<linearGradient/>")),
    "marker": ("element", svg("<marker/>")),
    "text": ("element", svg('<text x="1" y="9">hello</text>')),
    "switch": ("element", svg("<switch><g/></switch>")),
    "upper case element": ("element", svg("<RECT/>")),
    "animateMotion": ("element", svg('<rect><animateMotion path="M0 0"/></rect>')),
    "nested svg": ("nesting", svg(f"<svg {NS}/>")),
    "root is a shape": ("nesting", f"<rect {NS}/>"),
    "shape in a shape": ("nesting", svg("<rect><rect/></rect>")),
    "animation of the canvas": ("nesting", svg('<animate attributeName="width" to="9" dur="1s"/>')),
    "animation of an animation": (
        "nesting",
        animated('attributeName="x" dur="1s"><set attributeName="x"/></animate><g'),
    ),
    "onload": ("attribute", svg("", 'onload="alert(1)"')),
    "onclick": ("attribute", svg('<rect onclick="alert(1)"/>')),
    "href on a shape": ("attribute", svg('<rect href="http://a.invalid/"/>')),
    "style attribute": ("attribute", svg('<rect style="fill:url(http://a.invalid/)"/>')),
    "class": ("attribute", svg('<rect class="x"/>')),
    "id": ("attribute", svg('<rect id="x"/>')),
    "filter attribute": ("attribute", svg('<rect filter="url(#f)"/>')),
    "clip-path attribute": ("attribute", svg('<rect clip-path="url(#c)"/>')),
    "marker attribute": ("attribute", svg('<path marker-mid="url(#m)" d="M0 0"/>')),
    "preserveAspectRatio": ("attribute", svg("", 'preserveAspectRatio="none"')),
    "fill by reference": ("url", svg('<rect fill="url(#x)"/>')),
    "fill by address": ("url", svg('<rect fill="url(http://a.invalid/x.svg#y)"/>')),
    "unknown colour": ("colour", svg('<rect fill="expression(alert(1))"/>')),
    "colour with an escape": ("colour", svg('<rect fill="r\\65 d"/>')),
    "text between elements": ("text", svg("hello")),
    "text in CDATA": ("text", svg("<![CDATA[<script>]]>")),
    "escaped text": ("text", svg("&#60;script&#62;")),
    "a million bytes": ("size", svg(" " * 1_000_000)),
    "64 KB of wide characters": ("size", svg("<!--" + "€" * 30_000 + "-->")),
    "too many elements": ("size", svg("<g/>" * 1001)),
    "too many numbers": ("size", svg(f'<polyline points="{"1 " * 20_002}"/>')),
    "deep nesting": ("depth", svg("<g>" * 5000 + "</g>" * 5000)),
    "1e308": ("number", svg('<rect width="1e308" height="1"/>')),
    "infinity by exponent": ("number", svg('<rect width="1e999"/>')),
    "NaN": ("number", svg('<circle r="NaN"/>')),
    "inf": ("number", svg('<circle r="inf"/>')),
    "per cent": ("number", svg('<rect width="100%"/>')),
    "units": ("number", svg('<rect width="10cm"/>')),
    "negative radius": ("number", svg('<circle r="-5"/>')),
    "Arabic digits": ("number", svg('<circle r="٣"/>')),
    "underscore in a number": ("number", svg('<circle r="1_0"/>')),
    "a number of 10,000 digits": ("number", svg(f'<circle r="0.{"1" * 10_000}"/>')),
    "huge viewBox": ("number", svg("", 'viewBox="0 0 1000000000 1000000000"')),
    "tiny viewBox": ("number", svg("", 'viewBox="0 0 0.0000001 0.0000001"')),
    "empty viewBox": ("number", svg("", 'viewBox="0 0 0 0"')),
    "viewBox of three": ("number", svg("", 'viewBox="0 0 9"')),
    "huge canvas": ("number", svg("", 'width="9000" height="9000"')),
    "odd points": ("number", svg('<polygon points="1 2 3"/>')),
    "double comma": ("number", svg('<polygon points="1,,2"/>')),
    "giant stroke": ("number", svg('<line x2="9" stroke="red" stroke-width="99999"/>')),
    "dust dashes": ("number", svg('<line x2="9999" stroke="red" stroke-dasharray="0.00001"/>')),
    "giant dash list": ("number", svg(f'<line x2="9" stroke-dasharray="{"1 " * 5000}"/>')),
    "opacity of 9": ("number", svg('<g opacity="9"/>')),
    "path of a million commands": ("size", path("M0 0" + "L1 1" * 1_000_000)),
    "path of 60,000 commands": ("path", path("M0 0" + "z" * 60_000)),
    "path without a move": ("path", path("L1 1")),
    "path with an unknown command": ("path", path("M0 0X1 1")),
    "path with a long s": ("path", path("M0 0ſ1 2 3 4")),
    "path cut short": ("path", path("M0 0C1 2 3")),
    "numbers after a close": ("path", path("M0 0z1 1")),
    "arc flag of 2": ("path", path("M0 0a1 1 0 2 0 5 5")),
    "path to 1e9": ("number", path("M0 0L1e9 0")),
    "path with NaN": ("path", path("M0 0LNaN 0")),
    "matrix": ("transform", svg('<g transform="matrix(1e9 0 0 1 0 0)"/>')),
    "skew": ("transform", svg('<g transform="skewX(89.9999)"/>')),
    "scale bomb": ("transform", svg('<g transform="scale(100)">' * 8 + "</g>" * 8)),
    "shrink bomb": ("transform", svg('<g transform="scale(0.01)">' * 8 + "</g>" * 8)),
    "scale of zero": ("transform", svg('<g transform="scale(0)"/>')),
    "long transform list": ("transform", svg(f'<g transform="{"rotate(1)" * 5000}"/>')),
    "unclosed transform": ("transform", svg('<g transform="rotate(1"/>')),
    "a thousand million repeats": ("number", animated('attributeName="x" to="9" dur="1s" repeatCount="1000000000"')),
    "animation of href": ("animation", animated('attributeName="href" to="javascript:alert(1)" dur="1s"', "set")),
    "animation of onclick": ("animation", animated('attributeName="onclick" to="alert(1)" dur="1s"')),
    "animation of nothing": ("animation", animated('to="1" dur="1s"')),
    "animation to an address": ("url", animated('attributeName="fill" to="url(#x)" dur="1s"')),
    "animation for a year": ("number", animated('attributeName="x" to="9" dur="31536000s"')),
    "animation in no time": ("number", animated('attributeName="x" to="9" dur="0s"')),
    "animation by event": ("animation", animated('attributeName="x" to="9" dur="1s" begin="a.click"')),
    "animation with many frames": ("animation", animated(f'attributeName="x" values="{"1;" * 99}2" dur="1s"')),
    "animated skew": (
        "animation",
        animated('attributeName="transform" type="skewX" to="9" dur="1s"', "animateTransform"),
    ),
    "animated scale bomb": (
        "transform",
        animated('attributeName="transform" type="scale" to="9999" dur="1s"', "animateTransform"),
    ),
    "animation with href": ("attribute", animated('attributeName="x" to="9" dur="1s" href="#y"')),
    "many animations": ("animation", svg("<rect>" + '<set attributeName="x" to="1"/>' * 300 + "</rect>")),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_source_is_refused_by_the_rule_it_breaks(name: str) -> None:
    rule, source = HOSTILE[name]
    with pytest.raises(HostileInput) as refused:
        clean_svg(source, width=112, height=112)
    assert refused.value.rule == rule
    assert refused.value.reason and len(str(refused.value)) < 600


def test_valid_source_draws_the_same_through_guard_and_worker() -> None:
    assert np.array_equal(draw_svg(VALID, 112, 112), rasterize(VALID, 112, 112))


def test_cleaning_a_clean_source_changes_nothing() -> None:
    once = clean_svg(VALID, width=112, height=112)
    assert clean_svg(once.source, width=112, height=112) == once


def test_nothing_of_the_input_is_passed_on_but_what_was_understood() -> None:
    source = (
        "<!-- secret -->\n<s:svg xmlns:s='http://www.w3.org/2000/svg'  xmlns:q='urn:secret'><s:g fill=' red '/></s:svg>"
    )
    clean = clean_svg(source, width=20, height=10).source
    assert clean == f'<svg {NS} width="20" height="10" viewBox="0 0 20 10"><g fill="red"/></svg>'


@pytest.mark.parametrize(
    "attributes", ["", 'viewBox="0 0 24 24"', 'width="500" height="20"', 'width="9" height="9" viewBox="0 0 50 50"']
)
def test_canvas_has_the_size_of_the_task(attributes: str) -> None:
    assert draw_svg(svg('<rect width="5" height="5"/>', attributes), 60, 40).shape == (40, 60, 3)


@pytest.mark.parametrize(
    "data,expected",
    [
        ("M1 2 3 4 5 6", "M1 2L3 4L5 6"),
        ("m1-2.5.5-3", "m1 -2.5l0.5 -3"),
        ("M0,0 a1 1 0 01.5.5", "M0 0a1 1 0 0 1 0.5 0.5"),
        ("M1 1h2 3v4z m1 1", "M1 1h2h3v4zm1 1"),
        ("M1e1 0T5 5 6 6", "M10 0T5 5T6 6"),
        ("", ""),
    ],
)
def test_path_data_is_written_one_command_at_a_time(data: str, expected: str) -> None:
    assert f'd="{expected}"' in clean_svg(path(data), width=9, height=9).source


def test_animations_of_the_dialect_pass() -> None:
    source = svg(
        '<circle cx="9" cy="9" r="4"><animate attributeName="cx" values="9;50;9" keyTimes="0;0.5;1" dur="800ms" '
        'repeatCount="indefinite"/><animateTransform attributeName="transform" type="rotate" from="0 9 9" to="360 9 9" '
        'dur="1.5s" additive="sum"/><set attributeName="fill" to="blue" begin="0.4s" fill="freeze"/></circle>'
    )
    clean = clean_svg(source, width=112, height=112)
    assert clean.num_animations == 3
    assert 'dur="800ms"' in clean.source and 'to="360 9 9"' in clean.source


# The worker ----------------------------------------------------------------------------------------------------------


def test_worker_cannot_read_a_file_even_if_the_guard_were_open(tmp_path: Path) -> None:
    picture = tmp_path / "red.png"
    picture.write_bytes(encode_png(np.full((20, 20, 3), (255, 0, 0), dtype=np.uint8)))
    source = svg(f'<image {XLINK} width="20" height="20" xlink:href="{picture}"/>', 'viewBox="0 0 20 20"')
    assert (rasterize(source, 20, 20) == (255, 0, 0)).all(), "this process can read it: the worker has to be tested"
    drawn = decode_png(svg_worker().render({"svg": source, "width": 20, "height": 20}))
    assert (drawn == 255).all()
    with pytest.raises(HostileInput):
        draw_svg(source, 20, 20)


def test_steps_that_add_up_to_a_coordinate_beyond_the_renderer_cost_one_picture_at_most() -> None:
    far = "M0.1 -10000" + "v-10000" * 400 + "l-0.02 9999" + "v10000" * 400 + "M0.1 0.01l-0.06 0.07l-0.028 -0.05"
    pen = 'fill="none" stroke="green" stroke-width="9" stroke-linecap="round" stroke-linejoin="round"'
    (result,) = draw_svgs([svg(f'<g transform="scale(100) scale(10)"><path {pen} d="{far}"/></g>')], 50, 50)
    assert isinstance(result, np.ndarray | RenderFailed)
    assert (draw_svg(svg('<rect width="50" height="50" fill="red"/>'), 50, 50) == (255, 0, 0)).all()


def test_worker_is_reused_and_outlives_a_slow_and_a_huge_picture() -> None:
    blur = '<filter id="f"><feGaussianBlur stdDeviation="400"/></filter>'
    slow = svg(blur + '<rect width="4000" height="4000" filter="url(#f)"/>' * 500, 'viewBox="0 0 50 50"')
    with RenderWorker(render_seconds=0.2, memory_bytes=300 << 20) as worker:
        small = {"svg": svg("", 'viewBox="0 0 9 9"'), "width": 9, "height": 9}
        first = worker.render(small)
        assert worker.render(small) == first and worker.num_starts == 1
        with pytest.raises(RenderFailed, match="more than 0.2 s"):
            worker.render({"svg": slow, "width": 50, "height": 50})
        assert worker.render(small) == first and worker.num_starts == 2
        with pytest.raises(RenderFailed):
            worker.render({"svg": svg("", 'viewBox="0 0 9 9"'), "width": 30_000, "height": 30_000})
        assert worker.render(small) == first


def test_worker_that_says_nothing_is_ended(tmp_path: Path) -> None:
    program = tmp_path / "silent.py"
    program.write_text(
        "import socket, sys, time\ns = socket.socket(fileno=int(sys.argv[1]))\n"
        "s.sendall(b'\\0\\0\\0\\1P')\ntime.sleep(600)\n"
    )
    with RenderWorker(program=program, wall_seconds=0.3) as worker:
        with pytest.raises(RenderFailed, match="no picture after 0.3 s"):
            worker.render({"svg": "x" * 1_000_000})
        assert worker.pid is None


def test_worker_that_cannot_start_says_so(tmp_path: Path) -> None:
    program = tmp_path / "missing.py"
    program.write_text("import socket, sys\nsocket.socket(fileno=int(sys.argv[1])).sendall(b'\\0\\0\\0\\5Fgone')\n")
    with RenderWorker(program=program) as worker, pytest.raises(RendererMissing, match="gone"):
        worker.render({"svg": ""})


def test_worker_finds_packages_where_this_process_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, elsewhere = tmp_path / "draws.py", tmp_path / "elsewhere"
    (elsewhere / "only_here").mkdir(parents=True)
    (elsewhere / "only_here" / "__init__.py").write_text("DRAWN = b'Phere'\n")
    (elsewhere / "one_file.py").write_text("")
    program.write_text(
        "import socket, sys\n"
        f"sys.path.append({str(Path(render_worker.__file__).parent)!r})\n"
        "from svg_process import find_packages, receive, send\n"
        "find_packages()\nimport one_file, only_here\n"
        "s = socket.socket(fileno=int(sys.argv[1]))\nsend(s, b'P')\nreceive(s)\nsend(s, only_here.DRAWN)\n"
    )
    monkeypatch.setattr(render_worker, "PACKAGES", ("only_here", "one_file", "nowhere_at_all"))
    with RenderWorker(program=program) as worker, pytest.raises(RendererMissing):
        worker.render({"svg": ""})
    monkeypatch.syspath_prepend(elsewhere)
    with RenderWorker(program=program) as worker:
        assert worker.render({"svg": ""}) == b"here"


def test_forked_process_starts_a_worker_of_its_own() -> None:
    worker = svg_worker()
    before = worker.render({"svg": svg("", 'viewBox="0 0 9 9"'), "width": 9, "height": 9})
    ours = worker.pid
    child = os.fork()
    if child == 0:
        same = worker.render({"svg": svg("", 'viewBox="0 0 9 9"'), "width": 9, "height": 9}) == before
        own = worker.pid != ours
        worker.close()
        os._exit(0 if same and own else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert worker.pid == ours
    assert worker.render({"svg": svg("", 'viewBox="0 0 9 9"'), "width": 9, "height": 9}) == before


def test_batch_gives_one_result_per_source_and_raises_nothing() -> None:
    results = draw_svgs([VALID, "nonsense", HOSTILE["script"][1], VALID], 112, 112)
    assert [isinstance(result, PictureError) for result in results] == [False, True, True, False]


# Fuzzing -------------------------------------------------------------------------------------------------------------


def draws_or_is_refused(source: str | bytes) -> None:
    try:
        pixels = draw_svg(source, 56, 56)
    except (HostileInput, RenderFailed):
        return
    assert pixels.shape == (56, 56, 3)


@given(st.one_of(st.binary(max_size=300), st.text(max_size=300)))
def test_random_input_is_drawn_or_refused(source: str | bytes) -> None:
    draws_or_is_refused(source)


PIECES = st.sampled_from(
    [
        '"',
        "<",
        ">",
        "/",
        "&",
        "&#0;",
        "1e9",
        "-",
        "url(#a)",
        " x='1'",
        "<g>",
        "</g>",
        "<![CDATA[",
        "]]>",
        "é",
        "\0",
        "M",
        "a",
    ]
)


@settings(max_examples=300)
@given(st.data())
def test_mutated_source_is_drawn_or_refused(data: st.DataObject) -> None:
    source = VALID
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(source)))
        end = data.draw(st.integers(start, min(len(source), start + 8)))
        source = source[:start] + data.draw(st.one_of(PIECES, st.text(max_size=3))) + source[end:]
    draws_or_is_refused(source)


@given(st.text(alphabet="MLHVCSQTAZmlhvcsqtaz0123456789.,- e+", max_size=80))
def test_path_data_is_drawn_or_refused(data: str) -> None:
    draws_or_is_refused(path(data))
