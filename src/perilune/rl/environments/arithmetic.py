"""Sums: one question, one number. The smallest task with a verifiable answer.

    23 + 58 - 9 = ?        ->  72

Numbers and operators are drawn; the terms grow with `terms` and `digits`. The answer is the last integer of the reply,
so a policy may think before it answers. Facets: outcome (1 if right) and format (1 if the reply is a number alone).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perilune.rl.environment import OUTCOME, Message, Split, Talk, Task, draws, is_for_test, last_answer

_NUMBER = re.compile(r"-?[0-9]+")
MOST_DIGITS = 40
"""Longer answers are wrong without being read: Python refuses to convert very long ones."""


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    name: str = "arithmetic"
    terms: int = 2
    digits: int = 2
    operators: str = "+-"
    """Of + - *, as in Python: products bind first."""
    max_tokens: int = 64

    def __post_init__(self) -> None:
        if self.terms < 2 or not 1 <= self.digits <= 9:
            raise ValueError(
                f"arithmetic.terms={self.terms!r} and digits={self.digits!r}: expected at least 2, and 1 to 9"
            )
        if not self.operators or set(self.operators) - set("+-*"):
            raise ValueError(f"arithmetic.operators is {self.operators!r}, expected some of + - *")

    def task(self, number: int, split: Split) -> Task:
        drawn = draws(self.name, split, number)
        while True:
            numbers = drawn.integers(0, 10**self.digits, size=self.terms).tolist()
            operators = [self.operators[index] for index in drawn.integers(len(self.operators), size=self.terms - 1)]
            text = "".join(f"{value} {operator} " for value, operator in zip(numbers, operators)) + str(numbers[-1])
            if is_for_test(text) == (split == "test"):
                return Task(name=text, data={"text": text, "answer": value_of(numbers, operators)})

    async def episode(self, task: Task, talk: Talk) -> None:
        talk.add({"role": "user", "content": f"{task.data['text']} = ?"})
        await talk.ask(max_tokens=self.max_tokens)

    def judge(self, task: Task, messages: Sequence[Message]) -> Mapping[str, float]:
        reply = last_answer(messages).strip()
        found = _NUMBER.findall(reply)
        right = bool(found) and len(found[-1]) <= MOST_DIGITS and int(found[-1]) == task.data["answer"]
        return {OUTCOME: float(right), "format": float(_NUMBER.fullmatch(reply) is not None)}


def value_of(numbers: Sequence[int], operators: Sequence[str]) -> int:
    """Products first, then from left to right."""
    terms, signs = [numbers[0]], [1]
    for operator, number in zip(operators, numbers[1:]):
        if operator == "*":
            terms[-1] *= number
        else:
            terms.append(number)
            signs.append(1 if operator == "+" else -1)
    return sum(sign * term for sign, term in zip(signs, terms))
