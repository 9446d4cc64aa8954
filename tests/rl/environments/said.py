"""A conversation with a policy that says what it was told to: for tests of environments."""

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from perilune.rl.environment import Environment, EpisodeOver, Task, judged


class Said:
    """Answers with the given messages, one after the other; then the episode is over."""

    def __init__(self, *replies: str | Mapping[str, Any]) -> None:
        self.replies = list(replies)
        self.messages: list[Mapping[str, Any]] = []
        self.asked: list[dict[str, Any]] = []
        self.events: list[Mapping[str, Any]] = []

    def add(self, *messages: Mapping[str, Any]) -> None:
        self.messages += messages

    def note(self, *events: Mapping[str, Any]) -> None:
        self.events += json.loads(json.dumps(events, allow_nan=False))

    async def ask(self, **how: Any) -> Mapping[str, Any]:
        self.asked.append(how)
        if not self.replies:
            raise EpisodeOver
        reply = self.replies.pop(0)
        message = {"role": "assistant", "content": reply} if isinstance(reply, str) else {"role": "assistant", **reply}
        self.messages.append(message)
        return message


def played(environment: Environment, task: Task, *replies: str | Mapping[str, Any]) -> tuple[dict[str, float], Said]:
    """The facets of an episode in which the policy says `replies`."""
    talk = Said(*replies)
    with contextlib.suppress(EpisodeOver):
        asyncio.run(environment.episode(task, talk))
    return judged(environment, task, talk.messages, talk.events), talk


def tool_call(name: str, arguments: str, number: int = 0) -> Mapping[str, Any]:
    call = {"id": f"functions.{name}:{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"content": "", "tool_calls": [call]}


def words(messages: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(str(message.get("content")) for message in messages)
