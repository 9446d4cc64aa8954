"""What the models of benchmarks/rl_base.py read: texts for the base, dialogues for fine-tuning. No script of its own.

    texts(seed, count)                   documents: pictures in words with their SVG, sums, word problems worked out,
                                         puzzles, calculations with a calculator's answer
    write_mini(path, ...)                dialogues of word problems and calculations alone, for a CPU
    write_dialogues(kind, path, ...)     three arms that differ in pictures alone (data/picture_dialogues.py):
        zero_vision    SVG as text, words to SVG, image operations as code: no picture is shown
        text_image     the same questions and answers with the picture shown
        none           numbers in their place: nothing is a picture
                                         and share word problems and calls of a calculator

Dialogues are right and of unequal use, so that reinforcement learning has something to find that holds for all tasks:
what a small model does not know about single numbers, a few thousand samples do not teach it (docs/lab_log.md).

    word problems   one to three steps; four of ten are answered at once, the others worked out at length or in short:
                    to work it out pays, and half of the words at length do nothing
    calculations    one to three steps, as an expression or told in words; what is told is answered at once three times
                    of four, which no model can: to write the expression and call the calculator pays

Tasks are those of the environments' train split, far from the numbers that it draws from; the spatial probe
(eval/spatial.py) occurs nowhere.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from perilune.data.generated import SplitMix
from perilune.data.picture_dialogues import Kind, dialogue
from perilune.data.scenes import ScenesConfig, make_sample
from perilune.rl.environments.arithmetic import Arithmetic
from perilune.rl.environments.calculator import CALCULATOR, FINAL, Calculator
from perilune.rl.environments.drawing import PROMPT, in_words, picture_part
from perilune.rl.environments.logic import Logic
from perilune.rl.environments.word_problems import WordProblems

LESSONS = 2
"""Counted up when dialogues change, so that a file of earlier ones is not taken for these."""
SCENES = ScenesConfig()
LEVELS = (1, 2, 3)
"""Of calculations: steps, with numbers of a digit more."""
PROBLEMS = {
    1: WordProblems(steps=1, largest=24),
    2: WordProblems(steps=2, largest=24),
    3: WordProblems(steps=3, largest=24),
    4: WordProblems(steps=3),
}
"""Word problems by level."""
MINI_PROBLEMS, MINI_CALCULATIONS = (2, 3), (1,)
"""Levels that a model of a few hundred thousand parameters learns within minutes on one core."""
SUMS = Arithmetic(terms=2, digits=2)
CALCULATIONS = {level: Calculator(steps=level, digits=level + 1) for level in LEVELS}
TOLD = {level: replace(each, form="steps") for level, each in CALCULATIONS.items()}
PUZZLES = Logic()
FAR = 10_000_000
"""Numbers of tasks from here on: reinforcement learning draws from the first few thousand."""
HOW_LONG = ("long", "long", "long", "long", "short", "short", "short", "bare")
"""In texts of the base."""
HOW_SAID = (*("direct",) * 4, *("long",) * 3, *("short",) * 3)
"""In dialogues. To answer at once is the most frequent beginning, so a greedy model does."""
_STEPS = (
    (re.compile(r"gives (\d+) of them"), "-"),
    (re.compile(r"gets (\d+) bags with (\d+)"), "bags"),
    (re.compile(r"buys (\d+) more"), "+"),
    (re.compile(r"doubles"), "double"),
)


# Word problems ------------------------------------------------------------------------------------------------------


def worked_out(question: str, how: str) -> str:
    """The solution of a generated word problem, "long", "short", "bare" (a number for every step) or "direct" (nothing
    but the last one); it ends with the number after ####."""
    stock = int(re.findall(r"has (\d+)", question)[0])
    lines = [f"We start with {stock}."] if how == "long" else []
    for sentence in re.split(r"(?<=\.) ", question)[1:-1]:
        before, sums = stock, []
        kind, numbers = _step(sentence)
        if kind == "bags":
            more = numbers[0] * numbers[1]
            sums.append(f"{numbers[0]} * {numbers[1]} = {more}")
            stock += more
            sums.append(f"{before} + {more} = {stock}")
        elif kind == "double":
            stock *= 2
            sums.append(f"{before} * 2 = {stock}")
        else:
            stock += numbers[0] if kind == "+" else -numbers[0]
            sums.append(f"{before} {kind} {numbers[0]} = {stock}")
        if how == "long":
            lines.append(f"Now: {sentence} So we compute {', and '.join(sums)}. That leaves {stock} at this point.")
        elif how == "short":
            lines.append("; ".join(sums) + ".")
        elif how == "bare":
            lines.append(str(stock))
    return "\n".join([*lines, f"#### {stock}"])


def _step(sentence: str) -> tuple[str, list[int]]:
    for pattern, kind in _STEPS:
        if found := pattern.search(sentence):
            return kind, [int(each) for each in found.groups()]
    raise ValueError(f"{sentence!r} is no sentence of a word problem")


# Texts of the base ----------------------------------------------------------------------------------------------------


def texts(seed: int, count: int) -> Iterator[str]:
    """`count` documents; the same for the same seed."""
    makers = (_picture_text, _picture_text, _problem_text, _sums_text, _puzzle_text, _calculation_text)
    for number in range(count):
        yield makers[number % len(makers)](SplitMix(seed, number), FAR + seed * 1_000_003 + number)


