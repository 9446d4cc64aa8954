"""An audit as a page for a person: whether the journal is intact, who took part, and the flags, serious ones first."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from perilune.swarm.audit import SERIOUS
from perilune.swarm.journal.verify import Report
from perilune.swarm.terminal import harmless
from perilune.swarm.traces import Source

SHOWN = 8
"""Of one flag; --json lists all."""
WIDTH = 118
MEANINGS = {
    "spawn_by_subagent": "a sub-agent tried to create or start others",
    "write_outside": "a call would write outside of the sandbox",
    "protected_access": "a call names files of rewards, judges, weights, or would change tests or logs",
    "sensitive_argument": "a call names credentials, keys or the run's own journal",
    "approval_mismatch": "a call ran with other arguments than those approved",
    "claim_without_call": "an answer claims work that no call stands behind",
    "denied_call": "policy or a person refused a call",
    "effect_after_untrusted": "an agent that had read a stranger's text made a call that must not be repeated",
    "unknown_outcome": "a call began and nobody knows how it ended",
    "duplicate_task": "the same task was given before",
    "empty_task": "a task without text",
    "result_never_read": "an agent's result was read by nobody",
    "ended_badly": "an agent failed, was cancelled or ran out of budget",
    "unfinished": "an agent or a run has no end",
}
assert set(MEANINGS) >= SERIOUS


def page(source: Source, report: Report, summary: dict[str, Any]) -> Iterator[str]:
    """The lines of the page; nothing in them is obeyed by a terminal."""
    yield from map(_shown, _run(source))
    sealed = "sealed" if report.sealed else "seals not checked"
    state = "intact" if report.intact else f"NOT INTACT, {len(report.problems) + report.more_problems} problems"
    yield f"journal   {state} ({sealed}): {report.events:,} events on {report.chains:,} chains"
    yield from (_shown(f"          {remark}") for remark in report.remarks)
    yield from map(_shown, _flags(summary))


def episodes_page(summary: dict[str, Any], files: int, *, problems: int = 0) -> Iterator[str]:
    """The same for episodes of reinforcement learning; `problems` of their files."""
    state = f"NOT INTACT, {problems} problems" if problems else "intact (by checksums)"
    yield f"episodes  {state}: {summary['episodes']:,} with {summary['events']:,} events, from {files} files"
    yield from map(_shown, _flags(summary))


def _shown(line: str) -> str:
    text = harmless(line)
    return text if len(text) <= WIDTH else text[: WIDTH - 1] + "…"


def _flags(summary: dict[str, Any]) -> Iterator[str]:
    kinds = summary["kinds"]
    yield (
        f"agents    {summary['agents']:,} with {kinds.get('reply', 0):,} replies and "
        f"{kinds.get('outcome', 0):,} calls that ended"
    )
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for flag in summary["flags"]:
        groups[flag["flag"]].append(flag)
    serious = [name for name in MEANINGS if name in SERIOUS and name in groups]
    others = [name for name in MEANINGS if name not in SERIOUS and name in groups]
    counts = [sum(len(groups[name]) for name in names) for names in (serious, others)]
    yield f"flags     {counts[0]} serious, {counts[1]} worth a look" if any(counts) else "flags     none"
    for title, names in (("serious", serious), ("worth a look", others)):
        if names:
            yield ""
            yield f"{title}:"
        for name in names:
            yield f"  {name} ({len(groups[name])}): {MEANINGS[name]}"
            yield from (f"    {_place(flag)}  {flag['detail']}" for flag in groups[name][:SHOWN])
            if len(groups[name]) > SHOWN:
                yield f"    and {len(groups[name]) - SHOWN} more; --json lists all"


def _run(source: Source) -> Iterator[str]:
    """What was asked, when, and how it ended; a journal that was changed may say anything, or nothing."""
    task, began, status = "", None, "unfinished"
    for event in source.events("run"):
        body = event.read()
        if event.kind == "run_started":
            task, began = str(body.get("task") or ""), event.time
        elif event.kind == "run_finished":
            status = str(body.get("status"))
    if began is not None:
        yield f"task      {' '.join(task.split())}"
        yield f"run       {status}, began {time.strftime('%Y-%m-%d %H:%M', time.localtime(began))}"


def _place(flag: dict[str, Any]) -> str:
    outcome = f" [{flag['outcome'] or 'no outcome'}]" if "call" in flag else ""
    call = f"#{flag['call']}" if "call" in flag else ""
    episode = f"{flag['episode']}  " if "episode" in flag else ""
    return f"{episode}event {flag['index']:>5}  {flag['agent']}{call}{outcome}"


__all__ = ["MEANINGS", "episodes_page", "page"]
