"""Pages of what a model drew: image | the source it wrote | what that source draws, side by side.

    page = pictures_page("nano", rows, scores={"pixel similarity": "0.81", "parses": "97%"})
    write_page(page, "samples.html")

Whoever makes the rows draws the sources through the guard (`perilune.data.pictures`); here they are only shown, as
escaped text beside PNG files. A source that was refused is shown with the reason.
"""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from perilune.report.page import Headline, Page, PictureRow, Pictures

MAX_ROWS = 200
MAX_SOURCE = 4000
"""Characters of a source that a page shows."""


def picture_row(
    heading: str,
    *,
    shown: bytes | Sequence[bytes],
    source: str,
    drawn: bytes | Sequence[bytes] | None = None,
    problem: str = "",
    score: Mapping[str, float] | None = None,
) -> PictureRow:
    """A row from PNG files (one, or one per frame) and the numbers that go into its heading."""
    cut = source if len(source) <= MAX_SOURCE else f"{source[:MAX_SOURCE]}\n... {len(source) - MAX_SOURCE:,} more"
    return PictureRow(
        heading=heading,
        shown=_several(shown),
        source=cut,
        drawn=() if drawn is None else _several(drawn),
        problem=problem,
        score=", ".join(f"{name} {value:.2f}" for name, value in (score or {}).items()),
    )


def png_of(text: Any) -> bytes | None:
    """The PNG file that a record holds as base64; None for anything else."""
    try:
        content = base64.b64decode(text, validate=True)
    except (TypeError, ValueError):
        return None
    return content if content.startswith(b"\x89PNG\r\n\x1a\n") else None


def pictures_section(title: str, rows: Sequence[PictureRow], *, text: str = "") -> Pictures:
    """A section for any page; of very many rows the first are shown, and the text says so."""
    if len(rows) > MAX_ROWS:
        text = f"{text} The first {MAX_ROWS} of {len(rows):,} are shown.".strip()
    return Pictures(title=title, rows=rows[:MAX_ROWS], text=text)


def pictures_page(
    name: str, rows: Sequence[PictureRow], *, scores: Mapping[str, str] | None = None, text: str = ""
) -> Page:
    """A page of its own, with the scores over all rows at the top."""
    return Page(
        title=f"Pictures of {name}",
        subtitle="What the model was shown, the source it wrote, and what that source draws",
        headlines=[Headline(label=label, value=value) for label, value in (scores or {}).items()],
        sections=[pictures_section("Samples", rows, text=text)],
    )


def _several(pictures: bytes | Sequence[bytes]) -> tuple[bytes, ...]:
    return (pictures,) if isinstance(pictures, bytes) else tuple(pictures)
