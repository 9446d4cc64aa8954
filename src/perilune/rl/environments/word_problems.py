"""Word problems with one number as the answer: generated ones, or rows of GSM8K from a file.

Generated problems are chains of small steps (buying, sharing, losing, doubling) about one stock of things, so that the
answer is known without a model. A file holds JSON lines with `question` and `answer`, where the answer ends in
"#### 72" as in GSM8K (arXiv 2110.14168); rows that do not are counted and left out.

The verifier reads the last number of the reply, or the one after "####" where the policy writes it so. Commas, a
currency sign and a fraction of zeros do not matter: "$1,200.00" is 1200.
"""

import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from perilune.rl.environment import OUTCOME, Message, Split, Talk, Task, draws, is_for_test, last_answer

_NUMBER = re.compile(r"-?[$€£]?-?[0-9][0-9,]*(?:\.[0-9]+)?")
_MARKED = re.compile(r"####\s*(-?[$€£]?[0-9][0-9,]*(?:\.[0-9]+)?)")
LONGEST_NUMBER = 40
TEST_SHARE = 10
"""One row in so many of a file belongs to the split test, unless the file has a split of its own."""

NAMES = ("Ada", "Ben", "Chen", "Dalia", "Emil", "Fatou", "Goro", "Hana", "Ines", "Jonas", "Kofi", "Lena")
THINGS = ("apples", "pencils", "stamps", "marbles", "books", "shells", "tickets", "cards")


class ProblemError(ValueError):
    """A file that holds no problems."""


@dataclass(frozen=True, kw_only=True)
class WordProblems:
    name: str = "word_problems"
    source: str = ""
    """A file of JSON lines (also .zst); empty: generated problems."""
    steps: int = 2
    """Of a generated problem."""
    largest: int = 49
    """The most that a generated problem begins with; what is bought, and put into bags, is smaller in proportion."""
    max_tokens: int = 256
    instruction: str = "Give the final number after ####."
    _broken: list[int] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= 8:
            raise ValueError(f"word_problems.steps is {self.steps!r}, expected 1 to 8")
        if not 16 <= self.largest <= 400:
            raise ValueError(f"word_problems.largest is {self.largest!r}, expected 16 to 400")

    @property
    def num_broken(self) -> int:
        """Rows of the file that are no problems."""
        return len(self._broken) if self.source and self._rows is not None else 0

    def task(self, number: int, split: Split) -> Task:
        if self.source:
            rows = self._rows[split]
            if not rows:
                raise ProblemError(f"{self.source!r} holds no problem of the split {split!r}")
            return rows[number % len(rows)]
        question, answer = generated(draws(self.name, split, number), self.steps, self.largest, test=split == "test")
        return Task(name=question, data={"question": question, "answer": str(answer)})

    async def episode(self, task: Task, talk: Talk) -> None:
        talk.add({"role": "user", "content": f"{task.data['question']}\n{self.instruction}".strip()})
        await talk.ask(max_tokens=self.max_tokens)

    def judge(self, task: Task, messages: Sequence[Message]) -> Mapping[str, float]:
        reply = last_answer(messages)
        found = final_number(reply)
        right = found is not None and found == number_of(task.data["answer"])
        return {OUTCOME: float(right), "format": float(_MARKED.search(reply) is not None)}

    @cached_property
    def _rows(self) -> Mapping[Split, list[Task]]:
        rows: dict[Split, list[Task]] = {"train": [], "test": []}
        split_of: dict[str, Split] = {}  # a question that comes twice is in one split, whatever its rows say
        for index, line in enumerate(_lines(Path(self.source))):
            row = _row(line)
            if row is None:
                self._broken.append(index)
                continue
            given = row.get("split")
            is_test = given == "test" if given in ("train", "test") else len(split_of) % TEST_SHARE == 0
            split = split_of.setdefault(row["question"], "test" if is_test else "train")
            task = Task(
                name=str(row.get("id", row["question"])),
                data={"question": row["question"], "answer": str(number_of(row["answer"]))},
            )
            rows[split].append(task)
        if not rows["train"] and not rows["test"]:
            raise ProblemError(
                f'{self.source!r} holds no problem: expected JSON lines with question and answer ("... #### 72")'
            )
        return rows


def _lines(path: Path) -> list[str]:
    raw = path.read_bytes()
    if path.suffix == ".zst":
        import zstandard

        raw = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(raw)).read()
    return raw.decode("utf-8", errors="replace").splitlines()


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError):
        return None
    if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in ("question", "answer")):
        return None
    answer = _MARKED.search(row["answer"])
    value = answer.group(1) if answer else row["answer"].strip()
    return None if number_of(value) is None else {**row, "answer": value}


def final_number(reply: str) -> Decimal | None:
    """The number after the last "####", else the last number."""
    marked = _MARKED.findall(reply)
    found = marked or _NUMBER.findall(reply)
    return number_of(found[-1]) if found else None


def number_of(text: str) -> Decimal | None:
    """ "$1,200.00" and "1200" are the same number; None for what is none."""
    plain = re.sub(r"[$€£,]", "", text).strip()
    if len(plain) > LONGEST_NUMBER:
        return None
    try:
        value = Decimal(plain)
    except InvalidOperation:
        return None
    return value if value.is_finite() else None


def generated(drawn: np.random.Generator, steps: int, largest: int, *, test: bool) -> tuple[str, int]:
    """A problem of `steps` steps and its answer, never below zero, for training or for the test."""
    while True:
        question, stock = _drawn(drawn, steps, largest)
        if is_for_test(question) == test:
            return question, stock


def _drawn(drawn: np.random.Generator, steps: int, largest: int) -> tuple[str, int]:
    person, friend = (NAMES[index] for index in drawn.choice(len(NAMES), size=2, replace=False))
    things = THINGS[drawn.integers(len(THINGS))]
    stock = int(drawn.integers(4, largest + 1))
    sentences = [f"{person} has {stock} {things}."]
    for _ in range(steps):
        kind = drawn.choice(["buys", "gives", "packs", "doubles"])
        amount = int(drawn.integers(2, largest // 4 + 1))
        if kind == "gives" and stock > 2:
            amount = int(drawn.integers(1, stock))
            stock -= amount
            sentences.append(f"{person} gives {amount} of them to {friend}.")
        elif kind == "packs":
            each = int(drawn.integers(2, largest // 8 + 1))
            stock += amount * each
            sentences.append(f"{person} gets {amount} bags with {each} {things} each.")
        elif kind == "doubles" and stock < 500:
            stock *= 2
            sentences.append(f"Then the number of {person}'s {things} doubles.")
        else:
            stock += amount
            sentences.append(f"{person} buys {amount} more.")
    return " ".join([*sentences, f"How many {things} does {person} have now?"]), stock
