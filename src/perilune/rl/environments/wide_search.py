"""Wide search: tables about many things in a library of 20,000 pages, by one agent or by a swarm that it leads.

    WideSearch()                              wide (8-16 items), narrow (1-3) and dependent chains, capped
    WideSearch(kinds=("wide",))               wide ones only
    WideSearch(main_tools=SERIAL_TOOLS)       without workers: the serial agent

An episode runs in the swarm's own runtime (rl/swarm_episode.py). The policy searches and opens pages itself, or creates
workers and gives them tasks; the prompt names the tools and orders nothing. Critical steps are capped: with the cap of
`CRITICAL_STEPS` an agent that never errs, alone, reaches a little more than half of the items of a wide question
(benchmarks/wide_search.py measures it), and all of a narrow question or a chain. Judging: wide_search_judge.py.

A cheap and useless way to spawn is there on purpose: a worker whose task is empty, or copied from the whole question,
has nothing to look up and returns at once, and that looks like a task done.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from perilune.rl.critical_steps import ASSIGN, CREATE
from perilune.rl.environment import Message, Split, Talk, Task, draws
from perilune.rl.environments.wide_search_corpus import CorpusConfig
from perilune.rl.environments.wide_search_judge import final_rows, item_scores, judged
from perilune.rl.environments.wide_search_questions import TaskKind, draw_question, truth_of
from perilune.rl.environments.wide_search_tools import ANSWER, OPEN, SEARCH, Library, library_of, tools
from perilune.rl.swarm_settings import SwarmEpisode

CRITICAL_STEPS = 15
"""The cap: the serial oracle's item recall on wide test tasks is between 50% and 60% at it."""
WORKER_STEPS = 8
SERIAL_TOOLS = (SEARCH, OPEN, ANSWER)
SWARM_TOOLS = (CREATE, ASSIGN, *SERIAL_TOOLS)
SYSTEM_PROMPT = "You answer questions from a library with your tools. Steps are limited. End with answer."
WORKER_PROMPT = "You look up facts in a library with your tools. Reply with item: value."


@dataclass(frozen=True, kw_only=True)
class WideSearch:
    uses_asides: ClassVar[bool] = True
    """Workers speak beside the policy."""

    name: str = "wide_search"
    kinds: tuple[TaskKind, ...] = ("wide", "wide", "narrow", "chain")
    """Of the tasks, in turn."""
    two_hops: float = 0.2
    """Share of the wide and narrow questions whose items take two hops."""
    critical_steps: int = CRITICAL_STEPS
    spare_steps: int | None = None
    """A narrow question or a chain is capped at as many steps beyond the oracle's own; None: at `critical_steps`."""
    worker_steps: int = WORKER_STEPS
    max_workers: int = 32
    main_tools: tuple[str, ...] = SWARM_TOOLS
    instruction: str = ""
    """Said to the orchestrator behind its system prompt."""
    reply_tokens: int | None = None
    worker_reply_tokens: int | None = None
    corpus: CorpusConfig = field(default_factory=CorpusConfig)

    def __post_init__(self) -> None:
        known = ("wide", "narrow", "chain")
        if not self.kinds or not set(self.kinds) <= set(known):
            raise ValueError(f"wide_search.kinds is {self.kinds!r}, expected some of {', '.join(known)}")
        if not 0 <= self.two_hops <= 1:
            raise ValueError(f"wide_search.two_hops is {self.two_hops!r}, expected a share between 0 and 1")
        if self.spare_steps is not None and self.spare_steps < 0:
            raise ValueError(f"wide_search.spare_steps is {self.spare_steps!r}, expected 0 or more, or None")
        if not set(self.main_tools) <= set(SWARM_TOOLS):
            raise ValueError(
                f"wide_search.main_tools is {self.main_tools!r}, expected some of {', '.join(SWARM_TOOLS)}"
            )

    @property
    def library(self) -> Library:
        return library_of(self.corpus)

    def task(self, number: int, split: Split) -> Task:
        kind = self.kinds[number % len(self.kinds)]
        drawn = draws(f"{self.name}/{kind}", split, number)
        question = draw_question(self.library.corpus, kind, split, drawn, two_hops=self.two_hops)
        cap = self.critical_steps
        if self.spare_steps is not None and kind != "wide":
            cap = min(cap, question.oracle_steps + self.spare_steps)
        data: dict[str, Any] = {
            "kind": kind,
            "question": question.text,
            "items": [list(row) for row in truth_of(self.library.corpus, question)],
            "critical_steps": cap,
            "oracle_steps": question.oracle_steps,
        }
        return Task(name=question.text, data=data)

    async def episode(self, task: Task, talk: Talk) -> None:
        from perilune.rl.swarm_episode import swarm_episode

        settings = self.settings(task)
        await swarm_episode(task.data["question"], talk, tools=tools(self.library), settings=settings)

    def settings(self, task: Task) -> SwarmEpisode:
        """How the runtime plays a task."""
        return SwarmEpisode(
            system_prompt=f"{SYSTEM_PROMPT} {self.instruction}".strip(),
            worker_prompt=WORKER_PROMPT,
            critical_steps=task.data["critical_steps"],
            worker_steps=self.worker_steps,
            max_workers=self.max_workers,
            main_tools=self.main_tools,
            worker_tools=(SEARCH, OPEN),
            reply_tokens=self.reply_tokens,
            worker_reply_tokens=self.worker_reply_tokens,
        )

    def judge(self, task: Task, messages: Sequence[Message]) -> Mapping[str, float]:
        """The answer alone: what the swarm did is in its events."""
        return item_scores(task.data["items"], final_rows(messages))

    def judge_events(
        self, task: Task, messages: Sequence[Message], events: Sequence[Mapping[str, Any]]
    ) -> Mapping[str, float]:
        return judged(task.data, events)
