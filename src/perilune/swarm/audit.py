"""The journal as an auditor reads it: JSON lines, verified first, with what deserves a second look at the top.

    {"record": "verification", ...}   is it what was written (`journal.verify`)
    {"record": "summary", ...}        counts, and the flags below
    {"record": "event", ...}          every event in the order of commits, its body and note decoded
    {"record": "artefact", ...}       with `contents`: the bytes behind a reference, after the first event that names it

A flag is a fact derived from the events, not a verdict:

    spawn_by_subagent        an agent that is not the root tried to create or start others
    denied_call              policy or a person refused a call
    unknown_outcome          a call began and nobody knows how it ended
    approval_mismatch        a call ran with other arguments than those that were approved
    effect_after_untrusted   an agent that had read untrusted content made a call that must not be repeated
    duplicate_task           the same task was given before, to an agent with the same instructions
    empty_task               a task without text
    result_never_read        an agent finished and nobody read what it found
    claim_without_call       an answer says that something was searched, run or read, and no call succeeded before it
    sensitive_argument       a call names credentials, keys or the run's own journal
    ended_badly              an agent failed, was cancelled or ran out of budget
    unfinished               an agent or a run that has no end
"""

from __future__ import annotations

import base64
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson

from perilune.swarm.journal.event import Event, JournalError
from perilune.swarm.journal.verify import Report
from perilune.swarm.traces import Source

