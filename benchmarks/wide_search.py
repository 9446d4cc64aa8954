"""Wide search: where the cap lies, what to fine-tune on, and whether a model is good enough to be a worker.

    python benchmarks/wide_search.py cap                                     the oracle at half, once and twice the cap
    python benchmarks/wide_search.py traces --out traces.jsonl               dialogues for `perilune sft --data`
    python benchmarks/wide_search.py worker --model runs/NAME                single lookups, 90% in 8 steps or exit 1

Scripted policies play test tasks through the real runtime (rl/environments/wide_search_policies.py); nothing is learnt
and nothing is timed. `cap` writes benchmarks/results/wide_search_cap.json: item recall of the serial oracle, which has
to lie between 50% and 60% at the cap, the parallel oracle beside it, and what policies that spawn for show earn under
each form of the reward.
"""

import asyncio
import json
import math
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from perilune.cli import UserError
from perilune.cli_hub import open_model
from perilune.data.chat_messages import ChatError
from perilune.data.dialogues import document_of, read_dialogues
from perilune.data.tokenizer import Tokenizer
from perilune.rl.environment import Task
from perilune.rl.environments.wide_search import CRITICAL_STEPS, WideSearch
from perilune.rl.environments.wide_search_lookups import ENOUGH, look_up, lookups
from perilune.rl.environments.wide_search_play import played
from perilune.rl.environments.wide_search_policies import (
    Policy,
    clumsy,
    copying,
    delegating,
    hollow,
    padded,
    parallel,
    serial,
)
from perilune.rl.environments.wide_search_traces import UNCAPPED, TraceConfig, traces
from perilune.rl.talk import TalkConfig
from perilune.rl.workers import frozen_workers
from perilune.serve.engine import EngineConfig
from perilune.train.environment import describe_environment
from perilune.train.trainer import pick_device

CAPS = {
    "half": math.ceil(CRITICAL_STEPS / 2),
    "cap": CRITICAL_STEPS,
    "double": 2 * CRITICAL_STEPS,
    "none": UNCAPPED,
}
SHOWN = ("recall", "outcome", "parallel", "finish", "critical_steps", "total_steps", "spawned", "unused_workers")
REWARDS: Mapping[str, Mapping[str, float]] = {
    "outcome only": {"outcome": 1.0},
    "instantiation only": {"parallel": 1.0},
    "instantiation + outcome": {"parallel": 0.5, "outcome": 1.0},
    "full": {"parallel": 0.5, "finish": 0.5, "outcome": 1.0},
}
POLICIES: Mapping[str, Policy] = {
    "serial": serial,
    "parallel": parallel,
    "hollow": hollow,
    "padded": padded,
    "copying": copying,
    "clumsy, vague": clumsy("vague"),
    "clumsy, single": clumsy("single"),
}


