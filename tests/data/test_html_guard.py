"""Hostile HTML and CSS: every case is refused by name; what passes can load nothing, even where the guard were open."""

import http.server
import os
import random
import re
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.data.hostile import HostileInput, RendererMissing, RenderFailed
from perilune.data.html_guard import clean_html
from perilune.data.pictures import HTML_PROGRAM, draw_html, html_worker
from perilune.data.raster import decode_png, encode_png
from perilune.data.render_worker import RenderWorker

VALID = (
    "<!doctype html><html lang=en><head><meta charset=utf-8><title>Shop</title>"
    "<style>body{margin:0;background:#fafafa} .card{padding:8px;border:1px solid gray} h1,.card p{color:navy}</style>"
    '</head><body style="font-size:14px"><div class="card"><h1>Fish &amp; chips</h1><p>12 &lt; 13<br>ok</p></div>'
    "<table><tr><th>a</th><td colspan=2>b</td></tr></table><ul><li>one</li></ul></body></html>"
)


def style(css: str) -> str:
    return f"<style>{css}</style><div>x</div>"


HOSTILE: dict[str, tuple[str, str | bytes]] = {
    "script": ("element", "<script>alert(1)</script>"),
    "script in upper case": ("element", "<ScRiPt>alert(1)</sCrIpT>"),
    "image": ("element", "<img src=x onerror=alert(1)>"),
    "svg": ("element", "<svg onload=alert(1)></svg>"),
    "math": ("element", "<math><mtext></mtext></math>"),
    "iframe": ("element", "<iframe srcdoc='<script>alert(1)</script>'></iframe>"),
    "object": ("element", "<object data='file:///etc/passwd'></object>"),
    "embed": ("element", "<embed src='x.swf'>"),
    "link": ("element", "<link rel=stylesheet href='http://a.invalid/x.css'>"),
    "anchor": ("element", "<a href='javascript:alert(1)'>x</a>"),
    "form": ("element", "<form action='http://a.invalid/'></form>"),
    "input": ("element", "<input autofocus onfocus=alert(1)>"),
    "base": ("element", "<base href='http://a.invalid/'>"),
    "video": ("element", "<video src='http://a.invalid/x.mp4'></video>"),
    "template": ("element", "<template><p>x</p></template>"),
    "noscript": ("element", "<noscript><p title='</noscript><img src=x>'></noscript>"),
    "textarea": ("element", "<textarea></textarea><p>x</p>"),
    "custom element": ("element", "<x-y></x-y>"),
    "marquee": ("element", "<marquee>x</marquee>"),
    "meta refresh": (
        "attribute",
        "<html><head><meta http-equiv=refresh content='0;url=http://a.invalid/'></head><body></body></html>",
    ),
    "meta charset utf-7": ("attribute", "<html><head><meta charset=utf-7></head><body></body></html>"),
    "onclick": ("attribute", "<div onclick='alert(1)'>x</div>"),
    "onload of the body": ("attribute", "<html><body onload='alert(1)'></body></html>"),
    "id": ("attribute", "<div id=x>x</div>"),
    "contenteditable": ("attribute", "<div contenteditable>x</div>"),
    "duplicate attribute": ("attribute", "<div class=a class=b>x</div>"),
    "class with markup": ("attribute", "<div class='a\"><script>'>x</div>"),
    "href": ("url", "<div href='http://a.invalid/'>x</div>"),
    "background address": ("url", "<html><body background='http://a.invalid/x.png'></body></html>"),
    "url in a style attribute": ("url", "<div style='background:url(http://a.invalid/x.png)'>x</div>"),
    "url in upper case": ("url", style("div{background:URL(//a.invalid/x)}")),
    "import": ("css", style("@import 'http://a.invalid/x.css';")),
    "font-face": ("css", style("@font-face{font-family:x}")),
    "escaped url": ("url", style("div{background:\\75 rl(x)}")),
    "url escaped in the middle": ("url", style("div{background:u\\72l(x)}")),
    "url with a letter escaped": ("url", style("div{background:\\u\\rl(x)}")),
    "url parted by a comment": ("url", style("div{background:url/**/(x)}")),
    "url with a comment inside": ("url", style("div{background:u/* */rl(x)}")),
    "url and a space": ("url", style("div{background:url (x)}")),
    "url with an escaped bracket": ("url", style("div{background:url\\28 x)}")),
    "url after a comment without end": ("css", style("div{background:/* url(x)}")),
    "src": ("css", style("div{background:src('x')}")),
    "comment in CSS": ("css", style("div{color:re/**/d}")),
    "expression": ("css", style("div{width:expression(alert(1))}")),
    "calc bomb": ("css", style("div{width:calc(1px*1e9)}")),
    "custom property bomb": ("css", style("div{--a:lol lol;--b:x}")),
    "image-set": ("css", style("div{background:image-set('x.png' 1x)}")),
    "unknown property": ("css", style("div{-moz-binding:x}")),
    "behavior": ("css", style("div{behavior:x}")),
    "filter": ("css", style("div{filter:blur(900px)}")),
    "fixed position": ("css", style("div{position:fixed}")),
    "attribute selector": ("css", style("div[class^=a]{color:red}")),
    "pseudo class": ("css", style("div:hover{color:red}")),
    "star selector": ("css", style("*{color:red}")),
    "unclosed rule": ("css", style("div{color:red")),
    "important": ("css", style("div{color:red!important}")),
    "style breakout": ("css", "<style>div{color:red}<!-- </style><div>x</div>"),
    "huge width": ("number", "<div style='width:999999999px'>x</div>"),
    "huge font": ("number", "<div style='font-size:4000px'>x</div>"),
    "exponent": ("css", "<div style='width:1e9px'>x</div>"),
    "huge span": ("number", "<table><tr><td colspan=100000>x</td></tr></table>"),
    "comment": ("markup", "<div>x</div><!-- <script> -->"),
    "conditional comment": ("markup", "<!--[if IE]><script></script><![endif]-->"),
    "CDATA": ("markup", "<div><![CDATA[x]]></div>"),
    "self-closing div": ("markup", "<div/>x"),
    "empty": ("markup", ""),
    "plain words": ("markup", "hello"),
    "instruction": ("instruction", "<?xml version='1.0'?><div>x</div>"),
    "old doctype": ("doctype", "<!DOCTYPE html PUBLIC '-//W3C//DTD HTML 4.01//EN' 'x'><div>x</div>"),
    "late doctype": ("doctype", "<div>x</div><!doctype html>"),
    "crossed tags": ("nesting", "<div><b>x</div></b>"),
    "never closed": ("nesting", "<div><p>x</p>"),
    "end tag alone": ("nesting", "<div>x</div></div>"),
    "block inside a paragraph": ("nesting", "<p><div>x</div></p>"),
    "block deep inside a paragraph": ("nesting", "<p><span><div>x</div></span></p>"),
    "paragraph deep inside a paragraph": ("nesting", "<p><b><i><p>x</p></i></b></p>"),
    "rule deep inside a paragraph": ("nesting", "<p><span><hr></span></p>"),
    "list deep inside a paragraph": ("nesting", "<p><button><ul><li>x</li></ul></button></p>"),
    "heading inside a heading": ("nesting", "<h1><h2>x</h2></h1>"),
    "heading deep inside a heading": ("nesting", "<h1><div><h1>x</h1></div></h1>"),
    "cell without a table": ("nesting", "<div><td>x</td></div>"),
    "text that a table would throw out": ("text", "<table>x<tr><td>y</td></tr></table>"),
    "second body": ("nesting", "<html><body></body><body></body></html>"),
    "content after the end": ("nesting", "<html><body></body></html><div>x</div>"),
    "deep nesting": ("depth", "<div>" * 5000 + "</div>" * 5000),
    "too many elements": ("size", "<br>" * 1001),
    "a million bytes": ("size", "<div>" + "x" * 1_000_000 + "</div>"),
    "too much text": ("size", "<div>" + "x" * 30_000 + "</div>"),
    "too many rules": ("size", style("b{color:red}" * 500)),
    "null byte": ("characters", "<div>\0</div>"),
    "control character": ("characters", "<div>\x08</div>"),
    "utf-16": ("encoding", "<div>x</div>".encode("utf-16")),
    "latin-1": ("encoding", "<div>é</div>".encode("latin-1")),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_page_is_refused_by_the_rule_it_breaks(name: str) -> None:
    rule, source = HOSTILE[name]
    with pytest.raises(HostileInput) as refused:
        clean_html(source, width=112, height=112)
    assert refused.value.rule == rule, str(refused.value)


def test_valid_page_is_written_anew_with_quotes_ends_and_escapes() -> None:
    clean = clean_html(VALID, width=112, height=112).source
    assert '<td colspan="2">b</td>' in clean and "<p>12 &lt; 13<br>ok</p>" in clean
    assert "h1,.card p{color:navy}" in clean and "Shop" not in clean
    assert '<body style="font-size:14px">' in clean


@pytest.mark.parametrize("page", [
    '<div style="color:burlywood">x</div>',
    '<style>.curl{color:red}</style><div class="curl">x</div>',
    '<style>.url b.Url{color:red}</style><div class="url"><b class="Url">x</b></div>',
    '<style>.Card{color:red}</style><div class="Card">x</div>',
    '<style>div.menu--open{color:red}</style><div class="menu--open">x</div>',
])  # fmt: skip
def test_words_that_only_look_like_an_address_pass_as_they_are(page: str) -> None:
    clean = clean_html(page, width=9, height=9).source
    assert all(piece in clean for piece in re.findall(r"<style>.*?</style>|<div.*", page))


def test_elements_are_styled_in_any_case_and_classes_in_their_own() -> None:
    clean = clean_html("<style>H1,DIV.Card{color:red}</style><H1>x</H1>", width=9, height=9).source
    assert "<style>h1,div.Card{color:red}</style></head><body><h1>x</h1>" in clean


@given(st.text(st.sampled_from("aB9-_.é "), max_size=6))
def test_a_name_is_good_for_a_class_just_when_it_is_good_for_a_selector(name: str) -> None:
    def passes(page: str) -> bool:
        try:
            clean_html(page, width=9, height=9)
        except HostileInput:
            return False
        return True

    words = name.split()
    pages = ("<div class='{}'>x</div>", "<style>.{}{{color:red}}</style><div>x</div>")
    for word in words:
        assert len({passes(page.format(word)) for page in pages}) == 1, word


def test_fragment_needs_no_frame() -> None:
    assert "<body><div>x</div></body>" in clean_html("<div>x</div>", width=9, height=9).source


ALLOWED_OUTPUT = re.compile(
    r"<!doctype html>|</?[a-z][a-z0-9]*(?: (?:style|class|colspan|rowspan)=\"[^\"<>]*\")*>|[^<>]+"
)
HEAD = re.compile(r"<meta charset=\"utf-8\"><meta http-equiv=\"Content-Security-Policy\" content=\"[^\"<>]*\">")
PIECES = st.sampled_from(
    ["<", ">", "'", '"', "</", "<b>", "</b>", "&lt;", "&#60;script&#62;", "<!--", "url(", "{", "}", "\0", "é"]
)


@settings(max_examples=300)
@given(st.data())
def test_mutated_page_is_refused_or_holds_only_what_is_allowed(data: st.DataObject) -> None:
    source = VALID
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(source)))
        end = data.draw(st.integers(start, min(len(source), start + 8)))
        source = source[:start] + data.draw(st.one_of(PIECES, st.text(max_size=3))) + source[end:]
    _only_what_is_allowed(source)


