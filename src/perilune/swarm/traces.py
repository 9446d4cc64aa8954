"""Token-exact traces for reinforcement learning: what the engine was given and what it sampled, never re-tokenized.

A reply whose endpoint told its tokens has them as an artefact: `prompt_token_ids`, `token_ids`, `logprobs`. An agent's
turns are joined while each prompt begins with all tokens before it:

    prompt(n+1) = prompt(n) + completion(n) + what was added since      (tool results, messages)

The mask is 1 for tokens that the agent itself sampled in this trace and 0 for all others. Where a prompt does not
continue the one before (a fresh task, a compacted context, a template that drops old reasoning), a new branch begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from perilune.swarm.journal.event import Event


class Source(Protocol):
    """A journal for reading (`SQLiteReader`, `PostgresReader`)."""

    def events(self, chain: str | None = None, *, after: int = -1) -> Iterable[Event]: ...

    def get(self, sha256: str, start: int = 0, end: int | None = None) -> bytes: ...


class TraceError(ValueError):
    """Served tokens that do not fit together."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One reply inside a trace: it sampled the tokens from `start` to before `end`."""

    step: int
    start: int
    end: int
    finish: str
    weight_version: str | None


@dataclass(kw_only=True)
class Trace:
    agent: str
    branch: int
    model: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """0 where the mask is 0; not a number where the endpoint told none."""
    mask: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    """Steps of the agent just before or within this branch whose tokens the endpoint did not tell."""
    status: str | None = None
    """How the agent ended; None while it works."""

    def plain(self) -> dict[str, Any]:
        return {
            "agent": self.agent,
            "branch": self.branch,
            "model": self.model,
            "status": self.status,
            "token_ids": self.token_ids,
            "logprobs": self.logprobs,
            "mask": self.mask,
            "turns": [
                {
                    "step": turn.step,
                    "start": turn.start,
                    "end": turn.end,
                    "finish": turn.finish,
                    "weight_version": turn.weight_version,
                }
                for turn in self.turns
            ],
            "missing": self.missing,
        }


def traces(source: Source, agents: Iterable[str] | None = None) -> Iterator[Trace]:
    """The traces of all agents of a run (or of those named), agent by agent, branch by branch."""
    if agents is None:
        agents = list(dict.fromkeys(event.chain for event in source.events() if event.kind == "started"))
    for agent in agents:
        yield from trace_agent(source, agent)


def trace_agent(source: Source, agent: str) -> list[Trace]:
    model, status = "", None
    found: list[Trace] = []
    missing: list[int] = []
    for event in source.events(agent):
        if event.kind == "started":
            model = event.read().get("model") or ""
        elif event.kind == "finished":
            status = event.read().get("status")
        elif event.kind == "reply":
            body = event.read()
            served = _served(source, agent, body)
            if served is None:
                missing.append(body["step"])
                continue
            prompt, tokens, logprobs = served
            trace = found[-1] if found and _continues(prompt, found[-1].token_ids) else None
            if trace is None:
                trace = Trace(agent=agent, branch=len(found), model=model)
                found.append(trace)
            trace.missing += missing
            missing = []
            _extend(trace, prompt[len(trace.token_ids) :], tokens, logprobs, body, event.read_note())
    if found:
        found[-1].missing += missing
    for trace in found:
        trace.status = status
    return found


def _served(source: Source, agent: str, body: dict[str, Any]) -> tuple[list[int], list[int], list[float]] | None:
    if not body.get("tokens"):
        return None
    served = orjson.loads(source.get(body["tokens"]["sha256"]))
    prompt, tokens, logprobs = (served.get(name) for name in ("prompt_token_ids", "token_ids", "logprobs"))
    if prompt is None or tokens is None:
        return None
    if logprobs is None:
        logprobs = [float("nan")] * len(tokens)
    if len(logprobs) != len(tokens):
        raise TraceError(
            f"agent {agent!r}, step {body.get('step')}: {len(tokens)} tokens but {len(logprobs)} log-probabilities"
        )
    return prompt, tokens, [float("nan") if value is None else value for value in logprobs]


def _continues(prompt: list[int], before: list[int]) -> bool:
    return prompt[: len(before)] == before


def _extend(
    trace: Trace, added: list[int], tokens: list[int], logprobs: list[float], body: dict[str, Any], note: dict[str, Any]
) -> None:
    trace.token_ids += added
    trace.logprobs += [0.0] * len(added)
    trace.mask += [0] * len(added)
    start = len(trace.token_ids)
    trace.token_ids += tokens
    trace.logprobs += logprobs
    trace.mask += [1] * len(tokens)
    trace.turns.append(
        Turn(
            step=body["step"],
            start=start,
            end=len(trace.token_ids),
            finish=body.get("finish") or "",
            weight_version=note.get("weight_version"),
        )
    )


def trace_lines(source: Source, agents: Iterable[str] | None = None) -> Iterator[bytes]:
    """JSON lines, one trace each."""
    for trace in traces(source, agents):
        yield orjson.dumps(trace.plain(), option=orjson.OPT_APPEND_NEWLINE)


__all__ = ["Source", "Trace", "TraceError", "Turn", "trace_agent", "trace_lines", "traces"]
