"""What a journal holds: events on hash chains, artefacts by their hash, and the vocabulary of a run.

A chain is a list of events linked by hashes. Every agent has one, named after it. Calls of one turn run at the same
time and end in any order, so each call has a short chain of its own, `AGENT#STEP.INDEX`, whose head the agent's next
event binds under `reads`, in the order of the calls. An agent's head therefore covers all it saw, and does not depend
on who was faster.

    hash(n) = sha256(hash(n-1) + kind + 0x00 + body)      hash(-1) = sha256(chain's name)

`body` is canonical JSON: what happened. `note` is outside the hash of the chain (times, latencies, attempts, tokens
used), but inside the seal of the run.

Kinds and their bodies:

    chain "run"
      run_started     task, model, settings, tools {name: sha256 of its declaration}, limits, seed
      approval        agent, call ("STEP.INDEX"), tool, arguments_sha256, decision ("allow" | "deny"), by,
                      scope ("call" | "run": these arguments again), reason
      control         action ("cancel" | "steer"), agent, text, id
      run_resumed     life (how many processes worked on it before)
      run_finished    status ("done" | "failed" | "cancelled" | "budget"), answer {sha256, size} | null, error | null

    chain of an agent ("main", "main/researcher-2.0", ...)
      started         parent | null, call ("STEP.INDEX" of the parent) | null, name, depth, model, system_prompt, task,
                      tools [names], rights {...}, budget {...}, tainted, after [agents whose results are in the task]
      task            number, text                 (a worker of map_task gets a fresh context with its next item)
      result          number, status, result, error, reads    (how that item ended, as in finished)
      message         id, sender, step (the sender's; null for a person), text, tainted
      compacted       step, how ("hidden" | "summary" | "dropped"), positions and handles of what was hidden | summary
                      | handle of the turns that were dropped
                      note (summary: it costs a step): seconds, attempts, prompt_tokens, completion_tokens
      reply           step, message (wire form), finish, reads [hashes], tokens {sha256, size} | null
                      note: seconds, attempts, prompt_tokens, completion_tokens, model, weight_version
      finished        status ("done" | "failed" | "cancelled" | "budget"), result {sha256, size} | null, error | null,
                      reads [hashes]

    chain of a call ("main#2.0": the first call of main's step 2)
      call_started    tool, arguments_sha256       (only for tools that must not run twice)
      outcome         tool, call_id, status ("ok" | "error" | "denied" | "unknown"), text (what the model sees),
                      result {sha256, size} | null (all of it, where text is a digest), spawned [agents],
                      joined [agents whose results this call returned], untrusted (bool)
                      note: seconds, decision
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import orjson


@dataclass(frozen=True, slots=True)
class Event:
    index: int
    """Position in the journal: the order of commits."""
    chain: str
    seq: int
    kind: str
    body: bytes
    note: bytes
    time: float
    """Seconds since the epoch when it was written."""
    hash: bytes

    def read(self) -> dict[str, Any]:
        return orjson.loads(self.body)

    def read_note(self) -> dict[str, Any]:
        return orjson.loads(self.note)


@dataclass(frozen=True, slots=True)
class Artefact:
    """A reference to stored bytes."""

    sha256: str
    size: int

    def plain(self) -> dict[str, Any]:
        return {"sha256": self.sha256, "size": self.size}


def canonical(body: Mapping[str, Any]) -> bytes:
    return orjson.dumps(body, option=orjson.OPT_SORT_KEYS)


def first_link(chain: str) -> bytes:
    return hashlib.sha256(chain.encode()).digest()


def link(previous: bytes, kind: str, body: bytes) -> bytes:
    return hashlib.sha256(b"".join((previous, kind.encode(), b"\0", body))).digest()


class Journal(Protocol):
    """Append-only. What `append` returned is on disk; only then may an agent see it."""

    async def append(
        self, chain: str, kind: str, body: Mapping[str, Any], note: Mapping[str, Any] | None = None
    ) -> Event:
        """Commit one event (many callers share one commit) and return it; raises `JournalError` when it cannot."""
        ...

    async def put(self, data: bytes) -> Artefact:
        """Store bytes under their hash; committed no later than the next event of the caller."""
        ...

    async def get(self, sha256: str, start: int = 0, end: int | None = None) -> bytes: ...

    def artefacts(self) -> list[Artefact]:
        """All that is stored, oldest first."""
        ...

    def head(self, chain: str) -> bytes: ...

    def events(self, chain: str | None = None, *, after: int = -1) -> Iterable[Event]:
        """Committed events in order, of one chain or of all, with an index above `after`."""
        ...

    def chains(self) -> list[str]: ...

    def subscribe(self, receive: Callable[[list[Event]], None]) -> Callable[[], None]:
        """Call `receive` on the loop's thread with each batch once it is committed; returns how to stop."""
        ...

    async def close(self) -> None: ...


class JournalError(RuntimeError):
    """The journal cannot be written or is not what it should be."""


__all__ = ["Artefact", "Event", "Journal", "JournalError", "canonical", "first_link", "link"]