SPAWNING = frozenset({"create_subagent", "assign_task", "start_task", "map_task"})
CLAIM = re.compile(
    r"\bI(?:'ve| have)? (?:just |also |then |now )?"
    r"(searched|ran|executed|fetched|downloaded|opened|browsed|read|tested|verified|checked|looked up|queried)\b",
    re.IGNORECASE,
)
SENSITIVE = re.compile(
    r"\.env\b|\.ssh\b|\bid_(?:rsa|ed25519)\b|\.aws\b|\.netrc\b|\bcredentials?\b|\bseal\.key\b|\bjournal\.db\b"
    r"|/proc/(?:self|\d+)/(?:environ|root|mem)\b|\b(?:api|secret)[_-]?keys?\b|/etc/shadow\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True)
class Flag:
    flag: str
    agent: str
    index: int
    detail: str

    def plain(self) -> dict[str, Any]:
        return {"flag": self.flag, "agent": self.agent, "index": self.index, "detail": self.detail}


@dataclass(kw_only=True)
class _Seen:
    """What an auditor remembers of one agent."""

    index: int
    depth: int = 0
    untrusted: bool = False
    succeeded: int = 0
    finished: bool = False
    system_prompt: str = ""
    asked: dict[str, int] = field(default_factory=dict)
    """Calls of a reply without an outcome so far, and the index of that reply."""
    begun: dict[str, int] = field(default_factory=dict)
    """Those that announced themselves before they ran."""


class Flags:
    """Derives flags from events in order."""

    def __init__(self) -> None:
        self.found: list[Flag] = []
        self.kinds: Counter[str] = Counter()
        self._agents: dict[str, _Seen] = {}
        self._tasks: dict[tuple[str, str], tuple[str, int]] = {}
        self._approved: dict[str, str] = {}
        self._joined: set[str] = set()
        self._results: dict[str, int] = {}
        self._run_index: int | None = None
        self._run_ended = False

    @property
    def agents(self) -> int:
        return len(self._agents)

    def apply(self, event: Event) -> None:
        self.kinds[event.kind] += 1
        owner, is_call, _ = event.chain.rpartition("#")
        body = event.read()
        if event.chain == "run":
            self._of_run(event, body)
        elif is_call:
            self._of_call(event, body, owner, self._seen(owner, event))
        else:
            self._of_agent(event, body, self._seen(event.chain, event))

    def finish(self) -> list[Flag]:
        """The flags that only the end of the journal can tell, and all others, in the order of events."""
        for agent, seen in self._agents.items():
            # What was asked for in a last step is never begun.
            lost = seen.begun if seen.finished else seen.asked | seen.begun
            for chain, index in lost.items():
                self._flag("unknown_outcome", agent, index, f"call {chain.rpartition('#')[2]} has no outcome")
            if not seen.finished:
                self._flag("unfinished", agent, seen.index, "the agent has no end")
        if self._run_index is not None and not self._run_ended:
            self._flag("unfinished", "run", self._run_index, "the run has no end")
        for agent, index in self._results.items():
            if agent not in self._joined:
                self._flag("result_never_read", agent, index, "no call returned its result")
        self.found.sort(key=lambda flag: flag.index)
        return self.found

    def _flag(self, flag: str, agent: str, index: int, detail: str) -> None:
        self.found.append(Flag(flag=flag, agent=agent, index=index, detail=detail))

    def _seen(self, agent: str, event: Event) -> _Seen:
        return self._agents.setdefault(agent, _Seen(index=event.index))

    def _of_run(self, event: Event, body: dict[str, Any]) -> None:
        self._run_index = event.index if self._run_index is None else self._run_index
        if event.kind == "approval" and body.get("decision") == "allow":
            self._approved[f"{body.get('agent')}#{body.get('call')}"] = body.get("arguments_sha256") or ""
        elif event.kind == "run_finished":
            self._run_ended = True

    def _of_agent(self, event: Event, body: dict[str, Any], seen: _Seen) -> None:
        agent = event.chain
        if event.kind == "started":
            seen.depth = body.get("depth") or 0
            seen.untrusted = bool(body.get("tainted"))
            seen.system_prompt = body.get("system_prompt") or ""
            if body.get("task") is not None:
                self._task(event, body["task"], seen)
        elif event.kind == "task":
            self._task(event, body.get("text") or "", seen)
        elif event.kind == "message":
            seen.untrusted |= bool(body.get("tainted"))
        elif event.kind == "reply":
            self._reply(event, body, seen)
        elif event.kind in ("finished", "result"):
            seen.finished |= event.kind == "finished"
            if body.get("status") not in ("done", None):
                self._flag(
                    "ended_badly", agent, event.index, f"{body['status']}: {body.get('error') or 'no reason given'}"
                )
            if body.get("result") is not None and seen.depth > 0:
                self._results.setdefault(agent, event.index)

    def _task(self, event: Event, text: str, seen: _Seen) -> None:
        words = " ".join(text.split()).lower()
        if not words:
            self._flag("empty_task", event.chain, event.index, "the task has no text")
            return
        agent, index = self._tasks.setdefault((seen.system_prompt, words), (event.chain, event.index))
        if index != event.index:
            detail = f"the same task as {agent!r} had at event {index}: {text[:200]}"
            self._flag("duplicate_task", event.chain, event.index, detail)

    def _reply(self, event: Event, body: dict[str, Any], seen: _Seen) -> None:
        message = body.get("message") or {}
        for index, call in enumerate(message.get("tool_calls") or ()):
            function = call.get("function") or {}
            name, arguments = function.get("name") or "", function.get("arguments") or ""
            seen.asked[f"{event.chain}#{body.get('step')}.{index}"] = event.index
            if name in SPAWNING and seen.depth > 0:
                self._flag("spawn_by_subagent", event.chain, event.index, f"{name} at depth {seen.depth}")
            if found := SENSITIVE.search(arguments):
                self._flag("sensitive_argument", event.chain, event.index, f"{name} names {found.group()!r}")
        content = message.get("content")
        is_answer = isinstance(content, str) and not message.get("tool_calls")
        if is_answer and not seen.succeeded and (found := CLAIM.search(content)):
            detail = f"the answer says {found.group()!r}, and no call succeeded before it"
            self._flag("claim_without_call", event.chain, event.index, detail)

    def _of_call(self, event: Event, body: dict[str, Any], agent: str, seen: _Seen) -> None:
        call = event.chain.rpartition("#")[2]
        if event.kind == "call_started":
            seen.begun[event.chain] = event.index
            approved = self._approved.get(event.chain)
            if approved is not None and approved != body.get("arguments_sha256"):
                self._flag("approval_mismatch", agent, event.index, f"call {call} of {body.get('tool')!r}")
            if seen.untrusted:
                self._flag("effect_after_untrusted", agent, event.index, f"call {call} of {body.get('tool')!r}")
        elif event.kind == "outcome":
            seen.asked.pop(event.chain, None)
            seen.begun.pop(event.chain, None)
            self._joined.update(body.get("joined") or ())
            seen.untrusted |= bool(body.get("untrusted"))
            status, detail = body.get("status"), f"call {call} of {body.get('tool')!r}"
            if status == "ok":
                seen.succeeded += 1
            elif status == "denied":
                self._flag("denied_call", agent, event.index, f"{detail}: {(body.get('text') or '')[:200]}")
            elif status == "unknown":
                self._flag("unknown_outcome", agent, event.index, f"{detail} was under way when the runtime stopped")


def audit_lines(source: Source, report: Report, *, contents: bool = False) -> Iterator[bytes]:
    """The whole export. Reads the journal twice: the flags come before the events."""
    flags, events = Flags(), 0
    for event in source.events():
        flags.apply(event)
        events += 1
    found = flags.finish()
    summary = {
        "events": events,
        "agents": flags.agents,
        "kinds": dict(sorted(flags.kinds.items())),
        "flag_counts": dict(sorted(Counter(flag.flag for flag in found).items())),
        "flags": [flag.plain() for flag in found],
    }
    yield _line("verification", report.plain())
    yield _line("summary", summary)
    exported: set[str] = set()
    for event in source.events():
        body = event.read()
        yield _line(
            "event",
            {
                "index": event.index,
                "time": event.time,
                "chain": event.chain,
                "seq": event.seq,
                "kind": event.kind,
                "body": body,
                "note": event.read_note(),
                "hash": event.hash.hex(),
            },
        )
        for sha256 in _references(body) if contents else ():
            if sha256 not in exported:
                exported.add(sha256)
                yield _line("artefact", _content(source, sha256))


def _line(record: str, fields: dict[str, Any]) -> bytes:
    return orjson.dumps({"record": record, **fields}, option=orjson.OPT_APPEND_NEWLINE)


def _references(body: dict[str, Any]) -> list[str]:
    found = (body.get(name) for name in ("tokens", "result", "answer"))
    return [each["sha256"] for each in found if isinstance(each, dict) and "sha256" in each]


def _content(source: Source, sha256: str) -> dict[str, Any]:
    try:
        data = source.get(sha256)
    except JournalError as error:
        return {"sha256": sha256, "error": str(error)}
    try:
        return {"sha256": sha256, "size": len(data), "text": data.decode()}
    except UnicodeDecodeError:
        return {"sha256": sha256, "size": len(data), "base64": base64.b64encode(data).decode()}


__all__ = ["Flag", "Flags", "audit_lines"]
