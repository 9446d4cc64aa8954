"""Functions to be written in Python: a description and examples in, a function out, judged by what it answers.

    environment = Code()                                         families of code_tasks.py
    environment = Code(source="rows.jsonl")                      or rows of a file

The solution is the first fenced block of the reply, or else all of it. It runs in the sandbox as a function server
(code_exchange.py): hidden inputs are sent one at a time and compared outside, so no test, no expected value and no exit
code is within its reach. A tuple arrives as a list; sets, generators, keys that are no strings and NaN are no answers.
It runs once, in the episode, and what it answered is kept: an episode that is judged again gets the same reward, also
for a solution that draws lots or was stopped by a busy machine.

Facets: outcome, the share of hidden inputs answered right (with `whole`: 1 for all of them, else 0), and valid, 1 if
every input got an answer at all.

A row of a file has `prompt`, `function`, `inputs` (a list of argument lists) and either `outputs` or `reference`, a
solution that is run, in the sandbox too, to find them; also `exact` (false: 1 and 1.0 are the same, and floats may be a
rounding apart), `id` and `split` where wanted. Rows that are none, and rows whose reference fails, are counted and left
out. Rows of one prompt are in one split.

Where no sandbox can start there is no Code: it says why, and calculator.py is the environment to take.
"""

import asyncio
import functools
import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from perilune.rl.environment import OUTCOME, Message, Split, Talk, Task, draws, last_answer
from perilune.rl.environments.code_exchange import NOTHING, Answers, ServerLimits, ask_function, same
from perilune.rl.environments.code_tasks import FAMILIES, draw_exercise
from perilune.swarm.sandbox import SandboxUnavailable, layers

_FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
ANSWERS = "answers"
"""Of an event: for every hidden input a list with its answer, empty where there was none."""
RUNNERS = 16
TEST_SHARE = 10
"""One prompt in so many of a file belongs to the split test, unless its row says another."""


class CodeError(ValueError):
    """A file that holds no tasks."""


