"""A calculator as a tool, and sums that need one. Nothing is executed: an expression is parsed and walked.

    evaluate("(48213 * 9377 - 55210) // 7")     -> 64577341

Numbers, + - * / // % **, brackets, min, max, abs and round; no names, no other calls. A division that leaves no rest
gives an integer, so large quotients stay exact. Lengths, depths and the size of every intermediate result are bounded:
no expression takes longer than a moment.

The environment asks for the value of a long calculation, as an expression or told step by step. It is the environment
to take where no sandbox starts. Facets: outcome, called (1 if the tool gave a result) and calls.
"""

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from perilune.rl.environment import OUTCOME, Message, Split, Talk, Task, draws, is_for_test
from perilune.rl.environments.tool_calls import CallFailed, Tool, call_facets, converse, settled_answer
from perilune.rl.environments.word_problems import LONGEST_NUMBER, final_number, number_of

Number = int | float
Form = Literal["expression", "steps"]
LONGEST_EXPRESSION = 1000
MOST_BITS = 4096
"""Of an integer, also on the way."""
MOST_ROUNDING = 50
KNOWN = "only numbers, + - * / // % **, brackets, min, max, abs and round are known"
_STRANGE = re.compile(r"['\"\\]|[0-9.](?![eE][+-]?[0-9])[A-Za-z]")
"""Quotes, and letters behind a number: Python would warn of them while it reads."""
FINAL = "Give the final number after ####."


class CalculatorError(ValueError):
    """An expression without a value; the text says why and what to write."""


# The tool ------------------------------------------------------------------------------------------------------------


def evaluate(expression: str) -> Number:
    """The value of an arithmetic expression; CalculatorError for everything else."""
    if len(expression) > LONGEST_EXPRESSION:
        raise CalculatorError(f"the expression has {len(expression)} characters, expected at most {LONGEST_EXPRESSION}")
    if _STRANGE.search(expression):
        raise CalculatorError(KNOWN)
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        return _value(tree.body)
    except (SyntaxError, MemoryError, ValueError) as problem:
        if isinstance(problem, CalculatorError):
            raise
        raise CalculatorError("this is no expression; write one like (3 + 4) * 5") from None
    except RecursionError:
        raise CalculatorError("the expression is nested too deeply") from None


def _value(node: ast.expr) -> Number:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        if isinstance(node.op, ast.BitXor):
            raise CalculatorError("^ is no power here; write **")
        if type(node.op) in OPERATORS:
            return _combined(OPERATORS[type(node.op)], _value(node.left), _value(node.right))
    if isinstance(node, ast.Call):
        return _called(node)
    if isinstance(node, ast.Tuple):
        raise CalculatorError("there is a comma; write numbers without commas, and one expression at a time")
    if isinstance(node, ast.Name):
        raise CalculatorError(f"{node.id!r} has no value here; write numbers")
    raise CalculatorError(KNOWN)


def _combined(operation: Callable[[Any, Any], Any], left: Number, right: Number) -> Number:
    try:
        return _bounded(operation(left, right))
    except ZeroDivisionError:
        raise CalculatorError("division by zero") from None
    except OverflowError:
        raise CalculatorError("a result is too large") from None


def _power(base: Number, exponent: Number) -> Any:
    size = base.bit_length() if isinstance(base, int) else 0
    if isinstance(exponent, int) and size > 1 and size * abs(exponent) > 2 * MOST_BITS:
        raise CalculatorError("a result is too large")
    if isinstance(exponent, int) and exponent.bit_length() > 64:
        raise CalculatorError("an exponent is too large")
    return base**exponent


def _divided(left: Number, right: Number) -> Number:
    if isinstance(left, int) and isinstance(right, int) and right and left % right == 0:
        return left // right
    return left / right


def _called(node: ast.Call) -> Number:
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    if name not in FUNCTIONS or node.keywords or any(isinstance(each, ast.Starred) for each in node.args):
        raise CalculatorError(f"only {', '.join(FUNCTIONS)} can be called, with numbers")
    values = [_value(each) for each in node.args]
    least, most = FUNCTIONS[name]
    if not least <= len(values) <= most:
        raise CalculatorError(f"{name} was given {len(values)} numbers")
    if name == "min" or name == "max":
        return min(values) if name == "min" else max(values)
    if name == "abs":
        return abs(values[0])
    if len(values) == 2 and (not isinstance(values[1], int) or abs(values[1]) > MOST_ROUNDING):
        raise CalculatorError(f"round takes an integer from -{MOST_ROUNDING} to {MOST_ROUNDING} as its second number")
    return round(values[0], *values[1:])  # pyrefly: ignore[bad-argument-type, no-matching-overload]


