"""Dialogues for supervised fine-tuning: what scripted policies said in real episodes on training tasks.

    for line in traces(TraceConfig(orchestrators=2000, workers=4000)):       JSON lines, as data/dialogues.py reads them
        file.write(line)

One model learns both roles. As an orchestrator it mostly works alone; a tenth of its dialogues delegate. Part of those
do it badly, and most of the others hand out one item at a time, which is well-formed, finishes, and is slower than to
work alone: spawning begins rare and narrow, and whether, when and how wide is left to be learnt. Where every good
delegation hands out all items at once, the outcome alone teaches it, and nothing collapses
(benchmarks/parl_simulated.py). Delegation is as frequent on narrow questions and chains as on wide ones, unless
`delegated_by_kind` says otherwise.

Dialogues that are `told` are no part of that: their system prompt says to hand out all items at once, which no task
does. From them the model knows how that is done, and how an answer is put together from a dozen results; with the 3% of
the others alone it did not, and a reward can choose only among what a model can do.

As a worker it looks up one thing or two, in one hop or more, past old pages and pages of the wrong kind, with slips it
recovers from; a task that asks for nothing, or for too much, gets a short reply at once.

Shares are kept exactly, in a drawn order. Dialogues come from the runtime with the environment's own prompts, tools and
cap: what is learnt is what an episode will show.
"""

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate

import numpy as np

from perilune.rl.critical_steps import MAIN
from perilune.rl.environment import Task
from perilune.rl.environments.wide_search import SERIAL_TOOLS, WideSearch
from perilune.rl.environments.wide_search_judge import lines_of
from perilune.rl.environments.wide_search_play import ScriptedTalk, played
from perilune.rl.environments.wide_search_policies import (
    CLUMSY,
    READER,
    VAGUE,
    Policy,
    clumsy,
    errand,
    in_groups,
    serial,
    unsure,
    worker,
)
from perilune.rl.environments.wide_search_questions import TaskKind, draw_question

NUMBERS_OF_A_SEED = 10_000_000
BATCH = 16
"""Tasks of workers in one episode."""
UNCAPPED = 10_000
"""Critical steps: more than any episode takes."""
WIDTHS: Mapping[int | None, float] = {1: 0.85, 2: 0.08, 4: 0.04, None: 0.03}
"""Items that a well-formed delegation hands out at a time (None: all of them), and how often: few do it as it pays."""
AT_ONCE: Mapping[int | None, float] = {None: 1.0}
TOLD = "Hand out all items at once."
IDLE_TASKS = ("", VAGUE, "Help.", "Wait.", "Start now.")


@dataclass(frozen=True, kw_only=True)
class TraceConfig:
    orchestrators: int = 2000
    workers: int = 4000
    told: int = 0
    """Dialogues beside the orchestrator's: wide questions that are handed out at once because the prompt says so."""
    delegated: float = 0.1
    """Of the orchestrator's dialogues."""
    delegated_by_kind: Mapping[TaskKind, float] = field(default_factory=dict)
    """Other shares for some kinds of question: for a model that is to know already when delegation pays."""
    well_formed: float = 0.6
    """Of the delegations; the control arm has 1. The experiment of record has at least half."""
    widths: Mapping[int | None, float] = field(default_factory=lambda: WIDTHS)
    """Of the well-formed ones: shares by how many items are handed out at a time."""
    lost: float = 0.05
    """Of the workers in a delegation: those that find nothing, so that the orchestrator looks for itself."""
    alone: float = 0.1
    """Of the other dialogues: those without the tools for workers, as a serial agent is run."""
    uncapped: float = 0.1
    """Of the other dialogues: those that go on to the last item, which keeps long episodes within what was learnt."""
    two_hops: float = 0.3
    """Of the workers' dialogues; so are the next ones."""
    chains: float = 0.05
    pairs: float = 0.1
    """Two things in one task."""
    idle: float = 0.1
    """Nothing asked, or too much."""
    slips: float = 0.15
    """A first step that was wrong."""
    seed: int = 0
    environment: WideSearch = field(default_factory=WideSearch)

    def __post_init__(self) -> None:
        for name in (
            "delegated",
            "well_formed",
            "lost",
            "alone",
            "uncapped",
            "two_hops",
            "chains",
            "pairs",
            "idle",
            "slips",
        ):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"traces.{name} is {getattr(self, name)!r}, expected a share between 0 and 1")
        for kind, share in self.delegated_by_kind.items():
            if kind not in self.environment.kinds or not 0 <= share <= 1:
                raise ValueError(
                    f"traces.delegated_by_kind has {kind!r}: {share!r}, expected shares between 0 and 1 of "
                    f"{', '.join(dict.fromkeys(self.environment.kinds))}"
                )
        if abs(sum(self.widths.values()) - 1) > 1e-9 or min(self.widths.values()) < 0:
            raise ValueError(f"traces.widths is {dict(self.widths)!r}, expected shares that add up to 1")
        if self.alone + self.uncapped > 1:
            raise ValueError("traces: alone and uncapped are more than all of the dialogues that do not delegate")
        if self.two_hops + self.chains + self.pairs + self.idle > 1:
            raise ValueError("traces: two_hops, chains, pairs and idle are more than all of the workers' dialogues")
        for name in ("orchestrators", "workers", "told"):
            if getattr(self, name) < 0:
                raise ValueError(f"traces.{name} is {getattr(self, name)!r}, expected 0 or more")