@dataclass(frozen=True, kw_only=True)
class Code:
    name: str = "code"
    families: tuple[str, ...] = tuple(FAMILIES)
    source: str = ""
    """A file of JSON lines; empty: generated tasks."""
    hidden: int = 8
    """Inputs of a generated task that are not shown."""
    examples: int = 2
    whole: bool = False
    """Nothing for a solution that is right on some inputs only."""
    max_tokens: int = 512
    limits: ServerLimits = field(default_factory=ServerLimits)
    _broken: set[int] = field(default_factory=set, init=False, repr=False, compare=False)
    _resolved: dict[int, Task | None] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if unknown := set(self.families) - set(FAMILIES) or not self.families:
            raise ValueError(
                f"code.families is {self.families!r}, expected some of {', '.join(FAMILIES)}"
                + (f"; not {', '.join(sorted(unknown))}" if isinstance(unknown, set) else "")
            )
        if not 1 <= self.hidden <= 16 or not 0 <= self.examples <= 4:
            raise ValueError(
                f"code.hidden={self.hidden!r} and examples={self.examples!r}: expected 1 to 16, and 0 to 4"
            )
        if problem := missing_sandbox():
            raise SandboxUnavailable(
                f"the environment code runs solutions in a sandbox, and none starts here: {problem}. "
                "Without one, take the recipe calculator (`perilune rl calculator`)"
            )

    @property
    def num_broken(self) -> int:
        """Rows of the file that are no tasks, as far as they were looked at: a reference is run when its turn comes."""
        return len(self._broken) if self.source and self._rows is not None else 0

    def task(self, number: int, split: Split) -> Task:
        if self.source:
            return self._row_task(number, split)
        drawn = draws(self.name, split, number)
        family = self.families[number % len(self.families)]
        exercise = draw_exercise(drawn, family, test=split == "test", num_inputs=self.examples + self.hidden)
        shown = [
            f"{exercise.function}({', '.join(map(repr, arguments))}) == {output!r}"
            for arguments, output in zip(exercise.inputs[: self.examples], exercise.outputs)
        ]
        prompt = f"Write a Python function {exercise.signature}. {exercise.text}"
        prompt += "".join(f"\n{line}" for line in ["Examples:", *shown] if shown)
        return Task(
            name=f"{family}/{split}/{number}",
            data={
                "prompt": f"{prompt}\nAnswer with the function in one ```python block.",
                "function": exercise.function,
                "inputs": exercise.inputs[self.examples :],
                "outputs": exercise.outputs[self.examples :],
                "exact": True,
            },
        )

    async def episode(self, task: Task, talk: Talk) -> None:
        talk.add({"role": "user", "content": task.data["prompt"]})
        await talk.ask(max_tokens=self.max_tokens)
        loop = asyncio.get_running_loop()
        answers = await loop.run_in_executor(_runners(), self._answered, task, last_answer(talk.messages))
        if answers is not None:
            talk.note({ANSWERS: [[] if each is NOTHING else [each] for each in answers.values],
                       "complete": answers.complete})  # fmt: skip

    def judge(self, task: Task, messages: Sequence[Message]) -> Mapping[str, float]:
        """Of a reply that nobody has run yet."""
        answers = self._answered(task, last_answer(messages))
        return {OUTCOME: 0.0, "valid": 0.0} if answers is None else self._facets(task, answers.values, answers.complete)

    def judge_events(
        self, task: Task, messages: Sequence[Message], events: Sequence[Mapping[str, Any]]
    ) -> Mapping[str, float]:
        for event in events:
            if ANSWERS in event:
                values = [each[0] if each else NOTHING for each in event[ANSWERS]]
                return self._facets(task, values, event["complete"])
        return self.judge(task, messages)

    def _answered(self, task: Task, reply: str) -> Answers | None:
        """What the solution in a reply says to the hidden inputs; None where there is no solution."""
        solution = solution_of(reply)
        if not solution.strip():
            return None
        return ask_function(solution, task.data["function"], task.data["inputs"], self.limits)

    def _facets(self, task: Task, values: Sequence[Any], complete: bool) -> Mapping[str, float]:
        data = task.data
        right = sum(same(expected, given, exact=data["exact"]) for expected, given in zip(data["outputs"], values))
        share = float(right == len(data["inputs"])) if self.whole else right / len(data["inputs"])
        return {OUTCOME: share, "valid": float(complete)}

    # Rows of a file ---------------------------------------------------------------------------------------------------

    @cached_property
    def _rows(self) -> Mapping[Split, list[tuple[int, dict[str, Any]]]]:
        rows: dict[Split, list[tuple[int, dict[str, Any]]]] = {"train": [], "test": []}
        split_of: dict[str, Split] = {}
        with Path(self.source).open(encoding="utf-8", errors="replace") as lines:
            for index, line in enumerate(lines):
                if not line.strip():
                    continue
                row = _row(line)
                if row is None:
                    self._broken.add(index)
                    continue
                given = row.get("split")
                is_test = given == "test" if given in ("train", "test") else len(split_of) % TEST_SHARE == 0
                split = split_of.setdefault(row["prompt"], "test" if is_test else "train")
                rows[split].append((index, row))
        if not rows["train"] and not rows["test"]:
            raise CodeError(
                f"{self.source!r} holds no task: expected JSON lines with prompt, function, inputs and outputs "
                "(or reference)"
            )
        return rows

    def _row_task(self, number: int, split: Split) -> Task:
        rows = self._rows[split]
        for step in range(len(rows)):
            index, row = rows[(number + step) % len(rows)]
            if index not in self._resolved:
                self._resolved[index] = self._task_of(index, row)
            if (task := self._resolved[index]) is not None:
                return task
            self._broken.add(index)
        raise CodeError(f"{self.source!r} holds no task of the split {split!r}")

    def _task_of(self, index: int, row: Mapping[str, Any]) -> Task | None:
        if "outputs" in row:
            outputs = row["outputs"]
        else:
            answers = ask_function(row["reference"], row["function"], row["inputs"], self.limits)
            if not answers.complete:
                return None
            outputs = list(answers.values)
        return Task(
            name=str(row.get("id", f"row {index}")),
            data={
                "prompt": row["prompt"],
                "function": row["function"],
                "inputs": row["inputs"],
                "outputs": outputs,
                "exact": row.get("exact", True),
            },
        )


@functools.cache
def _runners() -> ThreadPoolExecutor:
    """So many solutions run at a time, whatever the number of episodes."""
    return ThreadPoolExecutor(RUNNERS, thread_name_prefix="solutions")


@functools.cache
def missing_sandbox() -> str:
    """Why no sandbox can start on this machine; empty where one can."""
    first = layers()[0]
    return "" if first.active else first.reason


def solution_of(reply: str) -> str:
    """The first fenced block, also one that was not closed; without any the whole reply."""
    found = _FENCE.search(reply)
    return found.group(1) if found else reply


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line, parse_constant=lambda name: 1 / 0)
    except (ValueError, RecursionError, ZeroDivisionError):
        return None
    if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in ("prompt", "function")):
        return None
    inputs, outputs = row.get("inputs"), row.get("outputs")
    if not isinstance(inputs, list) or not inputs or not all(isinstance(each, list) for each in inputs):
        return None
    if not isinstance(row.get("exact", True), bool) or not row["function"].isidentifier():
        return None
    if "outputs" in row:
        return row if isinstance(outputs, list) and len(outputs) == len(inputs) else None
    return row if isinstance(row.get("reference"), str) else None
