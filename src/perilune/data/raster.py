"""SVG source to pixels: resvg on a white canvas, the same bytes on every machine with the same resvg.

`rasterize` runs in this process and trusts its source: it is for pictures that this package wrote itself. Whatever a
model or a stranger wrote goes through `perilune.data.svg_guard` (which forbids what could read a file or never end) and
`perilune.data.render_worker` (a process of its own with limits of time and memory).

No fonts are loaded and no folder of resources is named, so a picture cannot depend on the machine that draws it.
"""

import io
from typing import Any

import numpy as np

MAX_SIDE = 4096
"""The largest canvas side in pixels."""


class RasterError(ValueError):
    """A source that resvg does not draw, or draws in another size than asked for."""


def rasterize(svg: str, width: int, height: int) -> np.ndarray:
    """The picture as uint8 [height, width, 3] on white; the source's own canvas must have the same proportions."""
    return decode_png(rasterize_png(svg, width, height))


def rasterize_png(svg: str, width: int, height: int) -> bytes:
    """The picture as the bytes of a PNG file, `width` x `height` pixels, on white."""
    resvg = _resvg()
    for name, side in (("width", width), ("height", height)):
        if not 1 <= side <= MAX_SIDE:
            raise RasterError(f"{name}={side!r} is outside 1..{MAX_SIDE} pixels")
    try:
        png = bytes(
            resvg.svg_to_bytes(
                svg_string=svg, background="#ffffff", skip_system_fonts=True, width=int(width), height=int(height)
            )
        )
    except ValueError as error:
        raise RasterError(f"resvg cannot draw this source ({error}); it begins with {svg[:60]!r}") from None
    drawn = png_size(png)
    if drawn != (width, height):
        raise RasterError(
            f"the source draws {drawn[0]} x {drawn[1]} pixels where {width} x {height} were asked for; "
            "give its viewBox the same proportions"
        )
    return png


def png_size(png: bytes) -> tuple[int, int]:
    """(width, height) from a PNG file's header."""
    if png[:8] != b"\x89PNG\r\n\x1a\n" or png[12:16] != b"IHDR" or len(png) < 24:
        raise RasterError(f"not a PNG file: it begins with {png[:8]!r}")
    return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")


def decode_png(png: bytes) -> np.ndarray:
    """uint8 [height, width, 3] from a PNG file that a renderer wrote; transparency is laid on white."""
    image_module = _pillow()
    try:
        image = image_module.open(io.BytesIO(png), formats=("PNG",))
        if image.mode == "RGB":
            return np.array(image)
        pixels = np.asarray(image if image.mode == "RGBA" else image.convert("RGBA"))
    except (OSError, ValueError, SyntaxError) as error:
        raise RasterError(f"not a readable PNG file ({error}); it begins with {png[:8]!r}") from None
    opaque = pixels[..., 3]
    if (opaque == 255).all():
        return np.ascontiguousarray(pixels[..., :3])
    share = opaque[..., None].astype(np.float32) / 255
    return np.rint(pixels[..., :3] * share + 255 * (1 - share)).astype(np.uint8)


def encode_png(pixels: np.ndarray) -> bytes:
    """The bytes of a PNG file with these pixels, uint8 [height, width, 3]."""
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise RasterError(f"pixels are {pixels.dtype} {pixels.shape}, expected uint8 [height, width, 3]")
    file = io.BytesIO()
    _pillow().fromarray(np.ascontiguousarray(pixels)).save(file, format="PNG")
    return file.getvalue()


def _resvg() -> Any:
    try:
        import resvg_py
    except ImportError:
        raise RasterError("drawing SVG needs resvg-py: pip install 'perilune[train]'") from None
    return resvg_py


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise RasterError("reading pictures needs pillow: pip install 'perilune[train]'") from None
    return Image
