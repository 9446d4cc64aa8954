"""What a policy can do on tasks that it is not trained on: greedy, with 95% intervals, and with samples to look at.

An evaluation is one line of evaluations.jsonl; its episodes lie in evaluations/ and can be judged again. Tasks with
pictures are also asked about pictures of other tasks: what is left of the reward then was had without looking.

    reward, gain, looking     mean and interval: of the tasks; of what each gained since the first evaluation; of what
                              each loses with another picture
"""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from perilune.data.hostile import PictureError
from perilune.data.picture_scores import bootstrap_interval
from perilune.data.pictures import draw_svg
from perilune.data.raster import encode_png, rasterize_png
from perilune.rl.environment import Environment, last_answer
from perilune.rl.environments.drawing import Drawing
from perilune.rl.environments.looking import Looking
from perilune.rl.groups import means
from perilune.rl.loop import Loop
from perilune.rl.parl import by_kind
from perilune.rl.trajectory import Trajectory, save_trajectories

EVALUATIONS = "evaluations.jsonl"
EPISODES = "evaluations"
OTHER_PICTURES = " (other pictures)"
LONGEST_TEXT = 4000
"""Characters of a sample that are kept for the report."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    tasks: int = 64
    """Of the test split of each environment, greedy; 0: no evaluation."""
    tasks_of: Mapping[str, int] = field(default_factory=dict)
    """Of some environments, by name, another number: what is compared more finely than the rest."""
    every: int = 0
    """Iterations between evaluations; 0: before and after only."""
    samples: int = 4
    """Episodes of each environment that the report shows."""

    def __post_init__(self) -> None:
        for name in ("tasks", "every", "samples"):
            if getattr(self, name) < 0:
                raise ValueError(f"evaluation.{name} is {getattr(self, name)!r}, expected 0 or more")
        if self.tasks_of and not self.tasks:
            raise ValueError(
                f"evaluation.tasks_of is {dict(self.tasks_of)!r} and evaluation.tasks 0, which is none at all"
            )
        for name, count in self.tasks_of.items():
            if count < 1:
                raise ValueError(f"evaluation.tasks_of[{name!r}] is {count!r}, expected 1 or more")

    def count_of(self, name: str) -> int:
        """Tasks of an environment, and as many with other pictures."""
        return self.tasks_of.get(name.removesuffix(OTHER_PICTURES), self.tasks)


def with_other_pictures(environment: Environment) -> Environment | None:
    """The same tasks with pictures of others: what a policy gets without looking. None where nothing is shown, or where
    other pictures are shown already."""
    if isinstance(environment, Drawing) and environment.ask == "picture":
        return replace(environment, ask="shuffled")
    if isinstance(environment, Looking) and not environment.shuffled:
        return replace(environment, shuffled=True)
    return None


def evaluated(environments: Mapping[str, Environment]) -> dict[str, Environment]:
    """The environments by name, and those with pictures once more with pictures of other tasks."""
    found = dict(environments)
    for name, environment in environments.items():
        if (control := with_other_pictures(environment)) is not None:
            found[name + OTHER_PICTURES] = control
    return found


async def evaluate(
    loop: Loop, environments: Mapping[str, Environment], config: EvaluationConfig, folder: Path
) -> dict[str, Any]:
    """One evaluation of the weights as they are; its record is also written."""
    first = next(iter(read_evaluations(folder)), None)
    if unknown := sorted(set(config.tasks_of) - set(environments)):
        raise ValueError(f"evaluation.tasks_of has {unknown[0]!r}, expected one of {', '.join(environments)}")
    played = evaluated(environments)
    collected = await loop.evaluate({name: config.count_of(name) for name in played}, environments=played)
    found: dict[str, dict[str, Any]] = {}
    for name in played:
        episodes = [each for each in collected.trajectories if each.environment == name]
        found[name] = _numbers(episodes, None if first is None else first["environments"].get(name))
    for name, numbers in found.items():
        control = found.get(name + OTHER_PICTURES)
        if control is not None:
            numbers["looking"] = _paired(control["rewards"], numbers["rewards"])
    shown = [
        _shown(environments[name], each)
        for name in environments
        for each in [each for each in collected.trajectories if each.environment == name][: config.samples]
    ]
    record = {
        "iteration": loop.iteration,
        "environments": found,
        "failures": dict(collected.failures),
        "examples": list(collected.examples),
        "samples": shown,
    }
    save_trajectories(folder / EPISODES / f"{loop.iteration:06d}.jsonl", collected.trajectories)
    with (folder / EVALUATIONS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
    return record


def read_evaluations(folder: Path) -> list[dict[str, Any]]:
    """By iteration; one that was written twice counts as written last."""
    path = folder / EVALUATIONS
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found: dict[int, dict[str, Any]] = {}
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue  # cut while it was written
        found[record["iteration"]] = record
    return [found[iteration] for iteration in sorted(found)]


def _numbers(episodes: Sequence[Trajectory], first: Mapping[str, Any] | None) -> dict[str, Any]:
    rewards = {task_of(each.task): each.reward for each in episodes}
    numbers: dict[str, Any] = {"count": len(episodes), **means(episodes), "rewards": rewards}
    if episodes:
        numbers["reward"] = _interval(list(rewards.values()))
    if kinds := by_kind(episodes):
        numbers["kinds"] = kinds
    if first is not None:
        numbers["gain"] = _paired(first["rewards"], rewards)
    return numbers


def task_of(name: str) -> str:
    """The name of a task without what tells a control from the task itself (drawing.py, looking.py)."""
    return name.replace("/shuffled/", "/", 1).replace("/picture/", "/", 1)


def _paired(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float] | None:
    """Mean and interval of after - before over the tasks that both have."""
    differences = [after[task] - before[task] for task in before if task in after]
    return _interval(differences) if differences else None


def _interval(values: Sequence[float]) -> dict[str, float]:
    found = bootstrap_interval(values)
    return {"mean": found.mean, "low": found.low, "high": found.high}


# ---------------------------------------------------------------------------------------------------------------------
# Samples


def _shown(environment: Environment, trajectory: Trajectory) -> dict[str, Any]:
    """What the report shows of an episode; of a drawing also the picture it should be and the one it is."""
    messages = list(trajectory.messages)
    asked = next((place for place, each in enumerate(messages) if each.get("role") == "assistant"), len(messages))
    sample: dict[str, Any] = {
        "environment": trajectory.environment,
        "task": trajectory.task,
        "prompt": "\n".join(_text(message) for message in messages[:asked])[:LONGEST_TEXT],
        "text": "\n".join(_text(message) for message in messages[asked:])[:LONGEST_TEXT],
        "reward": trajectory.reward,
        "facets": dict(trajectory.facets),
        "finish": trajectory.finish,
    }
    if trajectory.events:
        sample["events"] = list(trajectory.events)
        sample["kind"] = trajectory.task_data.get("kind")
    if isinstance(environment, Drawing):
        width, height = trajectory.task_data["size"]
        sample["text"] = last_answer(messages)[:LONGEST_TEXT]
        sample["image"] = base64.b64encode(rasterize_png(trajectory.task_data["svg"], width, height)).decode()
        try:
            drawn = draw_svg(last_answer(messages), width, height)
            sample["drawn"] = base64.b64encode(encode_png(drawn)).decode()
        except PictureError as error:
            sample["problem"] = str(error)
    return sample


def _text(message: Mapping[str, Any]) -> str:
    """A message as a line or more: pictures by name, tool calls as calls."""
    content = message.get("content")
    if isinstance(content, list):
        content = " ".join(str(part.get("text", "[picture]")) for part in content)
    calls = [
        f"-> {call.get('function', {}).get('name')}({call.get('function', {}).get('arguments')})"
        for call in message.get("tool_calls") or ()
    ]
    said = "\n".join([*([str(content)] if content else []), *calls])
    return f"[{message.get('role')}] {said or '(nothing)'}"
