"""Agent swarms: an orchestrator that creates sub-agents which work in parallel, against any OpenAI-compatible endpoint.

    from perilune.swarm import Swarm, tool

    @tool(effects="none")
    def word_count(text: str) -> str:
        "Count the words of a text."
        return str(len(text.split()))

    result = await Swarm(model="...", base_url="...", tools=[word_count]).run("...", folder="runs/swarm/first")

Names are imported when they are first used: a part of the package alone starts quickly.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perilune.swarm.budget import Limits
    from perilune.swarm.policy import Policy, Rule
    from perilune.swarm.settings import AgentSpec, SwarmConfig
    from perilune.swarm.swarm import Swarm, SwarmError, SwarmResult
    from perilune.swarm.tools.tool import Tool, ToolContext, ToolError, ToolResult, tool

_HOME = {
    "AgentSpec": "settings",
    "Limits": "budget",
    "Policy": "policy",
    "Rule": "policy",
    "Swarm": "swarm",
    "SwarmConfig": "settings",
    "SwarmError": "swarm",
    "SwarmResult": "swarm",
    "Tool": "tools.tool",
    "ToolContext": "tools.tool",
    "ToolError": "tools.tool",
    "ToolResult": "tools.tool",
    "tool": "tools.tool",
}

__all__ = [
    "AgentSpec",
    "Limits",
    "Policy",
    "Rule",
    "Swarm",
    "SwarmConfig",
    "SwarmError",
    "SwarmResult",
    "Tool",
    "ToolContext",
    "ToolError",
    "ToolResult",
    "tool",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