@dataclass(frozen=True, kw_only=True)
class Trace:
    source: str
    """Who speaks, and how: "serial", "alone", "uncapped", "delegated", "clumsy", "told", or "worker" and what it was
    asked."""
    kind: str
    """Of the task: "wide", "narrow", "chain", or "worker"."""
    talk: ScriptedTalk
    outcome: float
    """Of an orchestrator, its item F1; of a worker, 1 if it found a value."""

    @property
    def line(self) -> str:
        plain = {"source": self.source, "kind": self.kind, **self.talk.dialogue()}
        return json.dumps(plain, ensure_ascii=False) + "\n"


def traces(config: TraceConfig) -> Iterator[Trace]:
    """All dialogues, orchestrators and workers in a drawn order. The same config gives the same bytes."""
    drawn = np.random.default_rng([config.seed, 11])
    roles = (orchestrator_traces(config), worker_traces(config), told_traces(config))
    counts = (config.orchestrators, config.workers, config.told)
    for role in drawn.permutation([role for role, count in enumerate(counts) for _ in range(count)]):
        yield next(roles[role])


# Orchestrators --------------------------------------------------------------------------------------------------------


def orchestrator_traces(config: TraceConfig) -> Iterator[Trace]:
    drawn = np.random.default_rng([config.seed, 12])
    kinds = [config.environment.kinds[number % len(config.environment.kinds)] for number in range(config.orchestrators)]
    # Within each kind of task: where shares are equal, delegation says nothing about the kind.
    manners = {kind: iter(_manners(config, kind, kinds.count(kind), drawn)) for kind in dict.fromkeys(kinds)}
    for number, kind in enumerate(kinds):
        source, policy = next(manners[kind])
        environment = config.environment
        if source == "alone":
            environment = replace(environment, main_tools=SERIAL_TOOLS)
        elif source == "uncapped":
            environment = replace(environment, critical_steps=UNCAPPED, spare_steps=None)
        task = environment.task(_task_number(config, number), "train")
        done = asyncio.run(played(environment, task, policy, unsure(config.lost)))
        yield Trace(source=source, kind=kind, talk=done.talk, outcome=done.facets["outcome"])


def told_traces(config: TraceConfig) -> Iterator[Trace]:
    environment = replace(config.environment, kinds=("wide",), instruction=TOLD)
    for number in range(config.told):
        # Of questions that the other dialogues have not.
        task = environment.task(_task_number(config, config.orchestrators + number), "train")
        done = asyncio.run(played(environment, task, in_groups(None), unsure(config.lost)))
        yield Trace(source="told", kind="wide", talk=done.talk, outcome=done.facets["outcome"])


def _task_number(config: TraceConfig, number: int) -> int:
    """Of an own stretch of tasks for every seed; the kind stays that of `number`."""
    return number + config.seed * NUMBERS_OF_A_SEED * len(config.environment.kinds)


