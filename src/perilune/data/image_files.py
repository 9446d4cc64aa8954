"""Picture files into pixels: PNG, JPEG, WebP and GIF, from a path or from bytes, as uint8 [height, width, 3].

A file passes three gates, each before the next costs anything: its length (before it is read), its header
(`image_headers`: format, size, frames; everything but the picture is thrown away) and the decoder, which is told the
one format it may use. Whatever goes wrong is one ImageError with the file, the number and the limit.

How colours become red, green and blue: transparency is laid over white; 16 bits become the upper 8; CMYK, grey and
palettes are converted; colour profiles are ignored, as the published processor ignores them; EXIF's orientation is
applied. Of an animation `load_image` takes the first frame (`perilune.data.video` reads them all).

In a verb a bad file is an error. In training the dialogue that names it is left out and counted by the error's reason
(`perilune.data.chat_rows`). Damage that the format cannot show (a flipped bit inside the data of a JPEG or GIF) gives
wrong pixels and no error.
"""

import io
import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from perilune.data.image_headers import ImageHeader, read_header
from perilune.data.image_limits import ImageError, ImageLimits

PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif")
DEFAULT_LIMITS = ImageLimits()
Source = str | os.PathLike[str] | bytes

_UPRIGHT: dict[int, Image.Transpose] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def load_image(source: Source, limits: ImageLimits = DEFAULT_LIMITS, *, name: str | None = None) -> np.ndarray:
    """The picture of a file or of its bytes, uint8 [height, width, 3]. `name` is what errors call bytes."""
    name, content = read_source(source, limits, name=name)
    header = read_header(content, name, limits)
    return next(iter(decode_frames(header, name)))


def read_source(source: Source, limits: ImageLimits, *, name: str | None = None) -> tuple[str, bytes]:
    """(name, content) of a file that is not longer than the limits allow; bytes pass through."""
    if isinstance(source, bytes):
        return name or "picture", source
    path = os.fspath(source)
    name = name or path
    try:
        # A pipe must not make the program wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if stat.S_ISDIR(status.st_mode):
                raise IsADirectoryError
            if not stat.S_ISREG(status.st_mode):
                raise ImageError(f"{name!r} is a device, a pipe or a socket, not a file", reason="not a picture")
            if status.st_size > limits.max_bytes:
                raise ImageError(
                    f"{name!r} has {status.st_size:,} bytes; the limit is max_bytes={limits.max_bytes:,}",
                    reason="too many bytes",
                )
            return name, file.read(limits.max_bytes + 1)  # one more shows `read_header` a file that grew
    except FileNotFoundError:
        raise ImageError(f"there is no file {name!r}; check the path", reason="missing") from None
    except IsADirectoryError:
        raise ImageError(
            f"{name!r} is a folder; give a picture, or use a folder of frames as a video", reason="not a picture"
        ) from None
    except (OSError, ValueError) as error:
        if isinstance(error, ImageError):
            raise
        raise ImageError(
            f"cannot read {name!r}: {getattr(error, 'strerror', None) or error}", reason="unreadable"
        ) from error


def decode_frames(header: ImageHeader, name: str) -> Iterator[np.ndarray]:
    """The frames of a file whose header was judged, one after another."""
    try:
        with Image.open(io.BytesIO(header.content), formats=(header.format,)) as image:
            if image.size != (header.width, header.height):
                raise ValueError(f"its decoder sees {image.size} pixels, its header {(header.width, header.height)}")
            for index in range(header.num_frames):
                if index:
                    image.seek(index)
                image.load()
                upright = _UPRIGHT.get(header.orientation)
                yield _rgb(image if upright is None else image.transpose(upright))
    except MemoryError:
        raise
    except Exception as error:  # decoders raise OSError, SyntaxError, EOFError, struct.error, zlib.error and more
        what = str(error) or type(error).__name__
        raise ImageError(f"{name!r} cannot be decoded as {header.format}: {what}", reason="corrupt") from error


def _rgb(image: Image.Image) -> np.ndarray:
    if image.mode.startswith("I"):  # 16-bit grey; Pillow would clip instead of scaling
        grey = np.asarray(image).astype(np.int32)
        upper = (grey >> 8).astype(np.uint8)
        if (hidden := image.info.get("transparency")) is not None:
            upper[grey == hidden] = 255
        return np.repeat(upper[:, :, None], 3, axis=2)
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        layer = image.convert("RGBA")
        white = Image.new("RGB", image.size, (255, 255, 255))
        white.paste(layer, mask=layer)
        return np.array(white)
    return np.array(image.convert("RGB"))


# --- folders ----------------------------------------------------------------------------------------------------------


def list_pictures(folder: str | os.PathLike[str], *, suffixes: Sequence[str] = PICTURE_SUFFIXES) -> list[Path]:
    """The picture files directly in a folder, in natural order: frame2.png comes before frame10.png."""
    try:
        entries = [path for path in Path(folder).iterdir() if path.suffix.lower() in suffixes and path.is_file()]
    except OSError as error:
        raise ImageError(
            f"cannot read the folder {os.fspath(folder)!r}: {error.strerror or error}", reason="missing"
        ) from error
    return sorted((path for path in entries if not path.name.startswith(".")), key=lambda path: natural_key(path.name))


def natural_key(text: str) -> tuple[list[tuple[int, int, str]], str]:
    """Sort key that compares runs of digits as numbers; the text itself settles what is then equal."""
    parts = re.findall(r"[0-9]+|[^0-9]+", text)
    return [(0, int(part), "") if part[0] in "0123456789" else (1, 0, part.casefold()) for part in parts], text
