"""Files made to harm: each is one ImageError with its name, and none costs memory for the pixels that it claims."""

import io
import struct
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from perilune.data import image_headers
from perilune.data.image_files import load_image
from perilune.data.image_limits import ImageError, ImageLimits
from perilune.data.video import load_frames

SIGNATURE = b"\x89PNG\r\n\x1a\n"


def encoded(kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8))
    picture.save(buffer, format=kind, **options)
    return buffer.getvalue()


PNG, JPEG, WEBP, GIF = encoded("PNG"), encoded("JPEG"), encoded("WEBP", lossless=True), encoded("GIF")
LOSSY = encoded("WEBP")
MOVING = encoded("WEBP", save_all=True, append_images=[Image.new("RGB", (32, 24))], duration=100)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *chunks: bytes, depth: int = 8, colour: int = 2) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return SIGNATURE + header + b"".join(chunks) + chunk(b"IEND", b"")


def pixels(data: bytes = b"\0" * 4) -> bytes:
    return chunk(b"IDAT", zlib.compress(data))


def riff(*chunks: tuple[bytes, bytes]) -> bytes:
    body = b"WEBP" + b"".join(
        kind + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2) for kind, data in chunks
    )
    return b"RIFF" + struct.pack("<I", len(body)) + body


def canvas(width: int, height: int, flags: int = 0) -> tuple[bytes, bytes]:
    sides = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return b"VP8X", bytes([flags, 0, 0, 0]) + sides


def vp8l(width: int, height: int) -> tuple[bytes, bytes]:
    return b"VP8L", b"\x2f" + struct.pack("<I", (width - 1) | (height - 1) << 14) + b"\0" * 20


def gif(width: int, height: int, *frames: tuple[int, int, int, int], data: bytes = b"\x02\x02\x44\x01\x00") -> bytes:
    body = b"".join(b"," + struct.pack("<HHHHB", *frame, 0) + data for frame in frames)
    return b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + b"\0\0\0\xff\xff\xff" + body + b";"


def jpeg_of_size(width: int, height: int) -> bytes:
    start = JPEG.index(b"\xff\xc0") + 5
    return JPEG[:start] + struct.pack(">HH", height, width) + JPEG[start + 4 :]


def many_scans() -> bytes:
    start = JPEG.index(b"\xff\xda")
    return JPEG[:start] + JPEG[start:-2] * 101 + b"\xff\xd9"


def flipped(content: bytes, position: int) -> bytes:
    return content[:position] + bytes([content[position] ^ 0xFF]) + content[position + 1 :]


def saved(kind: str) -> bytes:
    return encoded(kind)


