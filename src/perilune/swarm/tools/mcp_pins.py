"""What MCP servers said about their tools when a person first used them, kept in a file and compared ever after.

A server describes its own tools, and an agent believes descriptions. So the description and the parameters of each tool
are pinned by hash at first use. A server that later says something else, or has a new tool, has that tool withdrawn
until a person has seen the difference and approved it:

    pins = Pins.load(path)
    seen = pins.compare("git", tools)        # which tools are as they were, and what changed
    pins.approve("git", "git_log")           # take the new description as the right one
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

Described = dict[str, Any]
"""`{"description", "parameters", "annotations"}` of one tool, as its server wrote them."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    unchanged: frozenset[str]
    withdrawn: Mapping[str, str]
    """Tool -> why, with the difference."""
    first_use: bool = False


def fingerprint(described: Described) -> str:
    return hashlib.sha256(orjson.dumps(described, option=orjson.OPT_SORT_KEYS)).hexdigest()


@dataclass(kw_only=True)
class Pins:
    path: Path | None = None
    """None: kept for this run alone."""
    servers: dict[str, dict[str, Described]] = field(default_factory=dict)
    pending: dict[str, dict[str, Described]] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Pins:
        if not path.exists():
            return cls(path=path)
        try:
            body = orjson.loads(path.read_bytes())
            servers, pending = body["servers"], body["pending"]
            for tools in servers.values():
                for name, pin in tools.items():
                    if fingerprint(pin["described"]) != pin["sha256"]:
                        raise ValueError(f"the hash of tool {name!r} does not fit what is written there")
            return cls(
                path=path,
                servers={
                    server: {name: pin["described"] for name, pin in tools.items()} for server, tools in servers.items()
                },
                pending=pending,
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{str(path)!r} is no file of pinned MCP tools: {error}; move it away to start anew"
            ) from None

    def compare(self, server: str, tools: Mapping[str, Described]) -> Comparison:
        """Compare with the pins; a server never seen before is pinned as it is. What differs is kept as pending."""
        pinned = self.servers.get(server)
        if pinned is None:
            self.servers[server] = dict(tools)
            self._save()
            return Comparison(unchanged=frozenset(tools), withdrawn={}, first_use=True)
        changed = {name: each for name, each in tools.items() if pinned.get(name) != each}
        if changed != self.pending.get(server, {}):
            self.pending[server] = changed
            if not changed:
                del self.pending[server]
            self._save()
        return Comparison(
            unchanged=frozenset(tools) - set(changed),
            withdrawn={name: difference(name, pinned.get(name), each) for name, each in changed.items()},
        )

    def approve(self, server: str, name: str) -> None:
        """Take what the server says now about a tool as the right description of it."""
        try:
            described = self.pending[server].pop(name)
        except KeyError:
            waiting = [f"{server}/{tool}" for server, tools in self.pending.items() for tool in tools]
            raise ValueError(
                f"nothing waits for approval under {f'{server}/{name}'!r}; waiting: {', '.join(waiting) or 'nothing'}"
            ) from None
        if not self.pending[server]:
            del self.pending[server]
        self.servers[server][name] = described
        self._save()

    def _save(self) -> None:
        if self.path is None:
            return
        body = {
            "servers": {
                server: {name: {"sha256": fingerprint(each), "described": each} for name, each in tools.items()}
                for server, tools in self.servers.items()
            },
            "pending": self.pending,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        unfinished.write_bytes(orjson.dumps(body, option=orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2))
        unfinished.replace(self.path)


def difference(name: str, before: Described | None, after: Described) -> str:
    """What a person has to read before approving."""
    if before is None:
        return f"tool {name!r} is new since the server was first used\n" + _pretty(after)
    lines = difflib.unified_diff(
        _pretty(before).splitlines(), _pretty(after).splitlines(), "approved", "now", lineterm="", n=2
    )
    return f"tool {name!r} is described differently than when it was approved\n" + "\n".join(lines)


def _pretty(described: Described) -> str:
    # ASCII: an invisible character must be visible in the difference.
    return json.dumps(described, indent=2, sort_keys=True, ensure_ascii=True)
