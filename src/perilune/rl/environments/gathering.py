"""Wide work in miniature: pieces are to be gathered, one step each, alone or with workers.

    Gather 6.        take() -> "more" | "last" | "taken" (a worker's)        answer()

A cap of critical steps lets one agent alone take half of the pieces of a wide task; workers need three steps for all of
them (create_subagent, assign_task, and the worker's own take). Narrow tasks fit under the cap alone. A worker with an
empty task takes nothing: it costs nothing, brings nothing, and counts as started.

Nothing has to be remembered or copied, so that a model that is made and taught within a minute on a CPU
(rl/tiny_swarm.py) can play it, through the same runtime, rewards and reports as the large one (wide_search.py): what is
left of the question is whether it works alone or not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from perilune.rl.critical_steps import ASSIGN, MAIN, steps_of
from perilune.rl.environment import OUTCOME, Message, Split, Talk, Task, draws
from perilune.rl.swarm_settings import SwarmEpisode

if TYPE_CHECKING:
    from perilune.swarm.tools.tool import Tool, ToolContext

SUCCESS_FROM = 0.5
PROMPT = "Gather all."
WORKER_PROMPT = "Take one."


@dataclass(frozen=True, kw_only=True)
class Gathering:
    name: str = "gathering"
    wide: tuple[int, int] = (5, 6)
    """Pieces of a wide task, from and to."""
    narrow: tuple[int, int] = (1, 2)
    narrow_share: float = 0.25
    """Of tasks that are narrow."""
    critical_steps: int = 3
    delegates: bool = True
    """False: the policy has no tools for workers."""

    uses_asides = True

    def __post_init__(self) -> None:
        for field in ("wide", "narrow"):
            low, high = getattr(self, field)
            if not 1 <= low <= high:
                raise ValueError(f"gathering.{field} is {(low, high)!r}, expected two numbers from 1 on, in order")
        if not 0 <= self.narrow_share <= 1:
            raise ValueError(f"gathering.narrow_share is {self.narrow_share!r}, expected a share from 0 to 1")

    @property
    def settings(self) -> SwarmEpisode:
        settings = SwarmEpisode(
            system_prompt=PROMPT,
            worker_prompt=WORKER_PROMPT,
            critical_steps=self.critical_steps,
            worker_steps=2,
            max_workers=8,
            reply_tokens=160,
            main_tools=("create_subagent", "assign_task", "take", "answer"),
            worker_tools=("take",),
        )
        return settings if self.delegates else replace(settings, main_tools=("take", "answer"))

    def task(self, number: int, split: Split) -> Task:
        drawn = draws(self.name, split, number)
        kind = "narrow" if drawn.random() < self.narrow_share else "wide"
        low, high = self.narrow if kind == "narrow" else self.wide
        count = int(drawn.integers(low, high + 1))
        return Task(name=f"{split}/{number}/{count}", data={"kind": kind, "count": count})

    async def episode(self, task: Task, talk: Talk) -> None:
        from perilune.rl.swarm_episode import swarm_episode

        count = task.data["count"]
        await swarm_episode(f"Gather {count}.", talk, tools=tools_of(count), settings=self.settings)

    def judge(self, task: Task, messages: Sequence[Message]) -> Mapping[str, float]:
        return self.judge_events(task, messages, ())

    def judge_events(
        self, task: Task, messages: Sequence[Message], events: Sequence[Mapping[str, Any]]
    ) -> Mapping[str, float]:
        count, steps = task.data["count"], steps_of(events)
        outcomes = [(each["chain"].partition("#")[0], each["body"]) for each in events if each["kind"] == "outcome"]
        took = [agent for agent, body in outcomes if body["tool"] == "take" and body["status"] == "ok"]
        has_answer = any(body["tool"] == "answer" and body["status"] == "ok" for _, body in outcomes)
        outcome = len(took) / count if has_answer else 0.0
        assigned = sum(body["tool"] == ASSIGN for _, body in outcomes)
        workers = list(steps.workers)
        useful = sum(agent in took for agent in workers)
        replies = [each for each in events if each["kind"] == "reply"]
        return {
            OUTCOME: outcome,
            "success": outcome if outcome >= SUCCESS_FROM else 0.0,
            "parallel": min(1.0, len(workers) / -(-count // 2)),
            "finish": useful / assigned if assigned else 0.0,
            "economy": outcome * min(1.0, count / max(1, steps.total)),
            "assigned": float(assigned),
            "finished": float(useful),
            "spawned": float(len(workers)),
            "unused_workers": float(len(workers) - useful),
            "width": float(steps.width),
            "critical_steps": float(steps.critical),
            "total_steps": float(steps.total),
            "tokens": float(sum(each["body"]["tokens"] for each in replies)),
            "worker_tokens": float(sum(each["body"]["tokens"] for each in replies if each["chain"] != MAIN)),
        }


def tools_of(count: int) -> "list[Tool]":
    from perilune.swarm.tools.tool import ToolContext, ToolError, tool

    taken: set[tuple[int, int]] = set()
    """Steps and places of the orchestrator's calls that took a piece, or whose worker did."""

    @tool(effects="none")
    def take(context: ToolContext) -> str:
        """Take a piece."""
        step, place = _call_of(context)
        if (step, place) in taken:
            raise ToolError("you have a piece")
        # Shared out by the order of calls, not by who is faster: an episode can be played again.
        before = sum(earlier < step for earlier, _ in taken)
        if before + place >= count:
            raise ToolError("nothing is left")
        taken.add((step, place))
        if context.agent != MAIN:
            return "taken"
        return "last" if before + place + 1 == count else "more"

    @tool(effects="none")
    def answer() -> str:
        """Hand in."""
        return "Thanks."

    return [take, answer]


def _call_of(context: "ToolContext") -> tuple[int, int]:
    """The orchestrator's call that this one is, or that the worker came from."""
    if context.agent == MAIN:
        return context.step, context.index
    step, _, place = context.agent.rpartition("-")[2].partition(".")
    return int(step), int(place)
