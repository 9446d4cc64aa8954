"""What a swarm and its agents are made with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from perilune.swarm.budget import Limits


@dataclass(frozen=True, kw_only=True)
class AgentSpec:
    """A kind of agent: what `create_subagent` registers and every task for it starts from."""

    name: str
    system_prompt: str
    model: str | None = None
    """None: the model of the swarm."""
    tools: tuple[str, ...] | None = None
    """None: all that its parent has."""
    limits: Limits = field(default_factory=Limits)
    output_schema: Mapping[str, Any] | None = None
    """JSON schema that its answer must follow."""

    @property
    def slug(self) -> str:
        """The name as part of an agent's id: letters, digits, '-' and '_'."""
        return re.sub(r"[^A-Za-z0-9_]+", "-", self.name).strip("-")[:40] or "agent"


@dataclass(frozen=True, kw_only=True)
class SwarmConfig:
    model: str
    models: tuple[str, ...] = ()
    """More models that sub-agents may be given."""
    system_prompt: str = field(default_factory=lambda: prompt("orchestrator"))
    max_tokens: int = 16_384
    """Of one reply."""
    temperature: float | None = None
    seed: int | None = 0
    context_tokens: int = 128_000
    """Window of the model. A prompt is kept below three bytes for each of them."""
    limits: Limits = field(default_factory=lambda: Limits(steps=10_000, agents=1000))
    """Of the whole run."""
    main_steps: int | None = 100
    subagent_steps: int | None = 100
    """Steps of one sub-agent, unless it was created with a budget of its own."""
    max_depth: int = 1
    """How deep sub-agents may create sub-agents: 1 means that only the orchestrator does."""
    max_active: int = 300
    """Agents at work at a time; more of them queue."""
    tool_seconds: float = 120.0
    """Longest time of one call of a tool, waiting for agents apart."""
    turn_share: float = 0.25
    """Share of the context that the results of one turn may take together."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "context_tokens", "max_active"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected 1 or more")
        if not 0 < self.turn_share <= 1:
            raise ValueError(f"turn_share is {self.turn_share!r}, expected a share of the context between 0 and 1")
        if self.max_depth < 0:
            raise ValueError(f"max_depth is {self.max_depth!r}, expected 0 or more")

    @property
    def context_bytes(self) -> int:
        return 3 * self.context_tokens

    @property
    def turn_bytes(self) -> int:
        return int(self.turn_share * self.context_bytes)


@cache
def prompt(name: str) -> str:
    """A prompt that ships with the package: prompts/NAME.md."""
    return (resources.files("perilune.swarm") / "prompts" / f"{name}.md").read_text(encoding="utf-8").strip()
