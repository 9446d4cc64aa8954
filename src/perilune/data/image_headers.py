"""What a PNG, JPEG, WebP or GIF file says about itself, read before any pixel is decoded.

`read_header` walks the blocks of a file (PNG chunks, JPEG segments, RIFF chunks, GIF blocks), checks the declared size
and the number of frames against `ImageLimits`, and writes the file again with nothing but the blocks that make up the
picture. The decoder never sees the rest: colour profiles, EXIF, XMP, comments, compressed text, thumbnails, second
pictures behind the first. Of EXIF one number is kept, the orientation.

What this module promises: it allocates no more than a copy of the file, whatever size the file claims; it reads at most
MAX_BLOCKS blocks; a file that is cut off, whose blocks overlap its end or whose checksums are wrong is an ImageError
that names the file and the place; the signature decides the format, never the name of the file, and no other is read.
"""

import re
import struct
import zlib
from dataclasses import dataclass
from typing import Literal

from perilune.data.image_limits import ImageError, ImageLimits

Format = Literal["PNG", "JPEG", "WEBP", "GIF"]

MAX_BLOCKS = 1 << 19  # a GIF of 64 MiB has 263,000; a walk of this many takes about a second
MAX_SCANS = 100  # each scan of a progressive JPEG costs a pass over the whole picture; encoders write 10 or so
_SHORTEST_DELAY, _USUAL_DELAY = 20, 100  # ms: browsers show a frame of less than 20 ms for 100 ms