@dataclass(frozen=True, kw_only=True)
class Cap:
    """Item recall of the serial oracle at half, once and twice the cap, and what spawning for show earns."""

    tasks: int = 200
    """Wide test tasks; as many narrow ones and chains."""
    results: Path = Path("benchmarks/results/wide_search_cap.json")
    chart: Path | None = None
    """PNG of what each policy earns under each form of the reward."""

    def run(self) -> None:
        environment = WideSearch(kinds=("wide",))
        caps = {}
        for name, cap in CAPS.items():
            capped = replace(environment, critical_steps=cap)
            rows = {each: self._means(capped, POLICIES[each]) for each in ("serial", "parallel")}
            caps[name] = {"critical_steps": cap if name != "none" else None, **rows}
            _say(f"cap {cap if name != 'none' else '-':>3}", rows)
        others = {}
        for kind in ("narrow", "chain"):
            rows = {
                "serial": self._means(WideSearch(kinds=(kind,)), serial),
                "delegating": self._means(WideSearch(kinds=(kind,)), delegating),
            }
            others[kind] = rows
            _say(kind, rows)
        paid = {name: self._means(environment, policy) for name, policy in POLICIES.items()}
        rewards = {name: {form: _reward(facets, form) for form in REWARDS} for name, facets in paid.items()}
        _say_rewards(rewards, paid)
        recall = caps["cap"]["serial"]["recall"]
        made = {
            "tasks": self.tasks, "split": "test", "critical_steps": CRITICAL_STEPS, "caps": caps, "other_tasks": others,
            "policies": paid, "rewards": rewards, "environment": describe_environment(torch.device("cpu")),
        }  # fmt: skip
        self.results.parent.mkdir(parents=True, exist_ok=True)
        self.results.write_text(json.dumps(made, indent=1) + "\n")
        if self.chart is not None:
            draw(rewards, self.chart)
        print(f"serial recall at the cap of {CRITICAL_STEPS}: {recall:.3f}; wrote {self.results}")
        if not 0.5 <= recall <= 0.6:
            sys.exit(f"the serial oracle's recall at the cap is {recall:.3f}, expected 0.5 to 0.6: move CRITICAL_STEPS")

    def _means(self, environment: WideSearch, policy: Policy) -> dict[str, float]:
        async def all_of() -> list[Mapping[str, float]]:
            tasks: list[Task] = [environment.task(number, "test") for number in range(self.tasks)]
            return [(await played(environment, task, policy)).facets for task in tasks]

        facets = asyncio.run(all_of())
        return {name: round(statistics.fmean(each[name] for each in facets), 4) for name in SHOWN}


@dataclass(frozen=True, kw_only=True)
class Traces:
    """Dialogues of orchestrators and workers on training tasks, with counts and, given a tokenizer, lengths."""

    out: Path
    config: Annotated[TraceConfig, tyro.conf.arg(name="")] = field(default_factory=TraceConfig)
    tokenizer: Path | None = None
    """tokenizer.json: prints the tokens of each sort of dialogue."""

    def run(self) -> None:
        self.out.parent.mkdir(parents=True, exist_ok=True)
        sources, kinds = Counter[str](), list[tuple[str, str]]()
        with self.out.open("w", encoding="utf-8") as file:
            for trace in traces(self.config):
                file.write(trace.line)
                sources[trace.source] += 1
                kinds.append((trace.source, trace.kind))
                if len(kinds) % 1000 == 0:
                    print(f"{len(kinds)} dialogues", file=sys.stderr)
        for source, count in sorted(sources.items()):
            print(f"{source:<18} {count:>7}")
        if self.tokenizer is not None:
            self._lengths(Tokenizer.load(self.tokenizer), kinds)
        print(f"wrote {self.out}: {len(kinds)} dialogues")

    def _lengths(self, tokenizer: Tokenizer, kinds: Sequence[tuple[str, str]]) -> None:
        dialogues, broken = read_dialogues([self.out])
        if broken.count:
            raise ChatError("traces", str(broken))
        lengths: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
        for kind, dialogue in zip(kinds, dialogues, strict=True):
            document = document_of(dialogue, tokenizer)
            lengths[kind].append((len(document.tokens), int(document.predicted.sum())))
        print(f"{'tokens':<28} {'mean':>6} {'max':>6} {'written':>8}")
        for (source, kind), found in sorted(lengths.items()):
            tokens, written = zip(*found)
            name = source if kind == "worker" else f"{source}, {kind}"
            print(f"{name:<28} {statistics.fmean(tokens):6.0f} {max(tokens):6} {statistics.fmean(written):8.0f}")