# name: (content, the reason that is counted)
HOSTILE: dict[str, tuple[bytes, str]] = {
    "png-bomb": (png(60_000, 60_000, pixels()), "too many pixels"),
    "png-longest-side": (png(2**31 - 1, 1, pixels()), "too many pixels"),
    "png-largest-number": (png(2**32 - 1, 2**32 - 1, pixels()), "too many pixels"),
    "png-no-width": (png(0, 5, pixels()), "corrupt"),
    "png-just-over": (png(8193, 8192, pixels()), "too many pixels"),
    "png-few-pixels": (png(4000, 4000, pixels()), "corrupt"),
    "png-cut-in-signature": (PNG[:6], "not a picture"),
    "png-cut-in-header": (PNG[:20], "corrupt"),
    "png-cut-in-pixels": (PNG[: len(PNG) // 2], "corrupt"),
    "png-without-end": (PNG[:-12], "corrupt"),
    "png-header-flipped": (flipped(PNG, 17), "too many pixels"),
    "png-pixel-flipped": (flipped(PNG, len(PNG) // 2), "corrupt"),
    "png-pixels-not-deflated": (png(4, 4, chunk(b"IDAT", b"not zlib")), "corrupt"),
    "png-no-pixels": (png(4, 4), "corrupt"),
    "png-no-palette": (png(4, 4, pixels(b"\0" * 20), colour=3), "corrupt"),
    "png-unknown-colour": (png(4, 4, pixels(b"\0" * 80), colour=5), "corrupt"),
    "png-unknown-depth": (png(4, 4, pixels(b"\0" * 80), depth=77), "corrupt"),
    "png-two-headers": (png(4, 4, chunk(b"IHDR", b"\0" * 13), pixels(b"\0" * 80)), "corrupt"),
    "png-unknown-critical": (png(4, 4, chunk(b"EVIL", b""), pixels(b"\0" * 52)), "corrupt"),
    "png-chunk-kind-not-letters": (png(4, 4, chunk(b"a\0\0b", b""), pixels(b"\0" * 52)), "corrupt"),
    "png-chunk-too-long": (SIGNATURE + b"\xff\xff\xff\xffIHDR" + b"\0" * 40, "corrupt"),
    "jpeg-bomb": (jpeg_of_size(65_500, 65_500), "too many pixels"),
    "jpeg-no-height": (jpeg_of_size(32, 0), "corrupt"),
    "jpeg-cut": (JPEG[: len(JPEG) // 2], "corrupt"),
    "jpeg-without-end": (JPEG[:-30], "corrupt"),
    "jpeg-only-start": (b"\xff\xd8\xff", "corrupt"),
    "jpeg-no-scan": (JPEG[: JPEG.index(b"\xff\xda")] + b"\xff\xd9", "corrupt"),
    "jpeg-many-scans": (many_scans(), "corrupt"),
    "jpeg-short-segment": (b"\xff\xd8\xff\xe0\x00\x01" + JPEG[2:], "corrupt"),
    "jpeg-garbage-marker": (b"\xff\xd8\xff\xe0\x00\x02garbage", "corrupt"),
    "jpeg-two-frames": (JPEG[: (at := JPEG.index(b"\xff\xc0"))] + JPEG[at : at + 19] + JPEG[at:], "corrupt"),
    "jpeg-arithmetic-and-empty": (b"\xff\xd8" + b"\xff" * 5000 + b"\xd9", "corrupt"),
    "webp-bomb": (riff(canvas(1 << 24, 1 << 24, 0x02)), "too many pixels"),
    "webp-lossless-bomb": (riff(vp8l(16_383, 16_383)), "too many pixels"),
    "webp-cut": (WEBP[:-40], "corrupt"),
    "webp-lossy-cut": (riff((b"VP8 ", LOSSY[20:80])), "corrupt"),
    "webp-empty": (riff(), "corrupt"),
    "webp-bad-start": (riff((b"VP8L", b"\0" * 20)), "corrupt"),
    "webp-canvas-lies": (riff(canvas(9, 9), (b"VP8L", WEBP[20:])), "corrupt"),
    "webp-frame-outside": (riff(canvas(8, 8, 0x02), (b"ANMF", b"\xff" * 40)), "corrupt"),
    "webp-frame-short": (riff(canvas(8, 8, 0x02), (b"ANMF", b"\0" * 8)), "corrupt"),
    "webp-frame-of-noise": (riff(canvas(8, 8, 0x02), (b"ANIM", b"\0" * 6), (b"ANMF", b"\0" * 60)), "corrupt"),
    "webp-thousand-frames": (riff(canvas(8, 8, 0x02), *[(b"ANMF", b"\0" * 40)] * 1025), "too many frames"),
    "webp-still-with-frames": (riff(canvas(8, 8), (b"ANMF", b"\0" * 40)), "corrupt"),
    "gif-bomb": (gif(65_535, 65_535, (0, 0, 1, 1)), "too many pixels"),
    "gif-frame-grows-canvas": (gif(1, 1, (65_000, 65_000, 500, 500)), "too many pixels"),
    "gif-second-frame-grows-canvas": (gif(1, 1, (0, 0, 1, 1), (60_000, 60_000, 1, 1)), "too many pixels"),
    "gif-thousand-frames": (gif(1, 1, *[(0, 0, 1, 1)] * 1025), "too many frames"),
    "gif-no-frame": (gif(4, 4), "corrupt"),
    "gif-empty-frame": (gif(4, 4, (0, 0, 0, 4)), "corrupt"),
    "gif-cut": (GIF[: len(GIF) // 2], "corrupt"),
    "gif-no-data": (gif(400, 400, (0, 0, 400, 400), data=b"\x02\x00"), "corrupt"),
    "gif-wrong-block": (gif(4, 4)[:-1] + b"\x99", "corrupt"),
    "gif-bad-control": (gif(4, 4)[:-1] + b"\x21\xf9\x01\x00\x00" + gif(4, 4, (0, 0, 1, 1))[19:], "corrupt"),
    "tiff": (saved("TIFF"), "not a picture"),
    "bmp": (saved("BMP"), "not a picture"),
    "icon": (saved("ICO"), "not a picture"),
    "eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a picture"),
    "psd": (b"8BPS\0\1" + b"\0" * 60, "not a picture"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not a picture"),
    "avif": (b"\0\0\0\x20ftypavif" + b"\0" * 40, "not a picture"),
    "ppm": (b"P6 60000 60000 255\n", "not a picture"),
    "text": (b"hello", "not a picture"),
    "empty": (b"", "not a picture"),
    "zeros": (b"\0" * 1000, "not a picture"),
}


@pytest.mark.parametrize("loader", [load_image, load_frames])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_one_clear_sentence(name: str, loader: Callable) -> None:
    content, reason = HOSTILE[name]
    with pytest.raises(ImageError) as caught:
        loader(content, name=name)
    message = str(caught.value)
    assert caught.value.reason == reason and message.startswith(f"'{name}'")
    assert "\n" not in message and len(message) < 250


@pytest.mark.parametrize(
    "name, words",
    [
        ("png-pixel-flipped", "b'IDAT' at byte .* has a wrong checksum"),
        ("jpeg-many-scans", "over 100 scans"),
        ("jpeg-without-end", "cut off: it has no end marker"),
        ("png-cut-in-pixels", "cut off: chunk b'IDAT' at byte .* needs .* are left"),
        ("gif-bomb", "65,535 x 65,535 = 4,294,836,225 pixels; the limit is max_pixels=67,108,864"),
        ("gif-thousand-frames", "1,025 frames or more; the limit is max_frames=1,024"),
        ("tiff", "is TIFF; give PNG, JPEG, WebP or GIF"),
    ],
)
def test_the_header_is_what_refuses_and_says_why(name: str, words: str) -> None:
    with pytest.raises(ImageError, match=words):
        load_image(HOSTILE[name][0], name=name)


@pytest.mark.parametrize(
    "content",
    [
        png(4, 4, chunk(b"aaAa", b"") * 101, pixels(b"\0" * 52)),
        gif(4, 4, (0, 0, 1, 1))[:-1] + b"\0" * 101 + b";",
        b"\xff\xd8" + b"\xff\xe0\0\2" * 101 + JPEG[2:],
        b"\xff\xd8" + b"\xff" * 103 + JPEG[3:],
        riff((b"VP8L", WEBP[20:]), *[(b"junk", b"")] * 101),
    ],
)
def test_a_file_of_endless_small_blocks_is_not_walked_to_its_end(
    content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_image(content).size
    monkeypatch.setattr(image_headers, "MAX_BLOCKS", 100)
    with pytest.raises(ImageError, match="it has more than 100 blocks"):
        load_image(content)


def test_the_corpus_is_large_and_its_good_originals_load() -> None:
    assert len(HOSTILE) >= 40
    for content in (PNG, JPEG, WEBP, LOSSY, GIF, MOVING):
        assert load_image(content).shape == (24, 32, 3)
    assert load_image(gif(4, 4, (0, 0, 1, 1))).shape == (4, 4, 3)
    assert load_image(png(4, 4, pixels(b"\0" * 52))).shape == (4, 4, 3)


BOMBS = [name for name, (_, reason) in HOSTILE.items() if reason == "too many pixels"]


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_before_pixels_are_decoded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("the decoder was asked"))
    tracemalloc.start()
    try:
        with pytest.raises(ImageError, match="the limit is max_"):
            load_image(HOSTILE[name][0])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


MEMORY_PROGRAM = """
import resource, sys
from perilune.data.image_files import load_image, ImageError
from tests.data.test_images_hostile import BOMBS, HOSTILE
ready = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for name in BOMBS:
    try:
        load_image(HOSTILE[name][0])
    except ImageError:
        continue
    sys.exit(f"{name} was loaded")
unit = 1 if sys.platform == "darwin" else 1024
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - ready) * unit)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs the resource module")
def test_bombs_do_not_raise_the_memory_of_a_process() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", MEMORY_PROGRAM], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 32 << 20  # the smallest of the bombs claims 192 MiB


@given(st.sampled_from([PNG, JPEG, WEBP, LOSSY, GIF, MOVING]), st.data())
@settings(max_examples=300)
def test_damage_gives_a_picture_within_limits_or_an_image_error(content: bytes, data: st.DataObject) -> None:
    damaged = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.just(len(damaged)), st.integers(0, len(damaged))))
    limits = ImageLimits(max_pixels=4096, max_frames=4, max_video_pixels=8192)
    for loader in (load_image, load_frames):
        try:
            loaded = loader(bytes(damaged[:cut]), limits)
        except ImageError:
            continue
        for frame in loaded[0] if isinstance(loaded, tuple) else [loaded]:
            assert frame.dtype == np.uint8 and frame.shape[2] == 3 and frame.shape[0] * frame.shape[1] <= 4096
