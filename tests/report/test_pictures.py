"""Pages of pictures: PNG files and escaped text, whatever a model wrote."""

import re
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.data.raster import encode_png
from perilune.report.page import png_uri, render_page
from perilune.report.pictures import MAX_ROWS, MAX_SOURCE, picture_row, pictures_page, pictures_section

PNG = encode_png(np.zeros((4, 4, 3), dtype=np.uint8))


class Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.sources: list[str] = []
        self._inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "pre":
            self._inside = True
            self.sources.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = self._inside and tag != "pre"

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.sources[-1] += data


def read(*rows: object) -> Reader:
    reader = Reader()
    reader.feed(render_page(pictures_page("nano", rows)))  # type: ignore[arg-type]
    return reader


@given(st.text(alphabet=st.characters(exclude_categories=("Cs", "Cc")), max_size=60))
def test_source_is_text_and_every_address_is_a_png(words: str) -> None:
    source = f"<svg onload='x'><script>alert(1)</script>{words}"
    page = read(picture_row(words, shown=PNG, source=source, problem=words))
    assert page.sources == [source]
    assert "script" not in {tag for tag, _ in page.tags} and "svg" not in {tag for tag, _ in page.tags}
    addresses = [value for _, attributes in page.tags for name, value in attributes.items() if name in ("src", "href")]
    assert addresses == [png_uri(PNG)]
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)


def test_row_shows_image_source_and_drawing_in_this_order() -> None:
    row = picture_row("one", shown=[PNG, PNG], source="<svg/>", drawn=PNG, score={"pixel": 0.5})
    page = read(row)
    assert [tag for tag, _ in page.tags if tag in ("img", "pre")] == ["img", "img", "pre", "img"]
    assert "pixel 0.50" in render_page(pictures_page("nano", [row]))


def test_refused_source_is_shown_with_its_reason() -> None:
    html = render_page(pictures_page("nano", [picture_row("x", shown=PNG, source="<a>", problem="element: <a>")]))
    assert '<p class="problem">element: &lt;a&gt;</p>' in html


@pytest.mark.parametrize("data", [b"", b"<svg/>", b"GIF89a", b"\x89PNG"])
def test_anything_but_a_png_file_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="PNG"):
        read(picture_row("x", shown=data, source=""))


def test_long_sources_and_long_lists_are_cut_and_say_so() -> None:
    row = picture_row("x", shown=PNG, source="a" * (MAX_SOURCE + 1234))
    assert row.source.endswith("... 1,234 more") and len(row.source) < MAX_SOURCE + 40
    section = pictures_section("Samples", [row] * (MAX_ROWS + 1))
    assert len(section.rows) == MAX_ROWS and f"{MAX_ROWS} of {MAX_ROWS + 1}" in section.text


def test_page_needs_nothing_from_outside() -> None:
    html = render_page(pictures_page("nano", [picture_row("x", shown=PNG, source="")], scores={"parses": "97%"}))
    assert "97%" in html
    assert not re.search(r"https?://", html)
