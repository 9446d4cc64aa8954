"""What a person may do to a running swarm, and what the swarm may ask a person.

The view knows the swarm only through `Controls`. Its methods are called on the swarm's event loop, never on the view's
thread; each may be a plain function or a coroutine. What it raises (no such agent, already decided) is shown to the
person who gave the command.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any, Literal, Protocol

from perilune.swarm.approvals import ApprovalRequest

Decision = Literal["allow", "deny"]


def plain(request: ApprovalRequest) -> dict[str, Any]:
    """A call that waits for a person. What is shown is what runs: the decision names the arguments' hash."""
    return {
        "id": request.id,
        "agent": request.agent,
        "call": request.call,
        "tool": request.tool,
        "arguments": request.arguments,
        "arguments_sha256": request.arguments_sha256,
        "reason": request.reason,
    }


class Controls(Protocol):
    def cancel(self, agent: str) -> Awaitable[None] | None:
        """Stop an agent and everything below it."""
        ...

    def steer(self, agent: str, text: str) -> Awaitable[None] | None:
        """Put a person's message before the agent's next step."""
        ...

    def decide(self, request_id: str, decision: Decision) -> Awaitable[None] | None:
        """Answer an approval request."""
        ...


class Approvals:
    """Requests that wait for a person. Filled on the swarm's thread (`ApprovalDesk.on_change = approvals.show`), read
    on the view's."""

    def __init__(self) -> None:
        self._waiting: dict[str, ApprovalRequest] = {}

    def show(self, waiting: Sequence[ApprovalRequest]) -> None:
        """All that wait now."""
        self._waiting = {request.id: request for request in waiting}

    def add(self, request: ApprovalRequest) -> None:
        self._waiting = {**self._waiting, request.id: request}

    def remove(self, id: str) -> None:
        """Decided, or nobody needs it any more."""
        self._waiting = {other: request for other, request in self._waiting.items() if other != id}

    def get(self, id: str) -> ApprovalRequest | None:
        return self._waiting.get(id)

    def waiting(self) -> tuple[ApprovalRequest, ...]:
        return tuple(self._waiting.values())


__all__ = ["ApprovalRequest", "Approvals", "Controls", "Decision", "plain"]
