"""How large a picture may be, and the error that says which limit it broke."""

from dataclasses import dataclass, fields

MOST_PIXELS = 89_478_485  # above this Pillow takes every picture for a bomb


class ImageError(ValueError):
    """A file that is no picture this package reads. `reason` is the short form that a count of skipped files uses."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class ImageLimits:
    """How large a picture may be. All are checked before pixels are decoded.

    max_bytes: of a file.
    max_pixels: width x height of a picture or frame.
    max_side: width or height.
    max_frames: of an animation or a folder of frames.
    max_video_pixels: of all frames together.
    """

    max_bytes: int = 1 << 26
    max_pixels: int = 1 << 26
    max_side: int = 65_535
    max_frames: int = 1024
    max_video_pixels: int = 1 << 27

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{field.name}={value!r} must be an integer of at least 1")
        if self.max_pixels > MOST_PIXELS:
            raise ValueError(f"max_pixels={self.max_pixels!r} must be at most {MOST_PIXELS}, where the decoder stops")

    def check_size(self, name: str, width: int, height: int) -> None:
        if width < 1 or height < 1:
            raise ImageError(f"{name!r} claims {width} x {height} pixels; a side has at least 1", reason="corrupt")
        if max(width, height) > self.max_side:
            raise ImageError(
                f"{name!r} is {width:,} x {height:,} pixels; the limit is max_side={self.max_side:,}",
                reason="too many pixels",
            )
        if width * height > self.max_pixels:
            raise ImageError(
                f"{name!r} is {width:,} x {height:,} = {width * height:,} pixels; the limit is"
                f" max_pixels={self.max_pixels:,}",
                reason="too many pixels",
            )

    def check_frames(self, name: str, count: int) -> None:
        if count > self.max_frames:
            raise ImageError(
                f"{name!r} has {count:,} frames or more; the limit is max_frames={self.max_frames:,}",
                reason="too many frames",
            )

    def check_video(self, name: str, count: int, width: int, height: int) -> None:
        """The frames of a video together; a still is judged by `check_size` alone."""
        self.check_frames(name, count)
        if count * width * height > self.max_video_pixels:
            raise ImageError(
                f"{name!r} has {count:,} frames of {width:,} x {height:,}, together {count * width * height:,} pixels;"
                f" the limit is max_video_pixels={self.max_video_pixels:,}",
                reason="too many pixels",
            )
