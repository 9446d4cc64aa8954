"""Self-contained HTML pages for everything that reports: no script, no network, readable on paper, in light and dark.

A page is a title, a line of headline numbers, a table of facts and sections; each section is one of the dataclasses
below. All text is escaped by the template: a sample that spells markup is shown, never executed, and the page's
Content-Security-Policy forbids scripts and requests on top of that.
"""

import base64
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import ClassVar

import jinja2
from markupsafe import Markup

from perilune.report.plots import DARK, LIGHT, Plot, Theme, render_svg


@dataclass(frozen=True, kw_only=True)
class Headline:
    """One number that matters, with its unit or meaning."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Plots:
    kind: ClassVar[str] = "plots"
    title: str
    plots: Sequence[Plot]
    text: str = ""

    def figures(self) -> list[tuple[Plot, Markup]]:
        return [(plot, Markup(render_svg(plot))) for plot in self.plots if not plot.is_empty]


LONGEST_WORD = 28
"""Characters of a word in a table that is never broken; a path or a checksum may have more."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of cells. A column whose cells are all numbers is set flush right. `folded` hides it behind its title."""

    kind: ClassVar[str] = "table"
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    text: str = ""
    folded: bool = False

    def is_numeric(self, column: int) -> bool:
        cells = [row[column] for row in self.rows if row[column] not in ("", None, "-")]
        return bool(cells) and all(_is_number(cell) for cell in cells)

    def style(self, column: int, cell: object) -> str:
        """The class of a cell: numbers stay on one line; only a word too long for a column is broken within."""
        if self.is_numeric(column):
            return "number"
        return "long" if max(map(len, str(cell).split()), default=0) > LONGEST_WORD else ""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A generated text; `prompt` is set apart from what the model added."""

    heading: str
    prompt: str = ""
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Samples:
    kind: ClassVar[str] = "samples"
    title: str
    samples: Sequence[Sample]
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Notes:
    """Sentences that need attention, such as warnings."""

    kind: ClassVar[str] = "notes"
    title: str
    notes: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class PictureRow:
    """What a model was shown, the source it wrote, and what that source draws. Pictures are PNG files; several are
    the frames of a video."""

    heading: str
    shown: Sequence[bytes]
    source: str
    drawn: Sequence[bytes] = ()
    score: str = ""
    problem: str = ""
    """Why nothing is drawn."""

    def shown_uris(self) -> list[str]:
        return [png_uri(png) for png in self.shown]

    def drawn_uris(self) -> list[str]:
        return [png_uri(png) for png in self.drawn]


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """Image, predicted source and its drawing side by side. The source is text on the page, never markup."""

    kind: ClassVar[str] = "pictures"
    title: str
    rows: Sequence[PictureRow]
    text: str = ""


Section = Plots | Table | Samples | Notes | Pictures


@dataclass(frozen=True, kw_only=True)
class Page:
    title: str
    subtitle: str = ""
    headlines: Sequence[Headline] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    sections: Sequence[Section] = ()


def render_page(page: Page) -> str:
    """The page as one HTML document."""
    style = _asset("page.css").replace("/* colours */", _colours())
    return _template().render(page=page, style=Markup(style))


def write_page(page: Page, path: str | Path) -> Path:
    """Write the page; the file appears complete or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        # Text may hold half of a surrogate pair (a sample cut inside an emoji): shown as a replacement mark
        temporary.write_bytes(render_page(page).encode("utf-8", "replace"))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def png_uri(png: bytes) -> str:
    """A PNG file as the address of an <img>; anything else is refused, for a browser would run what is in an SVG."""
    if not png.startswith(b"\x89PNG\r\n\x1a\n"):
        raise ValueError(f"a picture of a page is a PNG file, not {png[:8]!r}")
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def _colours() -> str:
    def block(theme: Theme) -> str:
        return " ".join(f"--{name}: {colour};" for name, colour in theme.variables().items())

    return f":root {{ {block(LIGHT)} }}\n@media screen and (prefers-color-scheme: dark) {{ :root {{ {block(DARK)} }} }}"


@cache
def _asset(name: str) -> str:
    return (resources.files("perilune.report") / name).read_text(encoding="utf-8")


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.from_string(_asset("page.html.jinja"))


def _is_number(cell: object) -> bool:
    if isinstance(cell, int | float):
        return True
    try:
        float(str(cell).replace(",", "").removesuffix("%"))
    except ValueError:
        return False
    return True