@given(st.one_of(st.text(max_size=200), st.binary(max_size=200)))
def test_random_page_is_refused_or_holds_only_what_is_allowed(source: str | bytes) -> None:
    _only_what_is_allowed(source)


def _only_what_is_allowed(source: str | bytes) -> None:
    try:
        clean = clean_html(source, width=56, height=56).source
    except HostileInput:
        return
    rest, position = HEAD.sub("", clean, count=1), 0
    while position < len(rest):
        found = ALLOWED_OUTPUT.match(rest, position)
        assert found is not None, rest[position : position + 80]
        position = found.end()
    assert "<script" not in rest and "url(" not in "".join(re.findall(r"<style>.*?</style>", rest))


ONLY_CHILDREN = {"ul": ["li"], "ol": ["li"], "tr": ["td", "th"], "table": ["tr", "thead"], "thead": ["tr"]}
ANYWHERE = ["div", "p", "h1", "h2", "span", "b", "i", "button", "label", "section", "ul", "ol", "table", "br", "hr"]


def random_markup(dice: random.Random, depth: int, parent: str) -> str:
    """Elements in each other as the tables of the standard allow, and often as they do not."""
    if not depth:
        return "x"
    written = ""
    for _ in range(dice.randint(1, 3)):
        tag = dice.choice(ONLY_CHILDREN.get(parent, ANYWHERE))
        written += f"<{tag}>" if tag in ("br", "hr") else f"<{tag}>{random_markup(dice, depth - 1, tag)}</{tag}>"
    return written if parent in ONLY_CHILDREN else written + dice.choice(["", "y"])


