"""What a policy is trained in: tasks, a conversation about each, and a judge that only reads the transcript.

    class Copying:                                             an environment is any object with these four
        name = "copying"
        def task(self, number, split): ...                     the same number gives the same task, on every machine
        async def episode(self, task, talk): ...               asks, answers tool calls, as long as it likes
        def judge(self, task, messages): ...                   facets of the reward; reads nothing but its arguments

The judge sees what was said, never how: that is what makes a stored trajectory judgeable again with the same result.
`talk` records token ids and log-probs as the engine served them (rollout.py); an episode that wants a picture puts it
into a message as OpenAI's format does.

An episode may have workers beside the policy: `talk.aside(name)` is a conversation with one, and `talk.note(...)` keeps
what happened between them. An environment whose reward looks at that has `judge_events(task, messages, events)`, which
is asked instead of `judge` and likewise reads nothing but its arguments; `uses_asides = True` tells a run to provide
workers.

Tasks come in two splits without a task in common: "train", and "test", which is never trained on.
"""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

Split = Literal["train", "test"]
Message = Mapping[str, Any]
"""One message in the OpenAI chat form."""
TEST_IN = 8
OUTCOME = "outcome"
"""The facet that says how well a task was solved, in [0, 1]. Success rates, Toggle and reports look at it."""


@dataclass(frozen=True, kw_only=True)
class Task:
    name: str
    """Names the task: equal names mean equal tasks."""
    data: Mapping[str, Any]
    """All that episode and judge need; JSON."""
    weights: Mapping[str, float] = field(default_factory=lambda: {OUTCOME: 1.0})
    """What each facet counts for in the reward; one that is not named counts nothing."""


class EpisodeOver(Exception):
    """Raised inside an episode by `Talk.ask` when its budget of tokens or turns is spent: let it pass."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """Where a program reaches the policy as it would any OpenAI-compatible server, while an episode lasts."""

    base_url: str
    api_key: str = field(repr=False)


class Talk(Protocol):
    """One conversation with the policy. Whatever it said is recorded; whatever is added is context."""

    @property
    def messages(self) -> Sequence[Message]: ...

    def add(self, *messages: Message) -> None:
        """What a user, the system or a tool says."""

    async def ask(
        self,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Message:
        """The policy's next message, which is also added. Raises EpisodeOver when the episode may not go on."""

    def aside(self, name: str) -> "Talk":
        """A conversation with a worker of this episode; the same name gives the same conversation. Workers have the
        weights the run began with and are never trained, unless the run trains them jointly."""

    def note(self, *events: Mapping[str, Any]) -> None:
        """JSON facts of the episode, kept with its trajectory for `judge_events`."""


@runtime_checkable
class Serves(Protocol):
    """What the talk of a run can do besides: let a program speak with the policy (gateway.py)."""

    def served(self) -> AbstractAsyncContextManager[Access]:
        """An address that is good while the block lasts. What the program asked and what the policy answered are then
        in `messages`, and recorded."""
        ...


class Environment(Protocol):
    @property
    def name(self) -> str: ...

    def task(self, number: int, split: Split) -> Task: ...

    async def episode(self, task: Task, talk: Talk) -> None: ...

    def judge(self, task: Task, messages: Sequence[Message]) -> Mapping[str, float]: ...


def judged(
    environment: Environment, task: Task, messages: Sequence[Message], events: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """The facets of an episode, now or from its records, by whichever judge the environment has."""
    judge_events = getattr(environment, "judge_events", None)
    facets = environment.judge(task, messages) if judge_events is None else judge_events(task, messages, events)
    return {str(name): float(value) for name, value in facets.items()}


def reward_of(task: Task, facets: Mapping[str, float]) -> float:
    """Facets by their weights, summed in the order of their names: the same bits on every machine."""
    return float(sum(task.weights[name] * facets[name] for name in sorted(facets) if name in task.weights))


def draws(environment: str, split: Split, number: int, *, seed: int = 0) -> np.random.Generator:
    """The random numbers of one task: a function of its environment, split and number."""
    name = [*f"{environment}/{split}".encode()]
    return np.random.default_rng([seed, number, len(name), *name])


def is_for_test(question: str) -> bool:
    """Whether a generated question belongs to the split test: one in eight does, by its text alone.

    Not by its numbers: a small policy that has only seen problems which begin with even ones knows nothing of the
    others, and a test would measure that.
    """
    return hashlib.blake2b(question.encode(), digest_size=8).digest()[0] % TEST_IN == 0


def last_answer(messages: Sequence[Message]) -> str:
    """The text of the last message the policy wrote; empty where there is none, or only tool calls."""
    for message in reversed(messages):
        if message.get("role") == "assistant":
            content = message.get("content")
            return content if isinstance(content, str) else ""
    return ""
