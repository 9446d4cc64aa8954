"""Files of JSON lines that somebody else made, plain or packed with zstandard: read whole, within a bound."""

from pathlib import Path
from typing import Any

from perilune.data.scenes.sample import ScenesError

MAX_FILE_BYTES = 1 << 28
"""Of a file, unpacked."""


def read_lines(path: Path, name: str) -> list[str]:
    """The lines of a .jsonl or .jsonl.zst file; ScenesError, which calls the file `name`, when it cannot be read."""
    try:
        with path.open("rb") as file:
            reader = zstandard_of(path).ZstdDecompressor().stream_reader(file) if path.suffix == ".zst" else file
            content = reader.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ScenesError(f"{name} is {str(path)!r}: it holds more than {MAX_FILE_BYTES:,} bytes of text")
        return content.decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ScenesError(f"{name} is {str(path)!r}: not UTF-8 at byte {error.start}") from None
    except ScenesError:
        raise
    except Exception as error:  # zstandard has an error of its own, which is not there to be named without it
        raise ScenesError(f"{name} is {str(path)!r}: it cannot be read: {error}") from None


def zstandard_of(path: Path) -> Any:
    """The package, or ScenesError that says which file needs it."""
    try:
        import zstandard
    except ImportError:
        raise ScenesError(
            f"{str(path)!r} needs zstandard (pip install 'perilune[train]'), or a name in .jsonl"
        ) from None
    return zstandard
