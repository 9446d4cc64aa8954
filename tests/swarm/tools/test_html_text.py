"""Readable text from pages, also from pages made to hurt their reader."""

import pytest

from perilune.swarm.tools.html_text import page_text

PAGE = """<!doctype html><html><head><title>Tea &amp; cake</title><style>p{}</style></head><body>
<nav><a href="/home">Home</a></nav><h1>Menu</h1><p>Some <b>good</b>   <a href="tea?kind=green tea">tea</a>.</p>
<ul><li>one<li>two</ul><table><tr><th>a<th>b</tr><tr><td>1<td>2</tr></table><pre>x = 1
    y = 2</pre><img src=x alt="a cup"><script>document.write("<p>evil</p>")</script><!-- remark -->
<a href="javascript:alert(1)">press</a></body></html>"""


def test_headings_lists_tables_code_and_links_stay() -> None:
    page = page_text(PAGE, base="https://cafe.example.com/menu/")
    assert page.title == "Tea & cake"
    for kept in (
        "# Menu",
        "Some good [tea](https://cafe.example.com/menu/tea?kind=green%20tea).",
        "[Home](https://cafe.example.com/home)",
        "- one\n- two",
        "| a | b",
        "| 1 | 2",
        "x = 1\n    y = 2",
        "[image: a cup]",
    ):
        assert kept in page.text


def test_scripts_styles_comments_and_script_links_go() -> None:
    text = page_text(PAGE).text
    for gone in ("evil", "document.write", "p{}", "remark", "javascript:"):
        assert gone not in text
    assert "press" in text


@pytest.mark.parametrize(
    "hiding",
    [
        "<div hidden>SECRET</div>",
        "<div style='display:none'>SECRET</div>",
        '<div style="color:red; visibility : hidden">SECRET</div>',
        "<span style='opacity:0'>SECRET</span>",
        "<span style='font-size:0'>SECRET</span>",
        "<div aria-hidden='true'><p>SECRET</p></div>",
        "<template>SECRET</template>",
        "<noscript>SECRET</noscript>",
        "<svg><text>SECRET</text></svg>",
        "<DIV STYLE='DISPLAY:NONE'><div>x</div>SECRET</DIV>",
        "<img alt='SECRET' hidden>",
    ],
)
def test_what_a_person_would_not_see_is_not_text(hiding: str) -> None:
    text = page_text(f"<p>before</p>{hiding}<p>after</p>").text
    assert "SECRET" not in text
    assert "before" in text and "after" in text


def test_an_unclosed_head_does_not_hide_the_page() -> None:
    assert page_text("<head><meta charset=utf-8><body><p>here").text == "here"


def test_references_become_characters_and_absurd_ones_a_mark() -> None:
    assert page_text("&lt;b&gt; &eacute; &#x41; &#65;").text == "<b> é A A"
    assert page_text("a &#" + "9" * 10_000 + "; b").text == "a \ufffd b"


HOSTILE = {
    "comments": "<!--",
    "attributes": '<a b="',
    "quotes": "<a '\">",
    "brackets": "<",
    "tags": "<a",
    "links": '<a href="http://a.example.com/">t',
    "depth": "<div>",
    "ends": "</div>",
    "declarations": "<![CDATA[",
    "scripts": "<script>",
    "titles": "<title></titl",
    "references": "&#9999999",
    "ampersands": "&",
    "styles": "<p style='display display'>",
}


# A reader that looks at the rest of the page for every tag needs hours for this; the limit is far from both.
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_page_made_to_hurt_its_reader_is_read_in_linear_time(name: str) -> None:
    source = HOSTILE[name] * (250_000 // len(HOSTILE[name])) + "<p>the end"
    page = page_text(source)
    assert len(page.text) <= 2 * len(source)


def test_links_do_not_nest() -> None:
    source = '<a href="http://a.example.com/1">one<a href="http://a.example.com/2">two</a></a>'
    assert page_text(source).text == "[one](http://a.example.com/1)[two](http://a.example.com/2)"
