"""The same audit for episodes of reinforcement learning, whose journals are kept with their trajectories.

    {"chain": "main", "kind": "reply", "body": {...}, "at": 12.5}

An episode keeps less than a run on disk: no depth, no rights, no list of results that were read. Depth follows from an
agent's name and what was read from the call that created an agent. The end of an episode ends everybody in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from perilune.swarm.audit import Flag, Flags
from perilune.swarm.audit_patterns import Patterns
from perilune.swarm.journal.event import Event

Episode = tuple[str, Sequence[Mapping[str, Any]]]
"""Its name, and its events."""


def events_of(noted: Iterable[Mapping[str, Any]]) -> list[Event]:
    """Noted events as those of a journal; they have no hashes of their own."""
    found, counts = [], Counter[str]()
    for index, each in enumerate(noted):
        chain = str(each["chain"])
        body, at = orjson.dumps(each.get("body") or {}), float(each.get("at") or 0.0) / 1000
        found.append(Event(index, chain, counts[chain], str(each["kind"]), body, b"{}", at, b""))
        counts[chain] += 1
    return found


def episode_flags(noted: Iterable[Mapping[str, Any]], patterns: Patterns | None = None) -> tuple[list[Flag], Flags]:
    flags = Flags(patterns)
    for event in events_of(noted):
        flags.apply(event)
    return flags.finish(), flags


def summarize_episodes(
    episodes: Iterable[Episode], patterns: Patterns | None = None, problems: list[str] | None = None
) -> dict[str, Any]:
    """Counts and flags over all episodes; a flag names its episode. Those whose events are none go to `problems`."""
    kinds, found = Counter[str](), list[dict[str, Any]]()
    agents = events = count = 0
    for name, noted in episodes:
        try:
            raised, flags = episode_flags(noted, patterns)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            if problems is None:
                raise
            problems.append(f"{name}: its events are not those of an episode ({type(error).__name__}: {error})")
            continue
        kinds += flags.kinds
        agents += flags.agents
        events += flags.kinds.total()
        count += 1
        found += [{"episode": name, **flag.plain()} for flag in raised]
    return {
        "episodes": count,
        "events": events,
        "agents": agents,
        "kinds": dict(sorted(kinds.items())),
        "flag_counts": dict(sorted(Counter(flag["flag"] for flag in found).items())),
        "flags": found,
    }


__all__ = ["Episode", "episode_flags", "events_of", "summarize_episodes"]
