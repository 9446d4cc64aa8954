"""Questions that are answered by calling tools, over several turns: a calculator and, in the sandbox, Python.

    ToolUse()                                      the calculator alone
    ToolUse(tools=("calculator", "python"))        both; refused where no sandbox starts

With Python come questions that a calculator does not answer: sums over primes, counts over ranges, long chains. The
policy calls as often as it likes, up to `max_turns`, several calls in one turn included; every call is answered, wrong
ones with what is wrong. The last message without a call is the answer.

Facets: outcome, called (1 if a call gave a result) and calls. A program of the policy is run again when an episode is
continued: one that prints the time or random numbers cannot be, and costs its own episode.
"""

import asyncio
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from perilune.rl.environment import OUTCOME, Message, Split, Talk, Task, draws
from perilune.rl.environments.calculator import (
    CALCULATOR,
    FINAL,
    Form,
    check_calculation,
    draw_calculation,
    is_right,
)
from perilune.rl.environments.code import missing_sandbox
from perilune.rl.environments.code_exchange import ENVIRONMENT, remove
from perilune.rl.environments.tool_calls import CallFailed, Tool, call_facets, converse
from perilune.swarm.sandbox import Limits, SandboxUnavailable, open_sandbox
from perilune.swarm.sandbox.interpreter import find_interpreter

LIMITS = Limits(wall_seconds=20, cpu_seconds=5, memory_bytes=256 << 20, processes=8, disk_bytes=16 << 20,
                output_bytes=1 << 16)  # fmt: skip
LONGEST_PROGRAM = 100_000
MODULUS = 99_991


async def run_python(code: str) -> str:
    """What a program prints, run alone in a sandbox of its own; CallFailed for one that fails or prints nothing."""
    if len(code) > LONGEST_PROGRAM:
        raise CallFailed(f"the program has {len(code)} characters, expected at most {LONGEST_PROGRAM}")
    folder = Path(tempfile.mkdtemp(prefix="perilune-python-"))
    try:
        # The program comes through stdin: an argument could not hold a long one.
        argv = [find_interpreter().base_executable, "-s", "-S", "-P", "-"]
        source = code.encode("utf-8", "replace") or b"\n"
        done = await open_sandbox(folder).run(argv, stdin=source, env=ENVIRONMENT, limits=LIMITS)
    finally:
        await asyncio.to_thread(remove, folder)
    printed = done.stdout.decode("utf-8", "replace").strip()
    if done.stopped:
        raise CallFailed(f"the program was stopped: {done.stopped}")
    if done.exit_code:
        raise CallFailed(f"the program failed\n{done.stderr.decode('utf-8', 'replace').strip()}")
    if not printed:
        raise CallFailed("the program printed nothing; print the result")
    return printed


PYTHON = Tool(
    name="python",
    description="Runs a Python program and gives what it prints.",
    arguments={"code": "a whole program, for example print(sum(range(10)))"},
    call=run_python,
)
TOOLS: Mapping[str, Tool] = {tool.name: tool for tool in (CALCULATOR, PYTHON)}


@dataclass(frozen=True, kw_only=True)
class ToolUse:
    name: str = "tool_use"
    tools: tuple[str, ...] = ("calculator",)
    max_turns: int = 6
    max_tokens: int = 256
    """Of one turn."""
    called: float = 0.0
    """What a successful call counts for in the reward, beside the outcome."""
    steps: int = 3
    """Of a question that the calculator answers."""
    digits: int = 4
    """Of the numbers in it."""

    def __post_init__(self) -> None:
        check_calculation("tool_use", self.steps, self.digits)
        if not self.tools or not set(self.tools) <= set(TOOLS) or len(set(self.tools)) != len(self.tools):
            raise ValueError(f"tool_use.tools is {self.tools!r}, expected some of {', '.join(TOOLS)}, each once")
        if self.max_turns < 2:
            raise ValueError(f"tool_use.max_turns is {self.max_turns!r}, expected at least 2: a call and an answer")
        if "python" in self.tools and (problem := missing_sandbox()):
            raise SandboxUnavailable(
                f"tool_use.tools holds python, which runs in a sandbox, and none starts here: {problem}. "
                "Without one, use tools=('calculator',)"
            )

    def task(self, number: int, split: Split) -> Task:
        drawn = draws(self.name, split, number)
        kinds = [kind for name in self.tools for kind in self._questions(name)]
        text, answer = kinds[number % len(kinds)](drawn, test=split == "test")
        weights = {OUTCOME: 1.0} | ({"called": self.called} if self.called else {})
        return Task(name=text, data={"text": text, "answer": str(answer)}, weights=weights)

    async def episode(self, task: Task, talk: Talk) -> None:
        talk.add({"role": "user", "content": f"{task.data['text']}\n{FINAL}"})
        tools = [TOOLS[name] for name in self.tools]
        await converse(talk, tools, max_turns=self.max_turns, max_tokens=self.max_tokens)

    def judge(self, task: Task, messages: Sequence[Message]) -> Mapping[str, float]:
        return {OUTCOME: float(is_right(task.data["answer"], messages)), **call_facets(messages)}

    def _questions(self, tool: str) -> "Sequence[Question]":
        if tool == "python":
            return PYTHON_QUESTIONS
        forms: tuple[Form, ...] = ("expression", "steps")
        return [partial(draw_calculation, form=form, steps=self.steps, digits=self.digits) for form in forms]


# Questions for Python: the first number is even in training ones and odd in test ones ---------------------------------


def _first(drawn: np.random.Generator, test: bool) -> int:
    return 2 * int(drawn.integers(50, 1000)) + test


def _primes(drawn: np.random.Generator, *, test: bool) -> tuple[str, int]:
    first = _first(drawn, test)
    last = first + int(drawn.integers(200, 1500))
    answer = sum(n for n in range(first, last + 1) if all(n % d for d in range(2, int(n**0.5) + 1)))
    return f"What is the sum of all primes from {first} to {last}?", answer


def _counted(drawn: np.random.Generator, *, test: bool) -> tuple[str, int]:
    first = _first(drawn, test)
    last = first + int(drawn.integers(500, 5000))
    divisor, digit = int(drawn.integers(3, 14)), int(drawn.integers(0, 10))
    answer = sum(n % divisor == 0 or str(digit) in str(n) for n in range(first, last + 1))
    return (
        f"How many integers from {first} to {last} are divisible by {divisor} or have the digit {digit} in them?",
        answer,
    )


def _chain(drawn: np.random.Generator, *, test: bool) -> tuple[str, int]:
    first, times = _first(drawn, test), int(drawn.integers(30, 200))
    factor, more = int(drawn.integers(11, 100)), int(drawn.integers(11, 100))
    value = first
    for _ in range(times):
        value = (factor * value + more) % MODULUS
    return (
        f"Start with {first} and do this {times} times: multiply by {factor}, add {more}, and take the remainder "
        f"modulo {MODULUS}. Which number comes out?",
        value,
    )


Question = Callable[..., tuple[str, int]]
"""Of the random numbers of a task, and `test`: a text and its answer."""
PYTHON_QUESTIONS: Sequence[Question] = (_primes, _counted, _chain)