@pytest.mark.needs_tool("chromium")
def test_a_browser_reads_a_clean_page_just_as_it_is_written() -> None:
    from playwright.sync_api import sync_playwright

    dice, compared = random.Random(0), 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page()
        for _ in range(400):
            try:
                clean = clean_html(random_markup(dice, dice.randint(1, 4), "div"), width=9, height=9).source
            except HostileInput:
                continue
            compared += 1
            read = page.evaluate("text => new DOMParser().parseFromString(text, 'text/html').body.outerHTML", clean)
            # Rows that stand in a table directly get a body, always the same.
            assert re.sub("</?tbody>", "", read) == clean.partition("</head>")[2].removesuffix("</html>")
        browser.close()
    assert compared > 50


def test_missing_chromium_is_one_clear_error(tmp_path: Path) -> None:
    with RenderWorker(program=HTML_PROGRAM, arguments=("10",), environment={"PATH": str(tmp_path)}) as worker:
        with pytest.raises(RendererMissing, match="needs"):
            worker.render({"html": "", "width": 9, "height": 9})


@pytest.mark.needs_tool("chromium")
def test_page_is_drawn_in_the_size_of_the_task() -> None:
    pixels = draw_html(
        '<div style="position:absolute;left:0;top:0;width:20px;height:10px;background:red"></div>', 60, 40
    )
    assert pixels.shape == (40, 60, 3)
    expected = np.full((40, 60, 3), 255, dtype=np.uint8)
    expected[:10, :20] = (255, 0, 0)
    assert np.array_equal(pixels, expected)


