"""Scripted policies in the real runtime: as a `Talk`, which an environment plays with, and as a `ModelClient`.

    played = play(WideSearch(), task, serial)        facets and what was said, one episode
    ScriptedClient(parallel)                         for a `Swarm` of its own, with a journal on disk

An episode with scripted policies costs a millisecond or two for each reply, so hundreds of them fix a cap.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from perilune.rl.critical_steps import MAIN
from perilune.rl.environment import Message, Task
from perilune.rl.environments.wide_search import WideSearch
from perilune.rl.environments.wide_search_policies import Policy, read, worker
from perilune.rl.environments.wide_search_tools import ANSWER
from perilune.swarm.client import ModelReply, ModelRequest
from perilune.swarm.messages import message_from_plain

NOTHING_FOUND = "I found nothing."


class ScriptedTalk:
    """Implements `rl.environment.Talk`: a policy that speaks by its script, and workers that do."""

    def __init__(self, policy: Policy, workers: Policy = worker) -> None:
        self._policy, self._workers = policy, workers
        self.messages: list[Message] = []
        self.tools: Sequence[Mapping[str, Any]] = ()
        self.asides: dict[str, ScriptedTalk] = {}
        self.events: list[Mapping[str, Any]] = []

    def add(self, *messages: Message) -> None:
        self.messages += messages

    async def ask(
        self, *, tools: Sequence[Mapping[str, Any]] = (), max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Message:
        self.tools = tools
        message = self._policy(self.messages)
        self.messages.append(message)
        return message

    def aside(self, name: str) -> "ScriptedTalk":
        return self.asides.setdefault(name, ScriptedTalk(self._workers))

    def note(self, *events: Mapping[str, Any]) -> None:
        self.events += orjson.loads(orjson.dumps(events))

    def dialogue(self) -> dict[str, Any]:
        """What was said, as `perilune sft` reads it."""
        return {"messages": list(self.messages), "tools": list(self.tools), "thinking": False}


@dataclass(frozen=True, kw_only=True)
class Played:
    facets: Mapping[str, float]
    talk: ScriptedTalk


async def played(environment: WideSearch, task: Task, policy: Policy, workers: Policy = worker) -> Played:
    talk = ScriptedTalk(policy, workers)
    await environment.episode(task, talk)
    return Played(facets=environment.judge_events(task, talk.messages, talk.events), talk=talk)


def play(environment: WideSearch, task: Task, policy: Policy, workers: Policy = worker) -> Played:
    """One episode, outside of any event loop."""
    return asyncio.run(played(environment, task, policy, workers))


@dataclass
class ScriptedClient:
    """Implements `swarm.client.ModelClient`: the orchestrator and its workers. A swarm of its own goes on after a call
    of `answer`, until somebody says something: the orchestrator then says its table in words."""

    policy: Policy
    workers: Policy = worker

    async def complete(self, request: ModelRequest) -> ModelReply:
        messages = [message.plain() for message in request.messages]
        if request.agent != MAIN:
            said = self.workers(messages)
        elif ANSWER in (called := dict(read(messages).calls)):
            told = "\n".join(f"{row['item']}: {row['value']}" for row in called[ANSWER]["table"])
            said = {"role": "assistant", "content": told or NOTHING_FOUND}
        else:
            said = self.policy(messages)
        return ModelReply(message=message_from_plain(said))

    async def close(self) -> None: ...