@dataclass(frozen=True, kw_only=True)
class Worker:
    """Whether a model can be a frozen worker: single lookups about test things."""

    model: str
    """A run, or a folder that was exported."""
    lookups: int = 400
    two_hops: float = 0.3
    temperature: float = 1.0
    """Workers in training sample at 1."""
    seed: int = 0
    device: str = "auto"
    results: Path | None = None

    def run(self) -> None:
        device = pick_device(self.device, "--device")
        found = asyncio.run(self._found(device))
        rows: dict[str, dict[str, Any]] = {}
        for name, part in (
            ("all", found),
            ("one hop", [each for each in found if each.hops == 1]),
            ("two hops", [each for each in found if each.hops == 2]),
        ):
            if part:
                right = statistics.fmean(each.is_right for each in part)
                steps = statistics.fmean(each.steps for each in part)
                most = max(each.steps for each in part)
                rows[name] = {"lookups": len(part), "right": right, "steps": steps, "most_steps": most}
                print(f"{name:<9} {len(part):>5} lookups  {right:6.1%} right  {steps:.2f} steps, at most {most}")
        for each in [each for each in found if not each.is_right][:5]:
            print(f"wrong: {each.lookup.question.text} {each.lookup.value} is right, it said {each.said[:80]!r}")
        if self.results is not None:
            made = {"model": self.model, "temperature": self.temperature, **rows}
            made["environment"] = describe_environment(device)
            self.results.write_text(json.dumps(made, indent=1) + "\n")
        if rows["all"]["right"] < ENOUGH:
            sys.exit(
                f"{rows['all']['right']:.1%} of the lookups are right, expected at least {ENOUGH:.0%} for a worker"
            )

    async def _found(self, device: torch.device) -> list[Any]:
        opened = open_model(self.model, device=device)
        talk = TalkConfig(max_turns=16, max_tokens=1024, temperature=self.temperature)
        workers = frozen_workers(opened.model, opened.tokenizer, EngineConfig(), talk, device=device)
        environment = WideSearch()
        try:
            wanted = lookups(environment, self.lookups, two_hops=self.two_hops)
            return await look_up(environment, workers, wanted, seed=self.seed)
        finally:
            await workers.engine.close()


def _reward(facets: Mapping[str, float], form: str) -> float:
    return sum(weight * facets[name] for name, weight in REWARDS[form].items())


def draw(rewards: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Bars: what a policy earns on a wide task, one panel for each form of the reward."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from perilune.report.plots import LIGHT

    names = list(rewards)
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    for place, form in enumerate(REWARDS):
        axes = figure.add_subplot(1, len(REWARDS), place + 1)
        values = [rewards[name][form] for name in names]
        colours = [LIGHT.series[2] if name in ("serial", "parallel") else LIGHT.series[1] for name in names]
        axes.barh(names, values, color=colours)
        axes.invert_yaxis()
        axes.set_title(f"reward: {form}", fontsize=9, color=LIGHT.text)
        axes.set_xlim(0, 2.1)
        axes.tick_params(labelsize=8, colors=LIGHT.muted, labelleft=place == 0)
        axes.spines[["top", "right"]].set_visible(False)
        for at, value in enumerate(values):
            axes.text(value + 0.03, at, f"{value:.2f}", va="center", fontsize=8, color=LIGHT.text)
    figure.savefig(path, dpi=160)
    print(f"wrote {path}")


def _say(name: str, rows: Mapping[str, Mapping[str, float]]) -> None:
    for policy, facets in rows.items():
        print(f"{name:<8} {policy:<10} " + "  ".join(f"{each} {facets[each]:.3f}" for each in SHOWN))


def _say_rewards(rewards: Mapping[str, Mapping[str, float]], paid: Mapping[str, Mapping[str, float]]) -> None:
    print(f"{'policy':<16} " + "  ".join(f"{form:>24}" for form in REWARDS) + "  critical steps")
    for name, row in rewards.items():
        earned = "  ".join(f"{row[form]:>24.3f}" for form in REWARDS)
        print(f"{name:<16} {earned}  {paid[name]['critical_steps']:.1f}")


if __name__ == "__main__":
    try:
        tyro.cli(
            Annotated[Cap, tyro.conf.subcommand("cap")]
            | Annotated[Traces, tyro.conf.subcommand("traces")]
            | Annotated[Worker, tyro.conf.subcommand("worker")],
            description=__doc__,
        ).run()  # pyrefly: ignore
    except (UserError, ValueError) as error:
        sys.exit(str(error))