# Borders of a million dots each, which the browser lays one by one: about 20 s.
SLOW_PAGE = (
    "<style>div{position:absolute;left:-4000px;border:1px dotted red;outline:1px dotted blue;border-radius:37%;"
    "width:4096%;height:4096%;padding:4096%}</style>" + "<div></div>" * 990
)
GREEN_PAGE = '<div style="position:absolute;left:0;top:0;width:60px;height:40px;background:green"></div>'


@pytest.mark.needs_tool("chromium")
def test_slow_page_is_refused_and_the_next_is_drawn_right_by_another_browser() -> None:
    green = draw_html(GREEN_PAGE, 60, 40)
    assert (green == (0, 128, 0)).all()
    starts = html_worker().num_starts
    with pytest.raises(RenderFailed, match="more than 1 s to draw"):
        draw_html(SLOW_PAGE, 112, 112)
    assert np.array_equal(draw_html(GREEN_PAGE, 60, 40), green)
    assert html_worker().num_starts == starts + 1


@pytest.mark.needs_tool("chromium")
def test_page_that_takes_more_memory_than_it_may_is_refused() -> None:
    clean = clean_html(SLOW_PAGE, width=112, height=112).source
    environment = {"PATH": os.environ["PATH"]}
    with RenderWorker(
        program=HTML_PROGRAM,
        memory_bytes=1,
        render_seconds=30,
        arguments=("60",),
        environment=environment,
        wall_seconds=60,
        own_folder=True,
    ) as worker:
        with pytest.raises(RenderFailed, match="more than 1 bytes"):
            worker.render({"html": clean, "width": 112, "height": 112})


@pytest.mark.needs_tool("chromium")
def test_browser_leaves_no_files_behind() -> None:
    environment = {"PATH": os.environ["PATH"]}
    with RenderWorker(program=HTML_PROGRAM, arguments=("10",), environment=environment, own_folder=True) as worker:
        worker.render({"html": GREEN_PAGE, "width": 60, "height": 40})
        folder = Path(worker.folder or "")
        assert any(folder.iterdir())
    assert not folder.exists()


@pytest.mark.needs_tool("chromium")
def test_browser_loads_and_runs_nothing_even_if_the_guard_were_open(tmp_path: Path) -> None:
    picture = tmp_path / "red.png"
    picture.write_bytes(encode_png(np.full((20, 20, 3), (255, 0, 0), dtype=np.uint8)))
    asked: list[str] = []

    class Listener(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)

        def log_message(self, *_: object) -> None:
            return

    with http.server.HTTPServer(("127.0.0.1", 0), Listener) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        page = (
            f"<html><head><link rel=stylesheet href='{address}/css'></head>"
            f"<body style='background-image:url({address}/css)'>"
            f"<img src='file://{picture}' width=20 height=20><img src='{address}/image' alt=''>"
            f"<iframe src='{address}/frame' style='display:none'></iframe>"
            "<script>document.body.style.backgroundColor='red'</script></body></html>"
        )
        pixels = decode_png(html_worker().render({"html": page, "width": 60, "height": 40}))
        server.shutdown()
    assert asked == []
    assert not (pixels == (255, 0, 0)).all(-1).any()
