"""Approvals: calls that wait for a person, and what the person said.

A request is bound to one agent, one tool and the exact arguments: what was shown is what runs. An approval is used up
by the call it was given for; the same call again asks again, unless the person approved these arguments for the whole
run.

    nobody attached              refused at once
    last one leaves              refused
    no decision in time          refused
    a callback fails             refused

Each verdict tells what the journal must hold (`record`) before the call runs. `restore` takes it back from there, so
that a resumed run does not ask again for a call that was decided before it died.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import itertools
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from perilune.swarm.journal.event import canonical

Scope = Literal["call", "run"]
NOBODY = "nobody"


class ApprovalError(ValueError):
    """A decision that cannot be taken, in words for the person who took it."""


@dataclass(frozen=True, kw_only=True)
class ApprovalRequest:
    id: str
    agent: str
    call: str
    """`STEP.INDEX` of the agent, as in the journal."""
    tool: str
    arguments: str
    """Canonical JSON of exactly what the tool will get."""
    reason: str = ""

    @cached_property
    def arguments_sha256(self) -> str:
        return hashlib.sha256(self.arguments.encode()).hexdigest()

    @cached_property
    def binding(self) -> str:
        return binding(self.agent, self.tool, self.arguments_sha256)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    request: ApprovalRequest
    is_allowed: bool
    by: str
    reason: str = ""
    scope: Scope = "call"
    is_recorded: bool = False
    """It came from the journal."""

    def record(self) -> dict[str, Any]:
        """Body of the `approval` event."""
        return {
            "agent": self.request.agent,
            "call": self.request.call,
            "tool": self.request.tool,
            "arguments_sha256": self.request.arguments_sha256,
            "decision": "allow" if self.is_allowed else "deny",
            "by": self.by,
            "scope": self.scope,
            "reason": self.reason,
        }

    def covers(self, agent: str, call: str, tool: str, arguments: Mapping[str, Any]) -> bool:
        """Whether it allows this very call."""
        asked = self.request
        return (
            self.is_allowed
            and (agent, call, tool) == (asked.agent, asked.call, asked.tool)
            and canonical(arguments).decode() == asked.arguments
        )


Callback = Callable[[ApprovalRequest], bool | Awaitable[bool | None] | None]
"""True allows, False denies, None leaves it to others."""


@dataclass(eq=False)
class _Watcher:
    name: str
    callback: Callback | None


@dataclass(eq=False)
class _Waiting:
    request: ApprovalRequest
    verdict: asyncio.Future[Verdict]
    undecided: set[_Watcher]
    """Who may still decide."""


class ApprovalDesk:
    """For one event loop."""

    def __init__(
        self,
        *,
        seconds: float | None = 600.0,
        on_change: Callable[[tuple[ApprovalRequest, ...]], None] | None = None,
    ) -> None:
        self.seconds = seconds
        self.on_change = on_change
        """Called with all that waits whenever that changes."""
        self._watchers: list[_Watcher] = []
        self._waiting: dict[str, _Waiting] = {}
        self._granted: dict[str, str] = {}
        self._decided: dict[tuple[str, str], tuple[bool, str, str]] = {}
        self._numbers = itertools.count(1)

    # The one who asks ------------------------------------------------------------------------------------------------

    async def ask(self, *, agent: str, call: str, tool: str, arguments: Mapping[str, Any], reason: str = "") -> Verdict:
        """Wait for a decision; any way out but an explicit approval is a refusal."""
        text = canonical(arguments).decode()
        request = ApprovalRequest(id="", agent=agent, call=call, tool=tool, arguments=text, reason=reason)
        request = replace(request, id=f"{request.binding[:12]}-{next(self._numbers)}")
        if (before := self._decided.pop((f"{agent}#{call}", request.binding), None)) is not None:
            is_allowed, by, why = before
            return Verdict(request=request, is_allowed=is_allowed, by=by, reason=why, is_recorded=True)
        if (by := self._granted.get(request.binding)) is not None:
            return Verdict(request=request, is_allowed=True, by=by, scope="run")
        if not self._watchers:
            return _refusal(request, "nobody is there to approve it")
        return await self._wait(request)

    async def _wait(self, request: ApprovalRequest) -> Verdict:
        future: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        waiting = _Waiting(request, future, set(self._watchers))
        self._waiting[request.id] = waiting
        callbacks = [asyncio.create_task(self._call(waiting, each)) for each in self._watchers if each.callback]
        self._changed()
        try:
            async with asyncio.timeout(self.seconds):
                return await future
        except TimeoutError:
            return _refusal(request, f"nobody decided within {self.seconds:g} seconds")
        finally:
            del self._waiting[request.id]
            for each in callbacks:
                each.cancel()
            self._changed()

    async def _call(self, waiting: _Waiting, watcher: _Watcher) -> None:
        assert watcher.callback is not None
        try:
            answer = watcher.callback(waiting.request)
            if inspect.isawaitable(answer):
                answer = await answer
        except Exception as error:
            self._settle(waiting, _refusal(waiting.request, f"{watcher.name} failed: {type(error).__name__}: {error}"))
            return
        if answer is None:
            self._leave_it(waiting, watcher)
        else:
            allowed = answer is True
            self._settle(waiting, Verdict(request=waiting.request, is_allowed=allowed, by=watcher.name))

    # Those who decide ------------------------------------------------------------------------------------------------

    def attach(self, name: str, callback: Callback | None = None) -> Callable[[], None]:
        """Someone is there to decide: a person at a terminal or a page, or a callback. Returns how to leave."""
        watcher = _Watcher(name, callback)
        self._watchers.append(watcher)
        for waiting in self._waiting.values():
            if callback is None:
                waiting.undecided.add(watcher)

        def detach() -> None:
            if watcher in self._watchers:
                self._watchers.remove(watcher)
            for waiting in list(self._waiting.values()):
                self._leave_it(waiting, watcher)

        return detach

    def pending(self) -> tuple[ApprovalRequest, ...]:
        """What waits for a decision, oldest first."""
        return tuple(each.request for each in self._waiting.values() if not each.verdict.done())

    def approve(self, request_id: str, *, by: str, seen: str, scope: Scope = "call") -> Verdict:
        """`seen` is the `arguments_sha256` of what the person was shown. `scope` "run": every call of this agent with
        this tool and exactly these arguments."""
        waiting = self._find(request_id)
        if seen != waiting.request.arguments_sha256:
            raise ApprovalError(f"request {request_id!r} has other arguments than those shown: look at it again")
        verdict = Verdict(request=waiting.request, is_allowed=True, by=by, scope=scope)
        if scope == "run":
            self._granted[waiting.request.binding] = by
        return self._settle(waiting, verdict)

    def deny(self, request_id: str, *, by: str, reason: str = "") -> Verdict:
        waiting = self._find(request_id)
        return self._settle(waiting, Verdict(request=waiting.request, is_allowed=False, by=by, reason=reason))

    def restore(self, body: Mapping[str, Any]) -> None:
        """Take back a verdict from the journal."""
        key = binding(body["agent"], body["tool"], body["arguments_sha256"])
        is_allowed = body["decision"] == "allow"
        if is_allowed and body.get("scope") == "run":
            self._granted[key] = body["by"]
        self._decided[f"{body['agent']}#{body['call']}", key] = (is_allowed, body["by"], body.get("reason", ""))

    def _find(self, request_id: str) -> _Waiting:
        waiting = self._waiting.get(request_id)
        if waiting is None or waiting.verdict.done():
            raise ApprovalError(f"no request {request_id!r} waits: it is decided, or its agent has ended")
        return waiting

    def _settle(self, waiting: _Waiting, verdict: Verdict) -> Verdict:
        """The first decision counts."""
        if not waiting.verdict.done():
            waiting.verdict.set_result(verdict)
        return verdict

    def _leave_it(self, waiting: _Waiting, watcher: _Watcher) -> None:
        waiting.undecided.discard(watcher)
        if not waiting.undecided:
            self._settle(waiting, _refusal(waiting.request, "nobody is left to approve it"))

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change(self.pending())


def binding(agent: str, tool: str, arguments_sha256: str) -> str:
    """What an approval is bound to."""
    bound = {"agent": agent, "tool": tool, "arguments_sha256": arguments_sha256}
    return hashlib.sha256(canonical(bound)).hexdigest()


def _refusal(request: ApprovalRequest, reason: str) -> Verdict:
    return Verdict(request=request, is_allowed=False, by=NOBODY, reason=reason)


__all__ = ["ApprovalDesk", "ApprovalError", "ApprovalRequest", "Verdict"]
