"""Logic puzzles with exactly one solution, found by trying all of them.

    ordering    Ada, Ben, Chen have different heights. Ada is taller than Ben. ...  Who is the second tallest?
    knights     Each of three people always tells the truth or always lies. Ada says that Ben lies. ...  Who lies?

Clues are drawn until one solution is left; clues that the others already imply are dropped, so none is idle. The answer
is one name, or names in any order for knights. A reply is judged by its last line that holds a name at all: the set of
names in it. `reasoning_gym` names a task set of the package reasoning-gym instead, where it is installed.
"""

import importlib
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np

from perilune.rl.environment import OUTCOME, Message, Split, Talk, Task, draws, last_answer

Puzzle = Literal["ordering", "knights"]
NAMES = ("Ada", "Ben", "Chen", "Dalia", "Emil", "Fatou", "Goro")
ORDINALS = ("tallest", "second tallest", "third tallest", "fourth tallest", "fifth tallest", "sixth tallest")
Solution = tuple[Any, ...]
Clue = tuple[str, Callable[[Solution], bool]]


@dataclass(frozen=True, kw_only=True)
class Logic:
    name: str = "logic"
    puzzles: tuple[Puzzle, ...] = ("ordering", "knights")
    people: int = 3
    max_tokens: int = 256
    reasoning_gym: str = ""
    """A task set of that package, e.g. "leg_counting", in place of the puzzles."""

    def __post_init__(self) -> None:
        if not self.puzzles or not set(self.puzzles) <= set(get_args(Puzzle)):
            raise ValueError(f"logic.puzzles is {self.puzzles!r}, expected some of {', '.join(get_args(Puzzle))}")
        if not 2 <= self.people <= 5:
            raise ValueError(f"logic.people is {self.people!r}, expected 2 to 5")

    def task(self, number: int, split: Split) -> Task:
        if self.reasoning_gym:
            return self._borrowed(number, split)
        drawn = draws(self.name, split, number)
        kind = self.puzzles[number % len(self.puzzles)]
        # Train and test share no puzzle: some names occur in one of them only.
        pool = NAMES[:-1] if split == "train" else (*NAMES[:-2], NAMES[-1])
        people = [pool[index] for index in drawn.permutation(len(pool))[: self.people]]
        if split == "test" and NAMES[-1] not in people:
            people[int(drawn.integers(self.people))] = NAMES[-1]
        make = _ordering if kind == "ordering" else _knights
        text, answer = make(drawn, people)
        return Task(name=text, data={"text": text, "answer": sorted(answer), "people": sorted(people)})

    async def episode(self, task: Task, talk: Talk) -> None:
        talk.add({"role": "user", "content": task.data["text"]})
        await talk.ask(max_tokens=self.max_tokens)

    def judge(self, task: Task, messages: Sequence[Message]) -> Mapping[str, float]:
        reply = last_answer(messages)
        if "entry" in task.data:
            return {OUTCOME: _unit(self._gym.score_answer(answer=reply.strip(), entry=json.loads(task.data["entry"])))}
        return {OUTCOME: float(named_last(reply, task.data["people"]) == set(task.data["answer"]))}

    def _borrowed(self, number: int, split: Split) -> Task:
        # Rows 2 n are trained on, rows 2 n + 1 are not.
        entry = self._gym[2 * (number % 5000) + (split == "test")]
        return Task(name=f"{self.reasoning_gym}/{split}/{number}",
                    data={"text": entry["question"], "entry": json.dumps(entry, default=str)})  # fmt: skip

    @cached_property
    def _gym(self) -> Any:
        try:
            gym = importlib.import_module("reasoning_gym")
        except ModuleNotFoundError as error:
            raise ValueError(
                f"logic.reasoning_gym is {self.reasoning_gym!r}, but the package is missing: pip install reasoning-gym"
            ) from error
        return gym.create_dataset(self.reasoning_gym, size=10_000, seed=0)


def named_last(reply: str, people: Sequence[str]) -> set[str]:
    """The people named in the last line that names any."""
    pattern = re.compile(r"\b(" + "|".join(map(re.escape, people)) + r")\b")
    for line in reversed(reply.splitlines()):
        if found := set(pattern.findall(line)):
            return found
    return set()


def _ordering(drawn: np.random.Generator, people: list[str]) -> tuple[str, list[str]]:
    """A solution is the people from the tallest to the smallest."""
    solution = tuple(people)
    clues: list[Clue] = []
    for first, second in itertools.permutations(people, 2):
        if solution.index(first) < solution.index(second):
            clues.append((f"{first} is taller than {second}.", _before(first, second)))
    for person in people:
        if person != solution[0]:
            clues.append((f"{person} is not the tallest.", _not_first(person)))
    chosen = _enough(drawn, clues, list(itertools.permutations(sorted(people))), solution)
    place = int(drawn.integers(len(people)))
    intro = f"{', '.join(sorted(people))} have different heights."
    return f"{intro} {' '.join(chosen)} Who is the {ORDINALS[place]}?", [solution[place]]


def _before(first: str, second: str) -> Callable[[Solution], bool]:
    return lambda order: order.index(first) < order.index(second)


def _not_first(person: str) -> Callable[[Solution], bool]:
    return lambda order: order[0] != person


def _knights(drawn: np.random.Generator, people: list[str]) -> tuple[str, list[str]]:
    """A solution says of each person whether they tell the truth; at least one lies."""
    size = len(people)
    every = [each for each in itertools.product((True, False), repeat=size) if not all(each)]
    while True:
        solution = every[int(drawn.integers(len(every)))]
        clues: list[Clue] = []
        for speaker, other in itertools.permutations(range(size), 2):
            lies = not solution[other] if solution[speaker] else solution[other]  # what the speaker claims
            verb = "lies" if lies else "tells the truth"
            text = f"{people[speaker]} says that {people[other]} {verb}."
            clues.append((text, _claim(speaker, other, lies)))
        for speaker in range(size):
            alike = len(set(solution)) == 1
            claim = alike if solution[speaker] else not alike
            text = f"{people[speaker]} says that all of them are {'' if claim else 'not '}alike."
            clues.append((text, _claim_alike(speaker, claim)))
        if sum(all(holds(each) for _, holds in clues) for each in every) == 1:
            break
    chosen = _enough(drawn, clues, every, solution)
    intro = f"Each of {', '.join(people)} always tells the truth or always lies, and at least one of them lies."
    liars = [person for person, truthful in zip(people, solution) if not truthful]
    return f"{intro} {' '.join(chosen)} Who lies?", liars


def _claim(speaker: int, other: int, lies: bool) -> Callable[[Solution], bool]:
    """A knight's claim is true, a liar's is not."""
    return lambda truthful: truthful[speaker] == (truthful[other] != lies)


def _claim_alike(speaker: int, claim: bool) -> Callable[[Solution], bool]:
    return lambda truthful: truthful[speaker] == ((len(set(truthful)) == 1) == claim)


def _enough(drawn: np.random.Generator, clues: list[Clue], every: list[Solution], solution: Solution) -> list[str]:
    """The texts of clues that leave `solution` alone, in a drawn order and none of them idle."""
    kept = [clues[index] for index in drawn.permutation(len(clues))]
    for clue in list(kept):
        fewer = [each for each in kept if each is not clue]
        if [each for each in every if all(holds(each) for _, holds in fewer)] == [solution]:
            kept = fewer
    return [text for text, _ in kept]


def _unit(score: float) -> float:
    return min(1.0, max(0.0, float(score)))
