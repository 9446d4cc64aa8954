"""Long texts by reference: stored whole, shown as a digest with a handle.

A handle is `art:` and the first 16 hexadecimal digits of the artefact's hash, the same in every agent: a parent may
give one to a child. `{{art:...}}` inside an answer stands for the whole artefact and is filled in when the answer is
stored, so that a document of megabytes never passes through a model's context.

Taint goes where the bytes go: an artefact that a tainted agent made taints whoever reads it, by whatever way its handle
came to the reader. After a resume an artefact counts as tainted until its maker's records have said otherwise.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import AsyncIterator, Iterator

import orjson

from perilune.swarm.journal.event import Artefact, Journal
from perilune.swarm.messages import clean
from perilune.swarm.tools.tool import ToolError

HANDLE = re.compile(r"art:[0-9a-f]{16}")
REFERENCE = re.compile(r"\{\{\s*(art:[0-9a-f]{16})\s*\}\}")
LARGEST = 64 << 20
"""Bytes of the largest artefact that references may make."""
SMALLEST = 120
"""Bytes of a text that is shown whole in any case: a handle in its place would not be shorter."""
MOST_REFERENCES = 50_000
"""In one answer, with those inside its references: many small ones take time without taking bytes."""
DEEPEST = 40
"""References inside references; a deeper one stays as it is written."""


class Results:
    """Artefacts of a run by handle."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self._known: dict[str, tuple[Artefact, bool | None]] = {}

    async def keep(self, data: bytes, *, tainted: bool) -> str:
        return self.learn(await self.journal.put(data), tainted=tainted)

    def learn(self, artefact: Artefact, *, tainted: bool | None = None) -> str:
        """Its handle. `tainted` None: nobody here knows. What was tainted once stays so."""
        handle = f"art:{artefact.sha256[:16]}"
        known, before = self._known.get(handle, (artefact, None))
        if known.sha256 != artefact.sha256:
            raise ToolError(f"two results share the handle {handle!r}: change a word of the new one")
        self._known[handle] = artefact, before if before or tainted is None else tainted
        return handle

    def find(self, handle: str) -> Artefact:
        return self._find(handle)[0]

    def is_tainted(self, handle: str) -> bool:
        return self._find(handle)[1] is not False

    def _find(self, handle: str) -> tuple[Artefact, bool | None]:
        found = self._known.get(handle)
        if found is None:
            raise ToolError(f"no result has the handle {handle[:80]!r}; handles look like art:0123456789abcdef")
        return found

    async def read(self, handle: str, start: int = 0, end: int | None = None) -> str:
        artefact = self.find(handle)
        data = await self.journal.get(artefact.sha256, start, end)
        return data.decode("utf-8", "replace")

    async def read_part(self, handle: str, start: int, end: int, room: int) -> tuple[str, int]:
        """Whole characters from byte `start` on, at most up to `end` and as many as take `room` bytes in a message; and
        the byte at which they stop."""
        end = min(end, self.find(handle).size)
        data = await self.journal.get(self.find(handle).sha256, start, max(start, end))
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(data)
        part = shortened(text, room)
        if len(part) < len(text):
            return part, start + len(part.encode())
        return part, start + len(data) - len(decoder.getstate()[0])

    async def digest(self, text: str, limit: int, *, tainted: bool) -> tuple[str, Artefact | None]:
        """The text if it takes at most `limit` bytes in a message; else its beginning and end with a handle to the
        whole."""
        text = clean(text)
        if len(text) <= max(limit, SMALLEST) and wire_size(text) <= max(limit, SMALLEST):
            return text, None
        data = text.encode()
        artefact = await self.journal.put(data)
        handle = self.learn(artefact, tainted=tainted)
        sign = f"\n[... {len(data):,} bytes in all; the rest is {handle}: read_result(handle, start, end) ...]\n"
        room = max(0, limit - wire_size(sign))
        return shortened(text, room - room // 4) + sign + shortened(text[: -(room // 4) - 1 : -1], room // 4)[
            ::-1
        ], artefact

    async def expand(self, text: str) -> tuple[bytes, bool]:
        """The text with every reference replaced by what it stands for, references inside those too; and whether any
        of it is tainted."""
        filling = _Filling(self)
        return b"".join([piece async for piece in filling.pieces(text, ())]), filling.is_tainted


class _Filling:
    """References being filled in, with what is left of the bounds."""

    def __init__(self, results: Results) -> None:
        self.results = results
        self.is_tainted = False
        self._bytes_left = LARGEST
        self._references_left = MOST_REFERENCES

    async def pieces(self, text: str, inside: tuple[str, ...]) -> AsyncIterator[bytes]:
        for plain, handle in _split(text):
            if plain:
                yield self._counted(plain.encode("utf-8", "replace"))
            if handle is None:
                continue
            self._references_left -= 1
            if self._references_left < 0:
                raise ToolError(
                    f"the answer has more than {MOST_REFERENCES:,} references, those inside others included"
                )
            if handle not in self.results._known or handle in inside or len(inside) == DEEPEST:
                yield self._counted(f"{{{{{handle}}}}}".encode())
                continue
            self.is_tainted = self.is_tainted or self.results.is_tainted(handle)
            async for piece in self.pieces(await self.results.read(handle), (*inside, handle)):
                yield piece

    def _counted(self, data: bytes) -> bytes:
        self._bytes_left -= len(data)
        if self._bytes_left < 0:
            raise ToolError(f"the answer's references make more than {LARGEST:,} bytes")
        return data


def wire_size(text: str) -> int:
    """Bytes of a text inside a message, quotes and escapes included: a control character takes six."""
    return len(orjson.dumps(text))


def shortened(text: str, room: int) -> str:
    """As much of the beginning of a text as takes `room` bytes in a message."""
    piece = text[:room]
    while piece and (size := wire_size(piece) - 2) > room:
        piece = piece[: min(len(piece) - 1, len(piece) * room // size)]
    return piece


def _split(text: str) -> Iterator[tuple[str, str | None]]:
    at = 0
    for found in REFERENCE.finditer(text):
        yield text[at : found.start()], found.group(1)
        at = found.end()
    yield text[at:], None
