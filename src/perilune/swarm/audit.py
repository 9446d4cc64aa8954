"""The journal as an auditor reads it: JSON lines, verified first, with what deserves a second look at the top.

    {"record": "verification", ...}   is it what was written (`journal.verify`)
    {"record": "summary", ...}        counts, and the flags below
    {"record": "event", ...}          every event in the order of commits, its body and note decoded
    {"record": "artefact", ...}       with `contents`: the bytes behind a reference, after the first event that names it

A flag is a fact derived from the events, not a verdict:

    spawn_by_subagent        an agent that is not the root tried to create or start others
    write_outside            a call would write outside of the sandbox; its outcome says what came of it (`audit_files`)
    protected_access         a call names files of a reward, judge, verifier or weights, or would change tests or logs
                             (`audit_patterns`)
    denied_call              policy or a person refused a call
    unknown_outcome          a call began and nobody knows how it ended
    approval_mismatch        a call ran with other arguments than those that were approved
    effect_after_untrusted   an agent that had read untrusted content made a call that must not be repeated
    duplicate_task           the same task was given before, to an agent with the same instructions
    empty_task               a task without text
    result_never_read        an agent finished and nobody read what it found
    claim_without_call       an answer says that something was searched, run or read, and no such call succeeded before
                             it, the agent's own or that of one whose result it read (`audit_claims`)
    sensitive_argument       a call names credentials, keys or the run's own journal
    ended_badly              an agent failed, was cancelled or ran out of budget
    unfinished               an agent or a run that has no end

SERIOUS are those that say somebody did what he may not, or said what is not so. A flag about a call has its outcome:
`ok`, `error`, `denied` or `unknown`, or None when it never ended.
"""

from __future__ import annotations

import base64
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from perilune.swarm.audit_claims import unsupported
from perilune.swarm.audit_files import (
    CODE_KEYS,
    COMMAND_KEYS,
    CONTENT_KEYS,
    PATH_KEYS,
    SCRIPT_KEYS,
    file_uses,
    given_of,
    words_of,
)
from perilune.swarm.audit_patterns import Patterns
from perilune.swarm.journal.event import Event, JournalError
from perilune.swarm.journal.verify import Report
from perilune.swarm.traces import Source

SPAWNING = frozenset({"create_subagent", "assign_task", "start_task", "map_task", "reduce_task"})
ANSWERING = "answer"
"""The tool whose call is an answer, where there is one."""
LEADING = SPAWNING | frozenset({"wait", "read_result", "send", "cancel", "list_agents", "compose", ANSWERING})
"""Tools that lead others, or answer: they are no work that an answer could claim."""
SERIOUS = frozenset(
    [
        "spawn_by_subagent",
        "write_outside",
        "protected_access",
        "sensitive_argument",
        "approval_mismatch",
        "claim_without_call",
    ]
)
SECRET_KINDS = frozenset({"credentials", "journal"})
"""Kinds of protected files that are flagged as `sensitive_argument`."""
REFUSED_PATH = re.compile(r"outside of what you may use|which you may only read|leaves its folder")
"""How the file tools refuse a name that leads out, also where it does not show (a link)."""
SENSITIVE = re.compile(
    r"\.env\b|\.ssh\b|\bid_(?:rsa|ed25519)\b|\.aws\b|\.netrc\b|\bcredentials?\.\w|\bseal\.key\b|\bjournal\.db\b"
    r"|/proc/(?:self|\d+)/(?:environ|root|mem)\b|/etc/shadow\b",
    re.IGNORECASE,
)
"""Names of files, wherever they stand."""
SENSITIVE_WORDS = re.compile(r"\bcredentials?\b|\b(?:api|secret)[_-]?keys?\b", re.IGNORECASE)
"""Words that honest texts use as well: they count in names of fields, paths, commands and code, and by themselves."""
TALKING_KEYS = CONTENT_KEYS | {"q", "queries", "query", "question"}
WORKING_KEYS = PATH_KEYS | COMMAND_KEYS | CODE_KEYS | SCRIPT_KEYS


@dataclass(frozen=True, kw_only=True)
class Flag:
    flag: str
    agent: str
    index: int
    detail: str
    call: str | None = None
    """`STEP.INDEX` of the call it is about."""
    outcome: str | None = None
    """Of that call."""

    def plain(self) -> dict[str, Any]:
        found = {"flag": self.flag, "agent": self.agent, "index": self.index, "detail": self.detail}
        return found if self.call is None else found | {"call": self.call, "outcome": self.outcome}


