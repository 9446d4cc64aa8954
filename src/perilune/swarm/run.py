"""What all agents of one run share, and what they ask of it: which tools are mine, where do I work, is this allowed."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from perilune.swarm.approvals import ApprovalDesk
from perilune.swarm.budget import Prices
from perilune.swarm.chronicle import Chronicle
from perilune.swarm.client import ModelClient
from perilune.swarm.policy import Policy
from perilune.swarm.results import Results
from perilune.swarm.rights import Rights
from perilune.swarm.scheduler import Scheduler
from perilune.swarm.secrets import Secrets
from perilune.swarm.settings import SwarmConfig
from perilune.swarm.tools.tool import Tool, ToolContext

SPAWNING = frozenset(
    {"create_subagent", "assign_task", "start_task", "map_task", "reduce_task", "wait", "cancel", "list_agents"}
)
"""Tools for agents that may create others."""

if TYPE_CHECKING:
    from perilune.swarm.agent import Agent, Answer, Letter
    from perilune.swarm.sandbox import Sandbox


class Engine(Protocol):
    """Where sub-agents run, when not on this event loop."""

    async def perform(self, agent: Agent, tasks: Sequence[str], *, many: bool) -> list[Answer]:
        """`agent.work` for this agent, somewhere; cancelling it ends it there."""
        ...

    def deliver(self, agent: Agent, letter: Letter) -> bool:
        """Whether the agent runs somewhere else, where the letter is sent."""
        ...


@dataclass(kw_only=True)
class Run:
    config: SwarmConfig
    client: ModelClient
    chronicle: Chronicle
    results: Results
    scheduler: Scheduler
    tools: Mapping[str, Tool]
    policy: Policy
    desk: ApprovalDesk
    secrets: Secrets
    prices: Prices
    folder: Path
    open_sandbox: Callable[[Path], Sandbox] | None = None
    own_folders: bool = True
    """Every agent works in a folder of its own; False: all in the run's, where no tool writes anything."""
    extras: dict[str, Any] = field(default_factory=dict)
    engine: Engine | None = None
    agents: dict[str, Agent] = field(default_factory=dict)
    is_stopping: bool = False
    """The process ends, the run does not: agents leave without a last event."""
    letters: dict[str, list[Letter]] = field(default_factory=dict)
    """What a person wrote to agents that a resumed run has not created yet."""
    cancelled: set[str] = field(default_factory=set)
    """Agents that a person ended in an earlier life of the run."""
    _places: dict[str, tuple[Path, Sandbox | None]] = field(default_factory=dict)

    def add(self, agent: Agent) -> None:
        """A new agent finds what a person wrote to it in an earlier life of the run."""
        self.agents[agent.id] = agent
        agent.inbox.extend(self.letters.pop(agent.id, ()))

    async def perform(self, agent: Agent, tasks: Sequence[str], *, many: bool) -> list[Answer]:
        """All tasks of an agent: here, or where the engine runs agents."""
        from perilune.swarm.agent import work

        if self.engine is None:
            return await work(self, agent, tasks, many=many)
        return await self.engine.perform(agent, tasks, many=many)

    def deliver(self, agent: Agent, letter: Letter) -> None:
        """A message, before the agent's next step."""
        if self.engine is None or not self.engine.deliver(agent, letter):
            agent.inbox.append(letter)

    async def catch_up(self, agent: Agent) -> None:
        """Who has no records left waits for those who have. See `chronicle`."""
        records = self.chronicle
        if records.is_caught_up or records.peek(agent.id) is not None or self.engine is not None or agent.job is None:
            return
        async with self.scheduler.resting(agent.job):
            await records.caught_up()

    def tools_for(self, rights: Rights) -> dict[str, Tool]:
        """Those that exist and that it may use; an agent that may create nobody has no tools for it."""
        return {
            name: each
            for name, each in self.tools.items()
            if rights.allows_tool(name, each.effects) and (rights.depth or name not in SPAWNING)
        }

    def tool_context(self, agent: Agent, index: int, limit: int) -> ToolContext:
        workspace, sandbox = self.place_of(agent)
        return ToolContext(
            agent=agent.id,
            step=agent.step,
            index=index,
            workspace=workspace,
            limit=limit,
            sandbox=sandbox,
            journal=self.chronicle.journal,
            extras={**self.extras, "run": self, "agent": agent, "rights": agent.rights},
        )

    async def allows(self, agent: Agent, tool: Tool, arguments: Mapping[str, Any], call: str) -> str | None:
        """None when the call may run, else why not. A person may be asked: the agent rests meanwhile."""
        ruling = self.policy.decide(tool.name, tool.effects, arguments, taint=agent.taint)
        if ruling.decision == "allow":
            return None
        if ruling.decision == "deny" or agent.job is None:
            return f"{tool.name} is not allowed: {ruling.reason}"
        async with self.scheduler.resting(agent.job):
            verdict = await self.desk.ask(
                agent=agent.id, call=call, tool=tool.name, arguments=arguments, reason=ruling.reason
            )
        if not verdict.is_recorded:
            await self.chronicle.append("run", "approval", verdict.record())
        if verdict.covers(agent.id, call, tool.name, arguments):
            return None
        why = f" ({verdict.reason})" if verdict.reason else ""
        return f"{tool.name} needs approval and was refused by {verdict.by}{why}: {ruling.reason}"

    def place_of(self, agent: Agent) -> tuple[Path, Sandbox | None]:
        """The agent's own folder and the sandbox around it, made at its first call."""
        place = self._places.get(agent.id)
        if place is None:
            workspace = self.folder
            if self.own_folders:
                workspace = self.folder / "workspaces" / folder_name(agent.id)
                workspace.mkdir(parents=True, exist_ok=True)
            place = workspace, self.open_sandbox(workspace) if self.open_sandbox else None
            self._places[agent.id] = place
        return place

    async def close_places(self) -> None:
        for _, sandbox in self._places.values():
            if sandbox is not None:
                await sandbox.close()
        self._places.clear()


def folder_name(agent: str) -> str:
    """An agent's id as the name of a folder. Ids of deep agents are longer than a name may be: their end is hashed."""
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", agent)
    if len(plain) <= 200:
        return plain
    return f"{plain[:160]}-{hashlib.sha256(agent.encode()).hexdigest()[:32]}"
