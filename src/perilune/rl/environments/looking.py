"""Questions about pictures with true answers: counting, grounding, reading, charts, places and colours.

    count      1 - |error| / (1 + true count), from 0
    box        F1 of the boxes in the reply, matched by IoU
    ocr        1 - edit distance / length of the longer text, letters of both cases alike
    others     1 if the answer is the same word or number (spatial, chart, colour)

Pictures and questions come from data/scenes; the split test is made of pictures that training never shows. `shuffled`
shows another picture than the one that is asked about: what can be had without looking.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perilune.data.matching import box_f1, text_similarity
from perilune.data.scenes import Sample, ScenesConfig, make_sample
from perilune.rl.environment import OUTCOME, Message, Split, Talk, Task, last_answer
from perilune.rl.environments.drawing import STRIDE, picture_part

TASKS = ("count", "box", "ocr", "spatial", "chart", "colour")
MOST_BOXES = 64
LONGEST_REPLY = 4096
"""Characters of a reply that are read."""
PATIENCE = 200
"""Pictures that are looked at for one that can be asked what is wanted."""
_BOX = re.compile(r"\[\s*(-?[0-9]{1,6})\s*,\s*(-?[0-9]{1,6})\s*,\s*(-?[0-9]{1,6})\s*,\s*(-?[0-9]{1,6})\s*\]")
_WHOLE = re.compile(r"-?[0-9]{1,12}")


@dataclass(frozen=True, kw_only=True)
class Looking:
    name: str = "looking"
    tasks: tuple[str, ...] = ("count",)
    scenes: ScenesConfig = field(default_factory=ScenesConfig)
    shuffled: bool = False
    seed: int = 0
    max_tokens: int = 128

    def __post_init__(self) -> None:
        if not self.tasks or not set(self.tasks) <= set(TASKS):
            raise ValueError(f"looking.tasks is {self.tasks!r}, expected some of {', '.join(TASKS)}")
        if set(self.scenes.kinds) & {"html", "animation"}:
            raise ValueError(f"looking.scenes.kinds is {self.scenes.kinds!r}: expected still pictures")

    def task(self, number: int, split: Split) -> Task:
        wanted = self.tasks[number % len(self.tasks)]
        for turn in range(PATIENCE):
            sample = self._sample(number + STRIDE * turn, split)
            asked = [question for question in sample.questions if question.task == wanted]
            if asked:
                break
        else:
            raise ValueError(
                f"looking: none of {PATIENCE} pictures of the kinds {self.scenes.kinds!r} can be asked {wanted!r}: "
                "take other kinds"
            )
        question = asked[number % len(asked)]
        data: dict[str, Any] = {
            "task": wanted, "prompt": question.prompt, "answer": question.answer, "svg": sample.svg,
            "size": list(sample.size),
        }  # fmt: skip
        if self.shuffled:
            data["svg"] = self._sample(number + STRIDE * (turn + 1), split).svg
        return Task(name=f"{split}/{'shuffled/' if self.shuffled else ''}{wanted}/{number}", data=data)

    async def episode(self, task: Task, talk: Talk) -> None:
        picture = picture_part(task.data["svg"], tuple(task.data["size"]))
        talk.add({"role": "user", "content": [picture, {"type": "text", "text": task.data["prompt"]}]})
        await talk.ask(max_tokens=self.max_tokens)

    def judge(self, task: Task, messages: Sequence[Message]) -> Mapping[str, float]:
        value = closeness(task.data["task"], last_answer(messages)[:LONGEST_REPLY], task.data["answer"])
        return {OUTCOME: value, "exact": float(value == 1.0)}

    def _sample(self, number: int, split: Split) -> Sample:
        return make_sample(self.seed, number, self.scenes, held_out=split == "test")


def closeness(task: str, reply: str, answer: str) -> float:
    """How near a reply is to the true answer, in [0, 1]."""
    if task == "count":
        found = _WHOLE.findall(reply)
        true = int(answer)
        return max(0.0, 1.0 - abs(int(found[-1]) - true) / (1 + true)) if found else 0.0
    if task == "box":
        predicted = [tuple(map(int, found)) for found in _BOX.findall(reply)[: MOST_BOXES + 1]]
        # A reply that lists boxes without end is no answer, and matching them would take long.
        return box_f1(predicted, boxes_of(answer)) if len(predicted) <= MOST_BOXES else 0.0
    if task == "ocr":
        return text_similarity(_plain(reply), _plain(answer))
    return float(_last_word(reply) == _plain(answer) or _plain(reply) == _plain(answer))


def boxes_of(text: str) -> list[tuple[float, ...]]:
    return [tuple(float(number) for number in found) for found in _BOX.findall(text)]


def _plain(text: str) -> str:
    return " ".join(text.split()).strip(".! ").casefold()


def _last_word(reply: str) -> str:
    words = _plain(reply).split()
    return words[-1] if words else ""
