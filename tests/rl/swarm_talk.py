"""A talk whose policy and workers say what they were told to, and tools for them to call: for tests of swarms."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from perilune.rl.swarm_episode import SwarmEpisode
from perilune.swarm.tools.tool import Tool, tool

Reply = str | Sequence[tuple[str, Any]]
"""A text, or calls: names with arguments (an object, or a text as it stands)."""


def message_of(reply: Reply) -> dict[str, Any]:
    if isinstance(reply, str):
        return {"role": "assistant", "content": reply}
    calls = [
        {"id": f"functions.{name}:{place}", "type": "function",
         "function": {"name": name, "arguments": given if isinstance(given, str) else json.dumps(given)}}
        for place, (name, given) in enumerate(reply)
    ]  # fmt: skip
    return {"role": "assistant", "content": "", "tool_calls": calls}


class SwarmTalk:
    """Implements `environment.Talk`. The last reply is said again for as long as it is asked."""

    def __init__(
        self, *replies: Reply | Exception, worker: Callable[[str], Sequence[Reply | Exception]] = lambda _: ("done",)
    ):
        self.replies, self._worker = list(replies), worker
        self.messages: list[Mapping[str, Any]] = []
        self.events: list[Mapping[str, Any]] = []
        self.asides: dict[str, SwarmTalk] = {}
        self.asked: list[dict[str, Any]] = []

    def add(self, *messages: Mapping[str, Any]) -> None:
        self.messages += messages

    def note(self, *events: Mapping[str, Any]) -> None:
        self.events += json.loads(json.dumps(events))

    def aside(self, name: str) -> "SwarmTalk":
        return self.asides.setdefault(name, SwarmTalk(*self._worker(name)))

    async def ask(self, **how: Any) -> Mapping[str, Any]:
        self.asked.append(how)
        reply = self.replies[min(len(self.asked), len(self.replies)) - 1]
        if isinstance(reply, Exception):
            raise reply
        message = message_of(reply)
        self.messages.append(message)
        return message


@tool(effects="none")
async def search(query: str) -> str:
    """Search."""
    return f"found {query}"


@tool(effects="none", name="open")
async def open_page(page: str) -> str:
    """Open a page."""
    if page == "broken":
        raise RuntimeError("no disk")
    return f"page {page}"


@tool(effects="none")
async def answer(table: list[dict[str, str]]) -> str:
    """Answer."""
    return "Thanks."


TOOLS: tuple[Tool, ...] = (search, open_page, answer)
CREATE = ("create_subagent", {"name": "r", "system_prompt": "look"})
ANSWER = [("answer", {"table": [{"item": "a", "value": "b"}]})]


def assign(*prompts: str) -> list[tuple[str, Any]]:
    return [("assign_task", {"agent": "r", "prompt": prompt}) for prompt in prompts]


def settings(**more: Any) -> SwarmEpisode:
    return SwarmEpisode(**{"system_prompt": "lead", "critical_steps": 6, "worker_steps": 3, **more})