_OTHER_FORMATS = (
    (b"II*\0", "TIFF"), (b"MM\0*", "TIFF"), (b"II+\0", "BigTIFF"), (b"8BPS", "PSD"), (b"BM", "BMP"), (b"%!PS", "EPS"),
    (b"\xc5\xd0\xd3\xc6", "EPS"), (b"%PDF", "PDF"), (b"<svg", "SVG"), (b"<?xml", "XML or SVG"), (b"\0\0\1\0", "ICO"),
    (b"\xff\x0a", "JPEG XL"), (b"\0\0\0\x0cJXL ", "JPEG XL"), (b"\0\0\0\x0cjP  ", "JPEG 2000"), (b"PK", "ZIP"),
    (b"\x1f\x8b", "gzip"), (b"SIMPLE", "FITS"), (b"v/1\x01", "OpenEXR"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ImageHeader:
    """Format and size of a picture before its orientation is applied, and the bytes that a decoder needs.

    delays: milliseconds that each frame is shown; one entry for a still.
    orientation: EXIF's 1 to 8, 1 meaning upright.
    """

    format: Format
    width: int
    height: int
    content: bytes
    delays: tuple[int, ...] = (0,)
    orientation: int = 1

    @property
    def num_frames(self) -> int:
        return len(self.delays)


def read_header(content: bytes, name: str, limits: ImageLimits) -> ImageHeader:
    """Judge a whole file; `name` is what errors call it."""
    if len(content) > limits.max_bytes:
        raise ImageError(
            f"{name!r} has {len(content):,} bytes; the limit is max_bytes={limits.max_bytes:,}", reason="too many bytes"
        )
    if not content:
        raise ImageError(f"{name!r} is empty", reason="not a picture")
    if content.startswith(_PNG_SIGNATURE):
        return _read_png(content, name, limits)
    if content.startswith(b"\xff\xd8\xff"):
        return _read_jpeg(content, name, limits)
    if content.startswith(b"RIFF") and content[8:12] == b"WEBP":
        return _read_webp(content, name, limits)
    if content.startswith((b"GIF87a", b"GIF89a")):
        return _read_gif(content, name, limits)
    raise ImageError(f"{name!r} is {_other_format(content)}; give PNG, JPEG, WebP or GIF", reason="not a picture")


def _other_format(content: bytes) -> str:
    if content[4:8] == b"ftyp":
        return "AVIF, HEIC or a video container"
    known = next((kind for start, kind in _OTHER_FORMATS if content.startswith(start)), None)
    return known or f"not a picture (it begins with {content[:8]!r})"


def _corrupt(name: str, what: str) -> ImageError:
    return ImageError(f"{name!r} is corrupt: {what}", reason="corrupt")


class _Blocks:
    """A cursor over the file that cannot pass its end."""

    def __init__(self, content: bytes, name: str, position: int) -> None:
        self.content = content
        self.name = name
        self.position = position
        self.left = MAX_BLOCKS

    @property
    def at_end(self) -> bool:
        return self.position >= len(self.content)

    def take(self, count: int, what: str) -> memoryview:
        end = self.position + count
        if end > len(self.content):
            raise ImageError(
                f"{self.name!r} is cut off: {what} at byte {self.position:,} needs {count:,} bytes,"
                f" {len(self.content) - self.position:,} are left",
                reason="corrupt",
            )
        part = memoryview(self.content)[self.position : end]
        self.position = end
        return part

    def next_block(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise _corrupt(self.name, f"it has more than {MAX_BLOCKS:,} blocks")


# --- PNG --------------------------------------------------------------------------------------------------------------

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_KEPT = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND")
_PNG_INDEXED = 3


def _read_png(content: bytes, name: str, limits: ImageLimits) -> ImageHeader:
    """Chunks are length, kind, data, checksum. An animated PNG keeps its default picture only."""
    blocks = _Blocks(content, name, len(_PNG_SIGNATURE))
    kept: list[bytes | memoryview] = [_PNG_SIGNATURE]
    kinds: set[bytes] = set()
    width = height = colour = 0
    orientation = 1
    while b"IEND" not in kinds:
        blocks.next_block()
        start = blocks.position
        length = int.from_bytes(blocks.take(4, "a chunk's length"), "big")
        kind = bytes(blocks.take(4, "a chunk's kind"))
        data = blocks.take(length, f"chunk {kind!r}")
        checksum = blocks.take(4, "a checksum")
        if not kinds:
            if kind != b"IHDR" or length != 13:
                raise _corrupt(name, f"its first chunk is {kind!r} of {length:,} bytes, not IHDR of 13")
            width, height, _, colour = struct.unpack_from(">IIBB", data)
            limits.check_size(name, width, height)
        if kind in _PNG_KEPT:
            if zlib.crc32(data, zlib.crc32(kind)) != int.from_bytes(checksum, "big"):
                raise _corrupt(name, f"chunk {kind!r} at byte {start:,} has a wrong checksum")
            if kind != b"IDAT" and kind in kinds:
                raise _corrupt(name, f"chunk {kind!r} comes twice")
            kept.append(memoryview(content)[start : blocks.position])
            kinds.add(kind)
        elif kind == b"eXIf":
            orientation = _orientation(bytes(data))
        elif not kind.isalpha() or kind[:1].isupper():
            raise _corrupt(name, f"unknown chunk {kind!r} at byte {start:,}")
    if b"IDAT" not in kinds:
        raise _corrupt(name, "it has no pixels (no IDAT chunk)")
    if colour == _PNG_INDEXED and b"PLTE" not in kinds:
        raise _corrupt(name, "it has no palette (no PLTE chunk)")
    return ImageHeader(format="PNG", width=width, height=height, content=b"".join(kept), orientation=orientation)


# --- JPEG -------------------------------------------------------------------------------------------------------------

_JPEG_NEXT_MARKER = re.compile(rb"\xff+[^\x00\xd0-\xd7\xff]")  # after a scan: 00 and RST are part of its data
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_STANDALONE = frozenset((0x01, *range(0xD0, 0xD8)))
_SCAN, _END, _APP0, _APP1, _APP14, _APP15, _COMMENT = 0xDA, 0xD9, 0xE0, 0xE1, 0xEE, 0xEF, 0xFE


def _read_jpeg(content: bytes, name: str, limits: ImageLimits) -> ImageHeader:
    """Segments are FF, marker, length, data; a scan's data follows its segment up to the next marker.

    Of the application segments JFIF (APP0) and Adobe (APP14) are kept: they say how colours are coded.
    """
    blocks = _Blocks(content, name, 2)
    kept: list[bytes | memoryview] = [content[:2]]
    size: tuple[int, int] | None = None
    num_scans, orientation = 0, 1
    while True:
        blocks.next_block()
        if blocks.at_end:  # a decoder would paint what is missing grey and say nothing
            raise ImageError(f"{name!r} is cut off: it has no end marker", reason="corrupt")
        marker = _jpeg_marker(blocks)
        start = blocks.position - 2
        if marker == _END:
            break
        if marker in _JPEG_STANDALONE:
            continue
        length = int.from_bytes(blocks.take(2, "a segment's length"), "big")
        if length < 2:
            raise _corrupt(name, f"segment {marker:02X} at byte {start:,} has length {length}")
        data = blocks.take(length - 2, f"segment {marker:02X}")
        if marker in _JPEG_FRAMES:
            if size is not None or length < 8:
                raise _corrupt(name, f"frame header {marker:02X} at byte {start:,} is doubled or too short")
            height, width = struct.unpack_from(">HH", data, 1)
            limits.check_size(name, width, height)
            size = width, height
        elif marker == _APP1:
            if bytes(data[:6]) == b"Exif\0\0":
                orientation = _orientation(bytes(data))
            continue
        elif (_APP0 < marker <= _APP15 and marker != _APP14) or marker == _COMMENT:
            continue
        elif marker == _SCAN:
            num_scans += 1
            if size is None or num_scans > MAX_SCANS:
                raise _corrupt(name, "a scan before the frame header" if size is None else f"over {MAX_SCANS} scans")
            found = _JPEG_NEXT_MARKER.search(content, blocks.position)
            blocks.position = found.start() if found else len(content)
        kept.append(memoryview(content)[start : blocks.position])
    if size is None or not num_scans:
        raise _corrupt(name, "it has no pixels (no frame header or no scan)")
    kept.append(b"\xff\xd9")
    width, height = size
    return ImageHeader(format="JPEG", width=width, height=height, content=b"".join(kept), orientation=orientation)


def _jpeg_marker(blocks: _Blocks) -> int:
    """The next marker's number; any FF before it is filling."""
    if blocks.take(1, "a marker")[0] != 0xFF:
        raise _corrupt(blocks.name, f"byte {blocks.position - 1:,} is no marker")
    while (number := blocks.take(1, "a marker")[0]) == 0xFF:
        blocks.next_block()
    return number


# --- WebP -------------------------------------------------------------------------------------------------------------

_WEBP_KEPT = (b"VP8 ", b"VP8L", b"VP8X", b"ALPH", b"ANIM", b"ANMF")
_WEBP_ANIMATED, _WEBP_ALPHA = 0x02, 0x10


def _read_webp(content: bytes, name: str, limits: ImageLimits) -> ImageHeader:
    """RIFF chunks are kind, length, data, filling to an even length. Frames (ANMF) hold chunks of their own."""
    declared = int.from_bytes(content[4:8], "little") + 8
    if declared > len(content):
        raise ImageError(
            f"{name!r} is cut off: it declares {declared:,} bytes and has {len(content):,}", reason="corrupt"
        )
    blocks = _Blocks(content[:declared], name, 12)
    kept: list[bytes | memoryview] = []
    canvas: tuple[int, int] | None = None
    animated, orientation, num_pictures = False, 1, 0
    delays: list[int] = []
    while not blocks.at_end:
        blocks.next_block()
        start = blocks.position
        kind = bytes(blocks.take(4, "a chunk's kind"))
        length = int.from_bytes(blocks.take(4, "a chunk's length"), "little")
        data = blocks.take(length, f"chunk {kind!r}")
        if length % 2 and not blocks.at_end:
            blocks.take(1, "filling")
        if canvas is None and kind not in (b"VP8 ", b"VP8L", b"VP8X"):
            raise _corrupt(name, f"its first chunk is {kind!r}, not VP8, VP8L or VP8X")
        chunk: bytes | memoryview = memoryview(blocks.content)[start : blocks.position]
        if kind == b"VP8X":
            if canvas is not None or length < 10:
                raise _corrupt(name, "its VP8X chunk is doubled or too short")
            canvas = _int24(data, 4) + 1, _int24(data, 7) + 1
            animated = bool(data[0] & _WEBP_ANIMATED)
            flags = bytes([data[0] & (_WEBP_ANIMATED | _WEBP_ALPHA)])
            chunk = bytes(chunk[:8]) + flags + bytes(chunk[9:])
            limits.check_size(name, *canvas)
        elif kind in (b"VP8 ", b"VP8L"):
            size = _webp_picture_size(kind, data, name)
            limits.check_size(name, *size)
            if canvas is not None and size != canvas:
                raise _corrupt(name, f"its canvas is {canvas!r} pixels and its picture {size!r}")
            canvas = size
            num_pictures += 1
        elif kind == b"ANMF" and canvas is not None:
            delays.append(_webp_delay(data, canvas, name))
            limits.check_frames(name, len(delays))
        elif kind == b"EXIF":
            orientation = _orientation(bytes(data))
        if kind in _WEBP_KEPT:
            kept.append(chunk)
    if canvas is None or (num_pictures, bool(delays)) != ((0, True) if animated else (1, False)):
        raise _corrupt(name, f"it has {num_pictures} pictures and {len(delays)} frames")
    body = b"WEBP" + b"".join(kept)
    return ImageHeader(
        format="WEBP",
        width=canvas[0],
        height=canvas[1],
        content=b"RIFF" + len(body).to_bytes(4, "little") + body,
        delays=tuple(delays) or (0,),
        orientation=orientation,
    )


def _webp_picture_size(kind: bytes, data: memoryview, name: str) -> tuple[int, int]:
    if kind == b"VP8 " and len(data) >= 10 and bytes(data[3:6]) == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", data, 6)
        return width & 0x3FFF, height & 0x3FFF
    if kind == b"VP8L" and len(data) >= 5 and data[0] == 0x2F:
        bits = int.from_bytes(data[1:5], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    raise _corrupt(name, f"its {kind!r} chunk has no valid beginning")


def _webp_delay(data: memoryview, canvas: tuple[int, int], name: str) -> int:
    if len(data) < 24:  # 16 bytes of its own and the beginning of a chunk
        raise _corrupt(name, f"a frame of {len(data)} bytes")
    right, bottom = 2 * _int24(data, 0) + _int24(data, 6) + 1, 2 * _int24(data, 3) + _int24(data, 9) + 1
    if right > canvas[0] or bottom > canvas[1]:
        raise _corrupt(name, f"a frame reaches ({right}, {bottom}), outside its canvas {canvas!r}")
    return _shown(_int24(data, 12))


def _int24(data: memoryview, offset: int) -> int:
    return int.from_bytes(data[offset : offset + 3], "little")


# --- GIF --------------------------------------------------------------------------------------------------------------

_GIF_EXTENSION, _GIF_PICTURE, _GIF_END, _GIF_CONTROL = 0x21, 0x2C, 0x3B, 0xF9


def _read_gif(content: bytes, name: str, limits: ImageLimits) -> ImageHeader:
    """Blocks are extensions or pictures, each with data in sub-blocks of at most 255 bytes.

    Frames that reach over the canvas enlarge it, as decoders do; the enlarged size is what limits judge.
    """
    blocks = _Blocks(content, name, 6)
    width, height, flags, background, aspect = struct.unpack("<HHBBB", blocks.take(7, "the screen descriptor"))
    palette = blocks.take(_gif_palette_bytes(flags), "the palette")
    if width and height:
        limits.check_size(name, width, height)
    kept: list[bytes | memoryview] = []
    delays: list[int] = []
    delay = 0
    while not blocks.at_end:
        blocks.next_block()
        start = blocks.position
        introducer = blocks.take(1, "a block")[0]
        if introducer == _GIF_END:
            break
        if introducer == 0:  # some writers leave an empty sub-block behind
            continue
        if introducer == _GIF_EXTENSION:
            label = blocks.take(1, "an extension")[0]
            data_start = blocks.position
            _skip_sub_blocks(blocks)
            if label == _GIF_CONTROL:
                if content[data_start] != 4 or blocks.position - data_start != 6:
                    raise _corrupt(name, f"the control block at byte {start:,} has not 4 bytes")
                delay = int.from_bytes(content[data_start + 2 : data_start + 4], "little") * 10
                kept.append(memoryview(content)[start : blocks.position])
        elif introducer == _GIF_PICTURE:
            left, top, frame_width, frame_height, frame_flags = struct.unpack("<HHHHB", blocks.take(9, "a frame"))
            blocks.take(_gif_palette_bytes(frame_flags), "a frame's palette")
            blocks.take(1, "a frame's code size")
            _skip_sub_blocks(blocks)
            if not frame_width or not frame_height:
                raise _corrupt(name, f"frame {len(delays)} has {frame_width} x {frame_height} pixels")
            width, height = max(width, left + frame_width), max(height, top + frame_height)
            limits.check_size(name, width, height)
            kept.append(memoryview(content)[start : blocks.position])
            delays.append(_shown(delay))
            limits.check_frames(name, len(delays))
            delay = 0
        else:
            raise _corrupt(name, f"byte {start:,} begins no block ({introducer:#04x})")
    if not delays:
        raise _corrupt(name, "it has no frame")
    if max(width, height) > 0xFFFF:
        raise _corrupt(name, f"its frames reach over {width} x {height} pixels")
    screen = struct.pack("<HHBBB", width, height, flags, background, aspect)
    return ImageHeader(
        format="GIF",
        width=width,
        height=height,
        content=b"".join([content[:6], screen, palette, *kept, b";"]),
        delays=tuple(delays),
    )


def _gif_palette_bytes(flags: int) -> int:
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def _skip_sub_blocks(blocks: _Blocks) -> None:
    while length := blocks.take(1, "a sub-block")[0]:
        blocks.next_block()
        blocks.take(length, "a sub-block")


def _shown(delay: int) -> int:
    return delay if delay >= _SHORTEST_DELAY else _USUAL_DELAY


# --- EXIF -------------------------------------------------------------------------------------------------------------

_ORIENTATION_TAG, _SHORT = 0x0112, 3


def _orientation(exif: bytes) -> int:
    """The orientation in a block of EXIF (a TIFF header and a directory); 1 when it is absent or makes no sense.

    EXIF that is broken does not spoil a picture, so nothing here is an error.
    """
    exif = exif.removeprefix(b"Exif\0\0")
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None or len(exif) < 8:
        return 1
    (directory,) = struct.unpack_from(f"{order}I", exif, 4)
    if directory + 2 > len(exif):
        return 1
    (num_entries,) = struct.unpack_from(f"{order}H", exif, directory)
    for entry in range(directory + 2, min(directory + 2 + 12 * num_entries, len(exif) - 11), 12):
        tag, kind, count, value = struct.unpack_from(f"{order}HHIH", exif, entry)
        if tag == _ORIENTATION_TAG:
            return value if kind == _SHORT and count == 1 and 1 <= value <= 8 else 1
    return 1
