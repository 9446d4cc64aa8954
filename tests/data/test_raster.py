"""SVG to pixels: exact sizes, exact colours, white where nothing is drawn, and no reading of files or fonts."""

import numpy as np
import pytest

from perilune.data.raster import RasterError, decode_png, encode_png, png_size, rasterize, rasterize_png

RED_HALF = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}">'
    '<rect x="0" y="0" width="{half}" height="{h}" fill="#ff0000"/></svg>'
)


@pytest.mark.parametrize("width,height", [(112, 112), (56, 28), (1, 1), (30, 200)])
def test_pixels_have_the_asked_size_and_colours(width: int, height: int) -> None:
    pixels = rasterize(RED_HALF.format(w=2 * width, h=2 * height, half=2 * width), width, height)
    assert pixels.shape == (height, width, 3) and pixels.dtype == np.uint8
    assert (pixels == (255, 0, 0)).all()


def test_canvas_is_white_where_nothing_is_drawn() -> None:
    pixels = rasterize(RED_HALF.format(w=40, h=20, half=10), 40, 20)
    assert (pixels[:, :10] == (255, 0, 0)).all()
    assert (pixels[:, 10:] == 255).all()


def test_rendering_is_a_pure_function_of_the_source() -> None:
    source = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 64 64"><circle cx="30" cy="31" r="17.5"/></svg>'
    assert rasterize_png(source, 64, 64) == rasterize_png(source, 64, 64)


@pytest.mark.parametrize("source", ["", "<svg", "no markup", "<svg xmlns='http://www.w3.org/2000/svg'><rect></svg>"])
def test_a_source_that_is_no_svg_is_refused(source: str) -> None:
    with pytest.raises(RasterError, match="resvg"):
        rasterize(source, 10, 10)


def test_other_proportions_are_refused_instead_of_stretched() -> None:
    with pytest.raises(RasterError, match="20 x 10 pixels where 20 x 20"):
        rasterize(RED_HALF.format(w=40, h=20, half=10), 20, 20)


@pytest.mark.parametrize("width,height", [(0, 10), (10, -1), (10_000_000, 1)])
def test_impossible_sizes_are_refused(width: int, height: int) -> None:
    with pytest.raises(RasterError, match="outside"):
        rasterize(RED_HALF.format(w=1, h=1, half=1), width, height)


def test_text_draws_nothing_because_no_fonts_are_loaded() -> None:
    source = (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 64 64"><text x="5" y="40" font-size="30">Hi</text></svg>'
    )
    assert (rasterize(source, 64, 64) == 255).all()


def test_png_round_trip() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (13, 17, 3), dtype=np.uint8)
    png = encode_png(pixels)
    assert png_size(png) == (17, 13)
    assert np.array_equal(decode_png(png), pixels)


@pytest.mark.parametrize("data", [b"", b"GIF89a", b"\x89PNG\r\n\x1a\n" + b"\0" * 40])
def test_bytes_that_are_no_png_are_refused(data: bytes) -> None:
    with pytest.raises(RasterError, match="PNG"):
        decode_png(data)


@pytest.mark.parametrize("pixels", [np.zeros((4, 4, 3)), np.zeros((4, 4), dtype=np.uint8)])
def test_pixels_of_another_kind_are_not_encoded(pixels: np.ndarray) -> None:
    with pytest.raises(RasterError, match="uint8"):
        encode_png(pixels)