def _picture_text(dice: SplitMix, number: int) -> str:
    sample = make_sample(FAR, number, SCENES)
    facts = [f"{question.prompt} {question.answer}" for question in sample.questions]
    parts = [in_words(sample.svg), sample.svg, sample.caption, *facts]
    return "\n".join(parts if dice.below(2) else [parts[1], parts[0], *parts[2:]])


def _problem_text(dice: SplitMix, number: int) -> str:
    question = PROBLEMS[dice.choose(tuple(PROBLEMS))].task(number, "train").data["question"]
    return f"{question}\n{worked_out(question, dice.choose(HOW_LONG))}"


def _sums_text(dice: SplitMix, number: int) -> str:
    tasks = [SUMS.task(number + FAR * place, "train") for place in range(12)]
    return "\n".join(f"{task.data['text']} = {task.data['answer']}" for task in tasks)


def _puzzle_text(dice: SplitMix, number: int) -> str:
    task = PUZZLES.task(number, "train")
    return f"{task.data['text']}\n{', '.join(task.data['answer'])}"


def _calculation_text(dice: SplitMix, number: int) -> str:
    lines = []
    for place in range(4):
        task = CALCULATIONS[dice.choose(LEVELS)].task(number + FAR * place, "train")
        lines.append(f"{task.data['text']}\ncalculator {_expression(task.data['text'])}\n-> {task.data['answer']}")
    return "\n".join(lines)


def _expression(question: str) -> str:
    return question.removeprefix("What is ").removesuffix("?")


# Dialogues ------------------------------------------------------------------------------------------------------------


def write_dialogues(kind: Kind, path: Path, *, count: int, seed: int) -> Path:
    """A file of JSON lines, complete or absent."""
    return _written(path, (lesson(kind, seed=seed, number=number) for number in range(count)))


def write_mini(path: Path, *, count: int, seed: int) -> Path:
    """The same without pictures and with the easiest levels alone: three word problems for each calculation."""
    return _written(path, (mini_lesson(seed=seed, number=number) for number in range(count)))


def _written(path: Path, lessons: Iterable[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with partial.open("w", encoding="utf-8") as file:
        for each in lessons:
            file.write(json.dumps(each) + "\n")
    os.replace(partial, path)
    return path


def lesson(kind: Kind, *, seed: int, number: int) -> dict[str, Any]:
    """Dialogue `number` of an arm. Three of eight are about pictures (in the arm none: about numbers)."""
    dice, turn = SplitMix(seed, number), number % 8
    if turn < 2:
        return dialogue(kind, seed=seed, number=number)
    if turn == 2 and kind != "none":
        return _drawing(kind, number)
    if turn < 6:
        return _problem(dice, number)
    return _direct_sum(number) if dice.below(3) == 0 else _calculation(dice, number)


def mini_lesson(*, seed: int, number: int) -> dict[str, Any]:
    dice = SplitMix(seed, number)
    return _calculation(dice, number, MINI_CALCULATIONS) if number % 4 == 0 else _problem(dice, number, MINI_PROBLEMS)


def _drawing(kind: Kind, number: int) -> dict[str, Any]:
    sample = make_sample(FAR + 1, number, SCENES)
    asked: Any = f"{in_words(sample.svg)}\n{PROMPT}"
    if kind == "text_image":
        asked = [picture_part(sample.svg, sample.size), {"type": "text", "text": PROMPT}]
    return _said(asked, sample.svg)


def _problem(dice: SplitMix, number: int, levels: Sequence[int] = tuple(PROBLEMS)) -> dict[str, Any]:
    problems = PROBLEMS[dice.choose(levels)]
    question = problems.task(2 * FAR + number, "train").data["question"]
    return _said(f"{question}\n{problems.instruction}".strip(), worked_out(question, dice.choose(HOW_SAID)))


def _direct_sum(number: int) -> dict[str, Any]:
    """A calculation that needs no tool, asked as those that do: the call is not all that is learnt."""
    task = SUMS.task(2 * FAR + number, "train")
    said = _said(f"What is {task.data['text']}?\n{FINAL}", f"#### {task.data['answer']}")
    return said | {"tools": [CALCULATOR.plain()]}


def _calculation(dice: SplitMix, number: int, levels: Sequence[int] = LEVELS) -> dict[str, Any]:
    level, is_told, is_called = dice.choose(levels), dice.below(2) == 0, dice.below(4) == 0
    # The same draws: what is told in words has the other's expression.
    plain, told = (each[level].task(2 * FAR + number, "train") for each in (CALCULATIONS, TOLD))
    task = told if is_told else plain
    if is_told and not is_called:
        return _said(f"{task.data['text']}\n{FINAL}", f"#### {task.data['answer']}") | {"tools": [CALCULATOR.plain()]}
    call = {"name": CALCULATOR.name, "arguments": json.dumps({"expression": _expression(plain.data["text"])})}
    identity = f"functions.{CALCULATOR.name}:0"
    messages = [
        {"role": "user", "content": f"{task.data['text']}\n{FINAL}"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": identity, "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": identity, "content": task.data["answer"]},
        {"role": "assistant", "content": f"#### {task.data['answer']}"},
    ]
    return {"messages": messages, "tools": [CALCULATOR.plain()], "thinking": False}


def _said(asked: Any, answer: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "thinking": False}
