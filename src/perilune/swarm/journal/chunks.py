"""Artefacts in parts: a range of a long one is read without the rest.

Part `p` of artefact number `n` has the id (n << 24) + p, so that the parts of an artefact lie side by side.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from perilune.swarm.journal.event import JournalError

CHUNK_BYTES = 1 << 17
PART_BITS = 24


def split(number: int, data: bytes) -> Iterator[tuple[int, memoryview]]:
    """The chunks of an artefact: id and bytes."""
    view, first = memoryview(data), number << PART_BITS
    for part, start in enumerate(range(0, len(data), CHUNK_BYTES), first):
        yield part, view[start : start + CHUNK_BYTES]


def span(number: int, start: int, end: int) -> tuple[int, int]:
    """The first and the last id of the chunks that hold the bytes from `start` to before `end`."""
    first = number << PART_BITS
    return first + start // CHUNK_BYTES, first + (end - 1) // CHUNK_BYTES


def cut(chunks: list[bytes], sha256: str, size: int, start: int, end: int) -> bytes:
    """The bytes from `start` to before `end` out of the chunks of their span; checked against the hash if it is all."""
    skipped = start - start % CHUNK_BYTES
    data = b"".join(chunks)[start - skipped : end - skipped]
    if len(data) != end - start or (len(data) == size and hashlib.sha256(data).hexdigest() != sha256):
        raise JournalError(f"artefact {sha256!r} was changed: its bytes have another hash")
    return data


def digest_of(sha256: str) -> bytes:
    try:
        digest = bytes.fromhex(sha256)
    except ValueError:
        digest = b""
    if len(digest) != 32:
        raise JournalError(f"artefact {sha256!r}: expected 64 hexadecimal digits")
    return digest


def check_range(start: int, end: int | None) -> None:
    if start < 0 or (end is not None and end < 0):
        raise ValueError(f"range from {start} to {end} of an artefact: expected numbers from 0 on")


__all__ = ["CHUNK_BYTES", "PART_BITS", "check_range", "cut", "digest_of", "span", "split"]
