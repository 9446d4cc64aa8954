"""The stroke font: complete, unambiguous, inside its box."""

import string

import numpy as np
import pytest

from perilune.data.raster import rasterize
from perilune.data.scenes import Picture, write_svg
from perilune.data.scenes.stroke_font import CHARACTERS, text_box, text_shape, text_width


def _pixels(text: str, size: int, width: int) -> np.ndarray:
    picture = Picture(width=224, height=56, shapes=(text_shape(text, 10, 10, "black", size, width),))
    return 255 - rasterize(write_svg(picture), 224, 56)[..., 0].astype(int)


def test_letters_digits_and_punctuation_can_be_written() -> None:
    assert set(string.ascii_letters + string.digits + ".,:;!?-+=/%()'\"#$&*<>_[]@") <= set(CHARACTERS)


@pytest.mark.parametrize("size, width", [(10, 2), (7, 1), (14, 2)])
def test_no_two_characters_look_the_same(size: int, width: int) -> None:
    """Two glyphs differ by a black dot of the pen at least, as a colon and a full stop do."""
    different = 255 * width**2
    drawn = np.stack([_pixels(character, size, width)[:40, :40].ravel() for character in CHARACTERS])
    for index, glyph in enumerate(drawn):
        distance = np.abs(drawn - glyph).sum(axis=1)
        distance[index] = 10**9
        assert distance.min() >= different, (CHARACTERS[index], CHARACTERS[int(distance.argmin())], distance.min())


@pytest.mark.parametrize("size, width", [(7, 1), (10, 2), (14, 2), (20, 2)])
def test_the_box_of_a_text_is_that_of_its_pixels(size: int, width: int) -> None:
    for text in (*CHARACTERS, "Moon 42%", "gjpqy", "WAVE"):
        dark = _pixels(text, size, width) > 100
        rows, columns = np.flatnonzero(dark.any(axis=1)), np.flatnonzero(dark.any(axis=0))
        drawn = np.array([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1])
        assert np.abs(drawn - np.array(text_box(text, 10, 10, size, width))).max() <= 1, (text, drawn)


def test_width_grows_with_every_character() -> None:
    widths = [text_width("Perilune"[:n]) for n in range(1, 9)]
    assert widths == sorted(set(widths))