def _manners(config: TraceConfig, kind: TaskKind, count: int, drawn: np.random.Generator) -> list[tuple[str, Policy]]:
    delegated = round(count * config.delegated_by_kind.get(kind, config.delegated))
    good = -int(-delegated * config.well_formed // 1)  # rounded up: a share that is promised is kept
    alone, uncapped = (round((count - delegated) * share) for share in (config.alone, config.uncapped))
    ways = [("clumsy", clumsy(CLUMSY[number % len(CLUMSY)])) for number in range(delegated - good)]
    manners = [*ways, *(("delegated", in_groups(width)) for width in _widths(config, good))]
    manners += [("alone", serial)] * alone
    manners += [("uncapped", serial)] * uncapped
    manners += [("serial", serial)] * (count - len(manners))
    return [manners[at] for at in drawn.permutation(count)]


def _widths(config: TraceConfig, count: int) -> list[int | None]:
    """Of as many delegations, in the order of the config; shares are kept but for rounding."""
    ends = [round(count * share) for share in accumulate(config.widths.values())]
    return [width for width, start, end in zip(config.widths, [0, *ends], ends) for _ in range(end - start)]


# Workers --------------------------------------------------------------------------------------------------------------


def worker_traces(config: TraceConfig) -> Iterator[Trace]:
    drawn = np.random.default_rng([config.seed, 13])
    counts = {name: round(config.workers * getattr(config, name)) for name in ("two_hops", "chains", "pairs", "idle")}
    asked = [name for name, count in counts.items() for _ in range(count)][: config.workers]
    asked += ["lookup"] * (config.workers - len(asked))
    slips = _slips(config, drawn)
    order = [(asked[at], slip) for at, slip in zip(drawn.permutation(len(asked)), slips)]
    for start in range(0, len(order), BATCH):
        yield from asyncio.run(_batch(config, order[start : start + BATCH], drawn))


def _slips(config: TraceConfig, drawn: np.random.Generator) -> list[str | None]:
    slipped = round(config.workers * config.slips)
    kinds: list[str | None] = [("half", "wrong")[number % 2] for number in range(slipped)]
    kinds += [None] * (config.workers - slipped)
    return [kinds[at] for at in drawn.permutation(config.workers)]


async def _batch(
    config: TraceConfig, wanted: Sequence[tuple[str, str | None]], drawn: np.random.Generator
) -> list[Trace]:
    prompts = [_prompt(config, name, drawn) for name, _ in wanted]
    talks = await worker_talks(config.environment, prompts, [partial(worker, slip=slip) for _, slip in wanted])
    found = [float(bool(lines_of(talk.messages[-1]["content"]))) for talk in talks]
    return [
        Trace(source=f"worker {name}", kind="worker", talk=talk, outcome=outcome)
        for (name, _), talk, outcome in zip(wanted, talks, found)
    ]


async def worker_talks(
    environment: WideSearch, prompts: Sequence[str], policies: Sequence[Policy]
) -> list[ScriptedTalk]:
    """Conversations of workers that are given these tasks in one episode, each played by a policy of its own."""
    talk = ScriptedTalk(errand(prompts))
    for number, policy in enumerate(policies):
        talk.asides[worker_name(number)] = ScriptedTalk(policy)
    wide = replace(environment, max_workers=max(len(prompts), 1))
    data = {
        "kind": "wide",
        "question": "Share out the work.",
        "items": [],
        "critical_steps": environment.critical_steps,
    }
    await wide.episode(Task(name="errand", data=data), talk)
    return list(talk.asides.values())


def worker_name(number: int) -> str:
    """Of an errand's worker: after the call that starts it, in the second reply."""
    return f"{MAIN}/{READER}-1.{number}"


def _prompt(config: TraceConfig, name: str, drawn: np.random.Generator) -> str:
    corpus = config.environment.library.corpus
    if name == "idle" and drawn.random() < 0.5:
        return IDLE_TASKS[drawn.integers(len(IDLE_TASKS))]
    kind: TaskKind = {"idle": "wide", "chains": "chain"}.get(name, "narrow")  # pyrefly: ignore
    hops = 1.0 if name == "two_hops" else 0.0
    question = draw_question(corpus, kind, "train", drawn, two_hops=hops)
    items = {"idle": len(question.names), "pairs": 2}.get(name, 1)
    while len(question.names) < items:
        question = draw_question(corpus, kind, "train", drawn, two_hops=hops)
    return replace(question, names=question.names[:items]).text
