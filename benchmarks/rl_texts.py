"""What the models of benchmarks/rl_base.py read: texts for the base, dialogues for fine-tuning. No script of its own.

    texts(seed, count)                   documents: pictures in words with their SVG, sums, word problems worked out,
                                         puzzles, calculations with a calculator's answer
    write_dialogues(kind, path, ...)     three arms that differ in pictures alone (data/picture_dialogues.py):
        zero_vision    SVG as text, words to SVG, image operations as code: no picture is shown
        text_image     the same questions and answers with the picture shown
        none           numbers in their place: nothing is a picture
                                         and share word problems and calls of a calculator

A word problem has one to three steps and is worked out at length, in short or as numbers alone: reinforcement learning
finds answers of different lengths to choose from, and problems that it can begin with. Calculations have one to three
steps too; one dialogue of four tells them in words. Tasks are those of the environments' train split, far from the
numbers that it draws from; the spatial probe (eval/spatial.py) occurs nowhere.
"""

import json
import os
import re
from collections.abc import Iterator
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

SCENES = ScenesConfig()
LEVELS = (1, 2, 3)
"""Of word problems: steps. Of calculations: steps, with numbers of a digit more."""
PROBLEMS = {level: WordProblems(steps=level) for level in LEVELS}
SUMS = Arithmetic(terms=2, digits=2)
CALCULATIONS = {level: Calculator(steps=level, digits=level + 1) for level in LEVELS}
TOLD = {level: replace(each, form="steps") for level, each in CALCULATIONS.items()}
PUZZLES = Logic()
FAR = 10_000_000
"""Numbers of tasks from here on: reinforcement learning draws from the first few thousand."""
HOW_LONG = ("long", "long", "long", "long", "short", "short", "short", "bare")
"""Numbers alone are wrong more often than the others: they are rare."""
_STEPS = (
    (re.compile(r"gives (\d+) of them"), "-"),
    (re.compile(r"gets (\d+) bags with (\d+)"), "bags"),
    (re.compile(r"buys (\d+) more"), "+"),
    (re.compile(r"doubles"), "double"),
)


# Word problems ------------------------------------------------------------------------------------------------------


def worked_out(question: str, how: str) -> str:
    """The solution of a generated word problem, "long", "short" or "bare"; it ends with the number after ####."""
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
        else:
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
    question = PROBLEMS[dice.choose(LEVELS)].task(number, "train").data["question"]
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
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with partial.open("w", encoding="utf-8") as file:
        for number in range(count):
            file.write(json.dumps(lesson(kind, seed=seed, number=number)) + "\n")
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


def _drawing(kind: Kind, number: int) -> dict[str, Any]:
    sample = make_sample(FAR + 1, number, SCENES)
    asked: Any = f"{in_words(sample.svg)}\n{PROMPT}"
    if kind == "text_image":
        asked = [picture_part(sample.svg, sample.size), {"type": "text", "text": PROMPT}]
    return _said(asked, sample.svg)


def _problem(dice: SplitMix, number: int) -> dict[str, Any]:
    problems = PROBLEMS[dice.choose(LEVELS)]
    question = problems.task(2 * FAR + number, "train").data["question"]
    return _said(f"{question}\n{problems.instruction}".strip(), worked_out(question, dice.choose(HOW_LONG)))


def _direct_sum(number: int) -> dict[str, Any]:
    """A calculation that needs no tool, asked as those that do: the call is not all that is learnt."""
    task = SUMS.task(2 * FAR + number, "train")
    said = _said(f"What is {task.data['text']}?\n{FINAL}", f"#### {task.data['answer']}")
    return said | {"tools": [CALCULATOR.plain()]}


def _calculation(dice: SplitMix, number: int) -> dict[str, Any]:
    level, is_told = dice.choose(LEVELS), dice.below(4) == 0
    # The same draws: what is told in words has the other's expression.
    plain, told = (each[level].task(2 * FAR + number, "train") for each in (CALCULATIONS, TOLD))
    task = told if is_told else plain
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
