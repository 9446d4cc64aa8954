"""Generated dialogues about pictures, for fine-tuning: what is done to a picture is written as code.

    zero_vision   no picture is shown. It lies in a Python session as `image`, where it is binarised, measured, counted
                  in and cropped by code; or its SVG stands in the question as text
    text_image    the same questions, code and answers, with the picture shown in place of the SVG or beside the session
    none          the control: the same form, tool and number of dialogues, about numbers; nothing is a picture

Zero-vision fine-tuning is that of Kimi K2.5 (arXiv 2602.02276): text alone is to wake the use of tools on pictures.
Dialogue n is a pure function of (kind, seed, n). The two arms with pictures share seeds: dialogue n asks the same. What
the tool returns is what the code prints: it has been run.
"""

import base64
import contextlib
import hashlib
import io
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from perilune.data.generated import SplitMix
from perilune.data.raster import encode_png
from perilune.data.scenes import COLOURS, Sample, ScenesConfig, make_sample, mask
from perilune.data.scenes import VERSION as SCENES_VERSION

VERSION = 1  # part of the file's name: raise it when the same number gives another dialogue
Kind = Literal["zero_vision", "text_image", "none"]
KINDS: tuple[Kind, ...] = get_args(Kind)
SIZE = 112
SCENES = ScenesConfig(sizes=((SIZE, SIZE),), background_share=0.0)
ASKED = ("count", "box", "spatial", "colour")
"""Tasks of the visual corpus that are asked about a source."""

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Run Python; returns what it prints.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}
SESSION = "The picture is `image` in Python, an array [height, width, 3]. `regions(mask)` counts connected regions."


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One thing done to a picture or to numbers: the question, the thought, the code, and the answer to its output."""

    question: str
    thought: str
    code: str
    answer: Callable[[str], str]


def write_dialogues(kind: Kind, folder: str | Path, *, count: int, seed: int) -> Path:
    """A file of JSON lines with `count` dialogues, written once: its name says all that it is a function of."""
    if kind not in KINDS:
        raise ValueError(f"the kind of dialogues is {kind!r}, expected one of {', '.join(KINDS)}")
    if count < 1:
        raise ValueError(f"count is {count!r}, expected at least 1 dialogue")
    made_of = hashlib.sha256(f"{VERSION} {SCENES_VERSION} {SCENES!r}".encode()).hexdigest()[:8]
    path = Path(folder) / f"{kind}-{count}-{seed}-{made_of}.jsonl"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        with partial.open("w", encoding="utf-8") as file:
            for number in range(count):
                file.write(json.dumps(dialogue(kind, seed=seed, number=number)) + "\n")
        os.replace(partial, path)  # ranks may write it at once: each its own, all the same
    return path


def dialogue(kind: Kind, *, seed: int, number: int) -> dict[str, Any]:
    """Dialogue `number`, as data/dialogues.py reads it."""
    dice = SplitMix(seed, number)
    if kind == "none":
        return _with_tool(None, _sum(dice), {}, system=None)
    shown = kind == "text_image"
    sample = _sample(seed, number)
    pixels = paint(sample)
    picture = _data_url(pixels) if shown else None
    if dice.below(2):
        made = dice.choose((_binarise, _measure, _count, _crop))(dice, sample)
        return _with_tool(picture, made, {"image": pixels, "np": np, "regions": regions}, system=SESSION)
    question = dice.choose([each for each in sample.questions if each.task in ASKED])
    said = question.prompt if shown else f"{sample.svg}\n{question.prompt}"
    return {"messages": [_user(picture, said), {"role": "assistant", "content": question.answer}]}


def _sample(seed: int, number: int) -> Sample:
    """A scene that can be asked something."""
    for attempt in range(1000):
        sample = make_sample(seed, number + (attempt << 32), SCENES)
        if any(question.task in ASKED for question in sample.questions):
            return sample
    raise AssertionError("scenes have questions")


def _with_tool(picture: str | None, made: Operation, session: dict[str, Any], *, system: str | None) -> dict[str, Any]:
    printed = run(made.code, session)
    call = {"name": "python", "arguments": json.dumps({"code": made.code})}
    identity = "functions.python:0"
    first = [] if system is None else [{"role": "system", "content": system}]
    return {
        "messages": [
            *first,
            _user(picture, made.question),
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": made.thought,
                "tool_calls": [{"id": identity, "type": "function", "function": call}],
            },
            {"role": "tool", "tool_call_id": identity, "content": printed},
            {"role": "assistant", "content": made.answer(printed), "reasoning_content": f"It printed {printed}."},
        ],
        "tools": [TOOL],
    }


def _user(picture: str | None, text: str) -> dict[str, Any]:
    if picture is None:
        return {"role": "user", "content": text}
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": picture}},
                                        {"type": "text", "text": text}]}  # fmt: skip


# --- what is done -----------------------------------------------------------------------------------------------------


def _mask_of(colour: str) -> str:
    return f"mask = (image == {COLOURS[colour]}).all(-1)"


def _colour(dice: SplitMix, sample: Sample) -> str:
    return dice.choose(sorted({shape.colour for shape in sample.shapes}))


def _binarise(dice: SplitMix, sample: Sample) -> Operation:
    colour = _colour(dice, sample)
    return Operation(
        question=dice.choose((f"How many pixels are {colour}?", f"Count the {colour} pixels.")),
        thought=f"Binarise by {colour} and sum.",
        code=f"{_mask_of(colour)}\nprint(mask.sum())",
        answer=lambda printed: printed,
    )


def _measure(dice: SplitMix, sample: Sample) -> Operation:
    colour = _colour(dice, sample)
    return Operation(
        question=dice.choose((f"Give the box of all that is {colour}.", f"Which box holds the {colour} pixels?")),
        thought=f"Binarise by {colour} and measure its extent.",
        code=f"{_mask_of(colour)}\ny, x = mask.nonzero()\n"
        "print([*map(int, (x.min(), y.min(), x.max() + 1, y.max() + 1))] if len(x) else [])",
        answer=lambda printed: printed,
    )


def _count(dice: SplitMix, sample: Sample) -> Operation:
    colour = _colour(dice, sample)
    return Operation(
        question=dice.choose((f"How many {colour} regions are there?", f"Count the {colour} regions.")),
        thought=f"Binarise by {colour} and count regions.",
        code=f"{_mask_of(colour)}\nprint(regions(mask))",
        answer=lambda printed: printed,
    )


def _crop(dice: SplitMix, sample: Sample) -> Operation:
    width, height = sample.size
    left, top = dice.below(width // 2), dice.below(height // 2)
    right, bottom = dice.between(left + 8, width), dice.between(top + 8, height)
    names = {value: name for name, value in COLOURS.items()}

    def named(printed: str) -> str:
        return names[tuple(json.loads(printed))]

    return Operation(
        question=f"Which colour covers most of the box [{left}, {top}, {right}, {bottom}]?",
        thought="Crop the box and find its most common colour.",
        code=f"part = image[{top}:{bottom}, {left}:{right}].reshape(-1, 3)\n"
        "colours, counts = np.unique(part, axis=0, return_counts=True)\nprint(colours[counts.argmax()].tolist())",
        answer=named,
    )


def _sum(dice: SplitMix) -> Operation:
    first, second = dice.between(10, 9999), dice.between(10, 9999)
    sign, word = dice.choose((("+", "plus"), ("-", "minus"), ("*", "times")))
    return Operation(
        question=dice.choose((f"What is {first} {word} {second}?", f"Compute {first} {sign} {second}.")),
        thought=f"Let Python say {first} {sign} {second}.",
        code=f"print({first} {sign} {second})",
        answer=lambda printed: printed,
    )


# --- pictures and sessions --------------------------------------------------------------------------------------------


def paint(sample: Sample) -> np.ndarray:
    """uint8 [height, width, 3]: every pixel has the colour of the topmost shape over its centre, no edge is blended."""
    width, height = sample.size
    pixels = np.empty((height, width, 3), dtype=np.uint8)
    pixels[:] = COLOURS[sample.background]
    for shape in sample.shapes:
        pixels[mask(shape, width, height)] = COLOURS[shape.colour]
    return pixels


def regions(chosen: np.ndarray) -> int:
    """How many connected regions (by sides) the true pixels form."""
    left = {(int(y), int(x)) for y, x in zip(*chosen.nonzero())}
    found = 0
    while left:
        found += 1
        waiting = [left.pop()]
        while waiting:
            y, x = waiting.pop()
            for near in ((y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)):
                if near in left:
                    left.remove(near)
                    waiting.append(near)
    return found


def run(code: str, session: dict[str, Any]) -> str:
    """What code of this file prints; never that of anybody else, which needs a sandbox."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, dict(session))
    return printed.getvalue().rstrip("\n")


def _data_url(pixels: np.ndarray) -> str:
    return "data:image/png;base64," + base64.b64encode(encode_png(pixels)).decode()
