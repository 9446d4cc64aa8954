"""The answer of a run as files: `answer.md`, and beside it every text that it rests on.

Handles in the answer (`art:...`) become links to the stored texts; under "Sources" stand the results that the
orchestrator read, with the agent each came from, and the documents that were cited. What is only mentioned and was
never stored stays as text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from perilune.swarm.journal.event import Event
from perilune.swarm.journal.sqlite_reader import SQLiteReader
from perilune.swarm.results import HANDLE

if TYPE_CHECKING:  # asyncpg is optional
    from perilune.swarm.journal.postgres_reader import PostgresReader

DOCUMENT = re.compile(r"doc:[A-Za-z0-9_.-]+(?:#\d+-\d+)?")
LONGEST = 4 << 20
"""Bytes of the longest text written beside the answer."""


@dataclass(frozen=True, kw_only=True)
class Source:
    agent: str
    name: str
    sha256: str
    size: int

    @property
    def handle(self) -> str:
        return f"art:{self.sha256[:16]}"


def sources(events: Iterable[Event]) -> list[Source]:
    """Results of the sub-agents that main read, in the order it read them first."""
    names: dict[str, str] = {}
    results: dict[str, tuple[str, int]] = {}
    read: dict[str, None] = {}
    for event in events:
        if event.kind == "started":
            names[event.chain] = event.read()["name"]
        elif event.kind == "finished" and (result := event.read()["result"]):
            results[event.chain] = result["sha256"], result["size"]
        elif event.kind == "outcome" and event.chain.startswith("main#"):
            read.update(dict.fromkeys(event.read()["joined"]))
    return [
        Source(agent=agent, name=names[agent], sha256=results[agent][0], size=results[agent][1])
        for agent in read
        if agent in results
    ]


def write_answer(answer: str, reader: SQLiteReader | PostgresReader, folder: Path) -> Path:
    """Write `answer.md` and the texts under `artefacts/`; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    read = sources(reader.events())
    known = {source.handle: source.sha256 for source in read}
    known |= {f"art:{each.sha256[:16]}": each.sha256 for each in reader.artefacts()}
    used = dict.fromkeys(HANDLE.findall(answer))
    wanted = [*(handle for handle in used if handle in known), *(source.handle for source in read)]
    for handle in dict.fromkeys(wanted):
        _write(folder / "artefacts" / _file(handle), reader.get(known[handle], 0, LONGEST))
    text = HANDLE.sub(lambda found: _link(found.group()) if found.group() in known else found.group(), answer)
    lines = [text.rstrip(), ""]
    documents = list(dict.fromkeys(DOCUMENT.findall(answer)))
    if read or documents:
        lines += ["## Sources", ""]
        lines += [
            f"- {_link(source.handle)}: {source.name} (`{source.agent}`, {source.size:,} bytes)" for source in read
        ]
        lines += [f"- `{document}`" for document in documents]
        lines.append("")
    path = folder / "answer.md"
    _write(path, "\n".join(lines).encode("utf-8", "replace"))
    return path


def _link(handle: str) -> str:
    return f"[{handle}](artefacts/{_file(handle)})"


def _file(handle: str) -> str:
    return f"{handle.removeprefix('art:')}.txt"


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(data)
    temporary.replace(path)