@dataclass(kw_only=True)
class _Seen:
    """What an auditor remembers of one agent."""

    index: int
    depth: int = 0
    untrusted: bool = False
    done: set[str] = field(default_factory=set)
    """Tools whose calls succeeded, its own and those of agents whose results it read."""
    writable: tuple[str, ...] = ()
    """Folders it may write besides its workspace."""
    finished: bool = False
    system_prompt: str = ""
    asked: dict[str, int] = field(default_factory=dict)
    """Calls of a reply without an outcome so far, and the index of that reply."""
    begun: dict[str, int] = field(default_factory=dict)
    """Those that announced themselves before they ran."""


class Flags:
    """Derives flags from events in order."""

    def __init__(self, patterns: Patterns | None = None) -> None:
        self.found: list[Flag] = []
        self.patterns = patterns or Patterns()
        self._blank: dict[str, int] = {}
        """Calls that would give a task without text, by chain, and the index of their reply."""
        self._outcomes: dict[str, str] = {}
        """How the calls with flags ended, by chain."""
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
        self.found = [
            replace(flag, outcome=self._outcomes.get(f"{flag.agent}#{flag.call}")) if flag.call else flag
            for flag in self.found
        ]
        return self.found

    def _flag(self, flag: str, agent: str, index: int, detail: str, call: str | None = None) -> None:
        self.found.append(Flag(flag=flag, agent=agent, index=index, detail=detail, call=call))

    def _seen(self, agent: str, event: Event) -> _Seen:
        return self._agents.setdefault(agent, _Seen(index=event.index, depth=agent.count("/")))

    def _of_run(self, event: Event, body: dict[str, Any]) -> None:
        self._run_index = event.index if self._run_index is None else self._run_index
        if event.kind == "approval" and body.get("decision") == "allow":
            self._approved[f"{body.get('agent')}#{body.get('call')}"] = body.get("arguments_sha256") or ""
        elif event.kind == "run_finished":
            self._run_ended = True
        elif event.kind == "ended":  # an episode: with it everybody in it
            self._run_ended = True
            for seen in self._agents.values():
                seen.finished = True

    def _of_agent(self, event: Event, body: dict[str, Any], seen: _Seen) -> None:
        agent = event.chain
        if event.kind == "started":
            seen.depth = max(seen.depth, body.get("depth") or 0)
            seen.untrusted = bool(body.get("tainted"))
            seen.system_prompt = body.get("system_prompt") or ""
            seen.writable = tuple((body.get("rights") or {}).get("write_paths") or ())
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
        words = _words(text)
        if not words:
            self._flag("empty_task", event.chain, event.index, "the task has no text")
            return
        agent, index = self._tasks.setdefault((seen.system_prompt, words), (event.chain, event.index))
        if index != event.index:
            detail = f"the same task as {agent!r} had at event {index}: {text[:200]}"
            self._flag("duplicate_task", event.chain, event.index, detail)

    def _reply(self, event: Event, body: dict[str, Any], seen: _Seen) -> None:
        message = body.get("message") or {}
        is_answer = True
        for index, call in enumerate(message.get("tool_calls") or ()):
            function = call.get("function") or {}
            name, arguments = function.get("name") or "", function.get("arguments") or ""
            is_answer &= name == ANSWERING
            seen.asked[f"{event.chain}#{body.get('step')}.{index}"] = event.index
            self._call(event, f"{body.get('step')}.{index}", name, arguments, seen)
        content = message.get("content")
        if is_answer and isinstance(content, str) and (claim := unsupported(content, seen.done)):
            calls = f"only {', '.join(sorted(seen.done))}" if seen.done else "no call"
            detail = f"the answer says {claim!r}, and {calls} succeeded before it"
            self._flag("claim_without_call", event.chain, event.index, detail)

    def _call(self, event: Event, call: str, name: str, arguments: str, seen: _Seen) -> None:
        """What the arguments of a call tell, before anything came of it."""
        if name in SPAWNING and seen.depth > 0:
            self._flag("spawn_by_subagent", event.chain, event.index, f"{name} at depth {seen.depth}", call)
        given = given_of(arguments)
        if name in ("assign_task", "start_task") and given and not _words(str(given.get("prompt") or "")):
            self._blank[f"{event.chain}#{call}"] = event.index
        uses = file_uses(name, arguments)
        outside = [use.path for use in uses if use.writes and use.is_outside(seen.writable)]
        if outside:
            detail = f"{name} would write {', '.join(map(repr, outside[:3]))}"
            self._flag("write_outside", event.chain, event.index, detail, call)
        texts = _texts(given) if given else [("command", arguments)]
        named = next((found for key, text in texts if (found := _sensitive(key, text))), None)
        for use in uses:
            kind = self.patterns.kind_of(use)
            if kind in SECRET_KINDS:
                named = named or use.path
            elif kind is not None:
                detail = f"{name} {'would change' if use.writes else 'names'} {use.path!r} ({kind})"
                self._flag("protected_access", event.chain, event.index, detail, call)
                break
        if named is not None:
            self._flag("sensitive_argument", event.chain, event.index, f"{name} names {named!r}", call)

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
            asked = seen.asked.pop(event.chain, event.index)
            seen.begun.pop(event.chain, None)
            joined = body["joined"] if "joined" in body else self._started_by(agent, call)
            self._joined.update(joined)
            self._outcomes[event.chain] = body.get("status") or "unknown"
            if (blank := self._blank.pop(event.chain, None)) is not None and not (body.get("spawned") or joined):
                self._flag("empty_task", agent, blank, f"{body.get('tool')} without a prompt started nobody", call)
            seen.untrusted |= bool(body.get("untrusted"))
            status, detail = body.get("status"), f"call {call} of {body.get('tool')!r}"
            if status == "ok":
                seen.done |= {body.get("tool") or ""} - LEADING
                seen.done.update(*(self._agents[each].done for each in joined if each in self._agents))
            elif status == "error" and REFUSED_PATH.search(body.get("text") or ""):
                self._refused_path(agent, asked, call, body)
            elif status == "denied":
                self._flag("denied_call", agent, event.index, f"{detail}: {(body.get('text') or '')[:200]}")
            elif status == "unknown":
                self._flag("unknown_outcome", agent, event.index, f"{detail} was under way when the runtime stopped")

    def _started_by(self, agent: str, call: str) -> list[str]:
        """Agents that a call created: what was read, where the journal does not say."""
        return [each for each in self._agents if each.rpartition("/")[0] == agent and each.endswith(f"-{call}")]

    def _refused_path(self, agent: str, index: int, call: str, body: dict[str, Any]) -> None:
        """A name that only the file system knew to lead out: through a link."""
        if not {"write", "edit"}.isdisjoint(words_of(body.get("tool") or "")) and not any(
            each.flag == "write_outside" and each.agent == agent and each.call == call for each in self.found
        ):
            self._flag("write_outside", agent, index, f"{body['tool']}: {body['text'][:200]}", call)


