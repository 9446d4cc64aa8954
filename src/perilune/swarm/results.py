"""Long texts by reference: stored whole, shown as a digest with a handle.

A handle is `art:` and the first 16 hexadecimal digits of the artefact's hash, the same in every agent: a parent may
give one to a child. `{{art:...}}` inside an answer stands for the whole artefact and is filled in when the answer is
stored, so that a document of megabytes never passes through a model's context.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from perilune.swarm.journal.event import Artefact, Journal
from perilune.swarm.tools.tool import ToolError

HANDLE = re.compile(r"art:[0-9a-f]{16}")
REFERENCE = re.compile(r"\{\{\s*(art:[0-9a-f]{16})\s*\}\}")
LARGEST = 64 << 20
"""Bytes of the largest artefact that references may make."""


class Results:
    """Artefacts of a run by handle."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self._known: dict[str, Artefact] = {}

    async def keep(self, data: bytes) -> str:
        return self.learn(await self.journal.put(data))

    def learn(self, artefact: Artefact) -> str:
        handle = f"art:{artefact.sha256[:16]}"
        self._known[handle] = artefact
        return handle

    def find(self, handle: str) -> Artefact:
        artefact = self._known.get(handle)
        if artefact is None:
            raise ToolError(f"no result has the handle {handle!r}; handles look like art:0123456789abcdef")
        return artefact

    async def read(self, handle: str, start: int = 0, end: int | None = None) -> str:
        artefact = self.find(handle)
        data = await self.journal.get(artefact.sha256, start, end)
        return data.decode("utf-8", "replace")

    async def digest(self, text: str, limit: int) -> tuple[str, Artefact | None]:
        """The text if it has at most `limit` bytes; else its beginning and end with a handle to the whole."""
        data = text.encode("utf-8", "replace")
        if len(data) <= limit:
            return text, None
        artefact = await self.journal.put(data)
        handle = self.learn(artefact)
        sign = f"\n[... {len(data):,} bytes in all; the rest is {handle}: read_result(handle, start, end) ...]\n"
        room = max(0, limit - len(sign))
        first, last = data[: room - room // 4], data[len(data) - room // 4 :]
        return first.decode("utf-8", "ignore") + sign + last.decode("utf-8", "ignore"), artefact

    async def expand(self, text: str) -> bytes:
        """The text with every reference replaced by what it stands for, references inside those too."""
        return b"".join([piece async for piece in self._pieces(text, (), [LARGEST])])

    async def _pieces(self, text: str, inside: tuple[str, ...], room: list[int]):
        for plain, handle in _split(text):
            if plain:
                data = plain.encode("utf-8", "replace")
                room[0] -= len(data)
                if room[0] < 0:
                    raise ToolError(f"the answer's references make more than {LARGEST:,} bytes")
                yield data
            if handle and handle in self._known and handle not in inside:
                async for piece in self._pieces(await self.read(handle), (*inside, handle), room):
                    yield piece
            elif handle:
                yield f"{{{{{handle}}}}}".encode()


def _split(text: str) -> Iterator[tuple[str, str | None]]:
    at = 0
    for found in REFERENCE.finditer(text):
        yield text[at : found.start()], found.group(1)
        at = found.end()
    yield text[at:], None