def _bounded(value: Any) -> Number:
    if isinstance(value, int) and value.bit_length() <= MOST_BITS:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise CalculatorError("a result is too large, or no real number")


OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: _divided,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: _power,
}  # fmt: skip
FUNCTIONS: Mapping[str, tuple[int, int]] = {"min": (2, 20), "max": (2, 20), "abs": (1, 1), "round": (1, 2)}


async def _calculate(expression: str) -> str:
    try:
        return str(evaluate(expression))
    except CalculatorError as problem:
        raise CallFailed(str(problem)) from None


CALCULATOR = Tool(
    name="calculator",
    description="Computes an arithmetic expression: + - * / // % **, brackets, min, max, abs, round.",
    arguments={"expression": "for example (12 + 30) * 7"},
    call=_calculate,
)


# The environment -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Calculator:
    name: str = "calculator"
    form: Form = "expression"
    """"steps" tells the calculation in words, so that it has to be written down first."""
    steps: int = 3
    digits: int = 4
    max_turns: int = 4
    max_tokens: int = 128
    """Of one turn."""
    called: float = 0.0
    """What a successful call counts for in the reward, beside the outcome."""

    def __post_init__(self) -> None:
        if self.form not in get_args(Form):
            raise ValueError(f"calculator.form is {self.form!r}, expected one of {', '.join(get_args(Form))}")
        check_calculation("calculator", self.steps, self.digits)
        if self.max_turns < 2:
            raise ValueError(f"calculator.max_turns is {self.max_turns!r}, expected at least 2: a call and an answer")

    def task(self, number: int, split: Split) -> Task:
        drawn = draws(self.name, split, number)
        text, answer = draw_calculation(
            drawn, form=self.form, steps=self.steps, digits=self.digits, test=split == "test"
        )
        weights = {OUTCOME: 1.0} | ({"called": self.called} if self.called else {})
        return Task(name=text, data={"text": text, "answer": str(answer)}, weights=weights)

    async def episode(self, task: Task, talk: Talk) -> None:
        talk.add({"role": "user", "content": f"{task.data['text']}\n{FINAL}"})
        await converse(talk, [CALCULATOR], max_turns=self.max_turns, max_tokens=self.max_tokens)

    def judge(self, task: Task, messages: Sequence[Message]) -> Mapping[str, float]:
        return {OUTCOME: float(is_right(task.data["answer"], messages)), **call_facets(messages)}


def check_calculation(environment: str, steps: int, digits: int) -> None:
    """ValueError unless such calculations can be drawn and answered."""
    if steps < 1 or digits < 1 or (steps + 1) * digits >= LONGEST_NUMBER:
        raise ValueError(
            f"{environment}.steps={steps!r} and digits={digits!r}: expected at least 1 each, and "
            f"(steps + 1) * digits below {LONGEST_NUMBER}"
        )


def is_right(answer: str, messages: Sequence[Message]) -> bool:
    """Whether the policy ended with this number."""
    found = final_number(settled_answer(messages))
    return found is not None and found == number_of(answer)


def draw_calculation(drawn: np.random.Generator, *, form: Form, steps: int, digits: int, test: bool) -> tuple[str, int]:
    """A question and its answer, for training or for the test: both forms of a calculation are for the same."""
    while True:
        text, words, value = _drawn(drawn, steps, digits)
        if is_for_test(text) == test:
            break
    question = f"What is {text}?" if form == "expression" else " ".join([*words, "What is the result?"])
    return question, value


def _drawn(drawn: np.random.Generator, steps: int, digits: int) -> tuple[str, list[str], int]:
    """The expression, its steps in words, and the result."""
    low, high = max(2, 10 ** (digits - 1)), 10**digits
    value = int(drawn.integers(low, high))
    text, words = str(value), [f"Start with {value}."]
    for step in range(steps):
        number = int(drawn.integers(low, high))
        # A product first, and a quotient only of much: what comes out is too large to be guessed.
        kinds = ["*", "+", "-"] + (["//"] if abs(value) > 1000 * number else [])
        kind = str(drawn.choice(kinds)) if step else "*"
        value = int(evaluate(f"({value}) {kind} {number}"))
        # A product or quotient after a sum needs the sum in brackets; so does anything that binds as strongly.
        text = f"({text}) {kind} {number}" if kind in ("*", "//") and step else f"{text} {kind} {number}"
        words.append(f"{WORDS[kind].format(number)}.")
    return text, words, value


WORDS = {
    "*": "Multiply by {}",
    "+": "Add {}",
    "-": "Subtract {}",
    "//": "Divide by {}, rounding down to an integer",
}  # fmt: skip
