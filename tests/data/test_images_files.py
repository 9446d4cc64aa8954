"""Good picture files of every kind, limits, sources, and the reader that skips bad ones."""

import io
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from perilune.data.image_files import list_pictures, load_image
from perilune.data.image_limits import ImageError, ImageLimits

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


def flat(mode: str, colour: object, size: tuple[int, int] = (5, 3)) -> Image.Image:
    return Image.new(mode, size, colour)  # pyrefly: ignore


def oriented(number: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = number
    return exif


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_gives_rows_of_red_green_blue(kind: str) -> None:
    options = {"lossless": True} if kind == "WEBP" else {}
    pixels = load_image(encoded(flat("RGB", (250, 130, 20)), kind, **options))
    assert pixels.shape == (3, 5, 3) and pixels.dtype == np.uint8
    assert np.abs(pixels.astype(int) - [250, 130, 20]).max() <= (3 if kind == "JPEG" else 0)


@pytest.mark.parametrize(
    "name, content, expected",
    [
        ("black and white", encoded(flat("1", 1), "PNG"), (255, 255, 255)),
        ("grey", encoded(flat("L", 77), "PNG"), (77, 77, 77)),
        ("grey with alpha", encoded(flat("LA", (0, 51)), "PNG"), (204, 204, 204)),
        ("grey of 16 bits", encoded(flat("I;16", 0xABCD), "PNG"), (0xAB, 0xAB, 0xAB)),
        ("grey of 16 bits, hidden", encoded(flat("I;16", 0xABCD), "PNG", transparency=0xABCD), (255, 255, 255)),
        ("palette", encoded(flat("RGB", (9, 99, 199)).quantize(4), "PNG"), (9, 99, 199)),
        ("alpha", encoded(flat("RGBA", (200, 100, 0, 0)), "PNG"), (255, 255, 255)),
        ("half alpha", encoded(flat("RGBA", (0, 0, 0, 127)), "PNG"), (128, 128, 128)),
        ("hidden colour", encoded(flat("RGB", (1, 2, 3)), "PNG", transparency=(1, 2, 3)), (255, 255, 255)),
        ("alpha in WebP", encoded(flat("RGBA", (0, 0, 0, 127)), "WEBP", lossless=True), (128, 128, 128)),
        ("hidden in GIF", encoded(flat("P", 0), "GIF", transparency=0), (255, 255, 255)),
        ("grey JPEG", encoded(flat("L", 90), "JPEG"), (90, 90, 90)),
        ("CMYK JPEG", encoded(flat("CMYK", (0, 255, 255, 0)), "JPEG"), (255, 0, 0)),
    ],
)
def test_every_kind_of_colour_becomes_rgb_over_white(name: str, content: bytes, expected: tuple[int, ...]) -> None:
    assert np.abs(load_image(content).astype(int) - expected).max() <= 3 * (content[:2] == b"\xff\xd8"), name


@pytest.mark.parametrize("number", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_exif_orientation_is_applied(kind: str, number: int) -> None:
    corner = Image.new("RGB", (32, 16))
    corner.paste((255, 255, 255), (0, 0, 8, 8))
    pixels = load_image(encoded(corner, kind, exif=oriented(number)))
    places = {1: (0, 0), 2: (0, 1), 3: (1, 1), 4: (1, 0), 5: (0, 0), 6: (0, 1), 7: (1, 1), 8: (1, 0)}
    height, width, _ = pixels.shape
    assert (width, height) == ((32, 16) if number < 5 else (16, 32))
    bottom, right = places[number]
    assert pixels[-3 if bottom else 2, -3 if right else 2, 0] > 200
    assert pixels[2 if bottom else -3, 2 if right else -3, 0] < 50


def test_profiles_text_and_comments_are_not_given_to_the_decoder() -> None:
    from PIL.PngImagePlugin import PngInfo

    text = PngInfo()
    text.add_text("bomb", "0" * 60_000_000, zip=True)  # Pillow alone refuses this file
    assert load_image(encoded(flat("RGB", 7), "PNG", pnginfo=text, icc_profile=b"x" * 100_000)).shape == (3, 5, 3)
    noisy = encoded(flat("RGB", 7), "JPEG", icc_profile=b"x" * 300_000, comment=b"y" * 60_000)
    assert (load_image(noisy) == load_image(encoded(flat("RGB", 7), "JPEG"))).all()
    assert load_image(encoded(flat("RGB", 7), "WEBP", icc_profile=b"x" * 100_000)).shape == (3, 5, 3)


def test_progressive_jpeg_and_interlaced_gif_are_read() -> None:
    ramp = Image.fromarray(np.arange(64 * 64 * 3, dtype=np.uint32).astype(np.uint8).reshape(64, 64, 3))
    plain, progressive = encoded(ramp, "JPEG"), encoded(ramp, "JPEG", progressive=True)
    assert np.abs(load_image(plain).astype(int) - load_image(progressive)).max() <= 2
    gif = encoded(ramp.quantize(16), "GIF", interlace=1)
    assert (load_image(gif) == np.asarray(ramp.quantize(16).convert("RGB"))).all()


def test_the_name_of_a_file_does_not_decide_its_format(tmp_path: Path) -> None:
    path = tmp_path / "picture.gif"
    path.write_bytes(encoded(flat("RGB", (1, 2, 3)), "PNG"))
    assert load_image(path)[0, 0].tolist() == [1, 2, 3]


def test_loading_twice_gives_the_same_bytes() -> None:
    content = encoded(Image.effect_noise((50, 40), 60).convert("RGB"), "JPEG")
    assert load_image(content).tobytes() == load_image(content).tobytes()


@pytest.mark.parametrize(
    "limits, reason, words",
    [
        (ImageLimits(max_bytes=60), "too many bytes", "max_bytes=60"),
        (ImageLimits(max_pixels=14), "too many pixels", "5 x 3 = 15 pixels; the limit is max_pixels=14"),
        (ImageLimits(max_side=4), "too many pixels", "max_side=4"),
    ],
)
def test_an_error_names_the_file_the_number_and_the_limit(
    tmp_path: Path, limits: ImageLimits, reason: str, words: str
) -> None:
    path = tmp_path / "large.png"
    path.write_bytes(encoded(flat("RGB", 0), "PNG"))
    for source in (path, path.read_bytes()):
        with pytest.raises(ImageError, match=words) as caught:
            load_image(source, limits, name="large.png")
        assert "'large.png'" in str(caught.value) and caught.value.reason == reason


@pytest.mark.parametrize("field", ["max_bytes", "max_pixels", "max_side", "max_frames", "max_video_pixels"])
def test_a_limit_of_nothing_is_an_error(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field}=0"):
        ImageLimits(**{field: 0})
    assert ImageLimits(**{field: 1})


def test_a_limit_above_the_decoders_own_is_an_error() -> None:
    with pytest.raises(ValueError, match="max_pixels=100000000 must be at most"):
        ImageLimits(max_pixels=100_000_000)


def test_what_is_no_file_is_a_clear_sentence(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="is a folder"):
        load_image(tmp_path)
    with pytest.raises(ImageError, match="there is no file") as caught:
        load_image(tmp_path / "absent.png")
    assert caught.value.reason == "missing" and caught.value.__cause__ is None
    with pytest.raises(ImageError, match="cannot read"):
        load_image("nul\0byte.png")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.png")
        with pytest.raises(ImageError, match="a device, a pipe or a socket"):
            load_image(tmp_path / "pipe.png")


def picture_folder(folder: Path) -> list[Path]:
    good = encoded(flat("RGB", 5), "PNG")
    files = {
        "a10.png": good,
        "a9.png": good,
        "b.png": good[:-20],
        "c.jpg": b"hello",
        "d.png": encoded(flat("RGB", 5, (40, 40)), "PNG"),
        "e.txt": b"text",
        ".hidden.png": good,
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return list_pictures(folder)


def test_a_folder_is_listed_in_natural_order(tmp_path: Path) -> None:
    assert [path.name for path in picture_folder(tmp_path)] == ["a9.png", "a10.png", "b.png", "c.jpg", "d.png"]