def _words(text: str) -> str:
    """A task as it is compared: case, spaces, signs that nobody sees and a full stop at the end say nothing."""
    seen = (" " if each.isspace() else each for each in unicodedata.normalize("NFKC", text).casefold())
    shown = "".join(each for each in seen if unicodedata.category(each) not in ("Cf", "Cc"))
    return " ".join(shown.split()).rstrip(".").rstrip()


def _texts(value: Any) -> Iterator[tuple[str, str]]:
    """All texts of arguments with the names of their fields, and those names, as they were meant: without escapes."""
    waiting = [("", value)]
    while waiting:
        name, each = waiting.pop()
        if isinstance(each, str):
            yield name, each
        elif isinstance(each, dict):
            for key, inside in each.items():
                waiting += [("", key), (key.lower(), inside)]
        elif isinstance(each, list):
            waiting += [(name, inside) for inside in each]


def _sensitive(name: str, text: str) -> str | None:
    """What the text of a field names that is secret."""
    is_talk = name not in WORKING_KEYS and (name in TALKING_KEYS or re.search(r"\s", text) is not None)
    found = SENSITIVE.search(text) or (None if is_talk else SENSITIVE_WORDS.search(text))
    return found.group() if found else None


def summarize(source: Source, patterns: Patterns | None = None) -> dict[str, Any]:
    """Counts and flags of a journal, as plain values."""
    flags, events = Flags(patterns), 0
    for event in source.events():
        flags.apply(event)
        events += 1
    found = flags.finish()
    return {
        "events": events,
        "agents": flags.agents,
        "kinds": dict(sorted(flags.kinds.items())),
        "flag_counts": dict(sorted(Counter(flag.flag for flag in found).items())),
        "flags": [flag.plain() for flag in found],
    }


def audit_lines(
    source: Source,
    report: Report,
    *,
    contents: bool = False,
    patterns: Patterns | None = None,
    summary: dict[str, Any] | None = None,
) -> Iterator[bytes]:
    """The whole export. Reads the journal twice, or once where its `summary` is known: flags come before events."""
    summary = summarize(source, patterns) if summary is None else summary
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


__all__ = ["SERIOUS", "Flag", "Flags", "audit_lines", "summarize"]
