"""Pictures as code: the policy sees a picture, or reads what is in it, and writes its SVG; the drawing is compared.

    reward = 0.6 pixel + 0.3 f1 + 0.1 count        (data/picture_scores.py), and 0 for a source that cannot be drawn

A policy that sees dimly finds that a circle is never far wrong, and ends with circles alone (docs/lab_log.md): pixels
and overlap do not ask what a shape is. The facet `kinds` does, 2 x the kinds that both have / (shapes drawn + shapes
there); with `Drawing(kinds=0.3)` it is that share of the reward.

Three ways to ask:
    picture     the picture itself
    words       its shapes with colours and boxes, in words: the same task without looking
    shuffled    another picture than the one that is judged: what can be had without looking at the right one

What the policy writes is a stranger's input: it goes through the guard and the worker that data/pictures.py owns.
"""

import base64
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, Literal, get_args

from perilune.data.picture_scores import score_svg
from perilune.data.raster import rasterize_png
from perilune.data.scenes import Sample, ScenesConfig, Shape, box, make_sample, parse_svg
from perilune.data.scenes.svg import DialectError
from perilune.rl.environment import OUTCOME, Message, Split, Talk, Task, last_answer

Ask = Literal["picture", "words", "shuffled"]
PROMPT = "Write it as SVG."
STRIDE = 1_000_003
"""From a task to the picture that is shown in its place."""


@dataclass(frozen=True, kw_only=True)
class Drawing:
    name: str = "drawing"
    scenes: ScenesConfig = field(default_factory=ScenesConfig)
    ask: Ask = "picture"
    seed: int = 0
    max_tokens: int = 512
    kinds: float = 0.0
    """Share of the reward for shapes of the right kinds; 0: they are looked at and not paid for."""
    judged_apart: ClassVar[bool] = True
    """Drawing and comparing takes milliseconds (judge_processes.py)."""

    def __post_init__(self) -> None:
        if self.ask not in get_args(Ask):
            raise ValueError(f"drawing.ask is {self.ask!r}, expected one of {', '.join(get_args(Ask))}")
        if not 0 <= self.kinds <= 1:
            raise ValueError(f"drawing.kinds is {self.kinds!r}, expected a share of the reward, 0 to 1")
        if set(self.scenes.kinds) & {"html", "animation"}:
            raise ValueError(
                f"drawing.scenes.kinds is {self.scenes.kinds!r}: pages and animations are not judged as drawings"
            )

    def task(self, number: int, split: Split) -> Task:
        sample = self._sample(number, split)
        data: dict[str, Any] = {"svg": sample.svg, "size": list(sample.size), "ask": self.ask}
        if self.ask == "shuffled":
            data["shown"] = _other(sample, (self._sample(number + STRIDE * turn, split) for turn in (1, 2, 3)))
        weights = {OUTCOME: 1.0 - self.kinds, "kinds": self.kinds} if self.kinds else {OUTCOME: 1.0}
        return Task(name=f"{split}/{self.ask}/{number}", data=data, weights=weights)

    async def episode(self, task: Task, talk: Talk) -> None:
        talk.add({"role": "user", "content": _question(task.data)})
        await talk.ask(max_tokens=self.max_tokens)

    def judge(self, task: Task, messages: Sequence[Message]) -> Mapping[str, float]:
        truth = _Truth(task.data["svg"], tuple(task.data["size"]))
        score = score_svg(last_answer(messages), truth)
        return {
            OUTCOME: score.reward,
            "valid": float(score.parses),
            "pixel": score.pixel,
            "f1": score.f1,
            "count": score.count,
            "kinds": _kinds(last_answer(messages), truth.shapes) if score.parses else 0.0,
        }

    def _sample(self, number: int, split: Split) -> Sample:
        return _made(self.seed, number, self.scenes, split == "test")


@lru_cache(maxsize=4096)
def _made(seed: int, number: int, scenes: ScenesConfig, held_out: bool) -> Sample:
    """Made once for all ways to ask: one that is held out takes milliseconds to find."""
    return make_sample(seed, number, scenes, held_out=held_out, with_questions=False)


def _kinds(source: str, true: Sequence[Shape]) -> float:
    """How far the shapes of a source that can be drawn are of the right kinds, wherever they lie."""
    try:
        drawn = Counter(shape.name for shape in parse_svg(source).shapes)
    except DialectError:
        return 0.0
    there = Counter(shape.name for shape in true)
    return 2.0 * (drawn & there).total() / max(1, drawn.total() + there.total())


class _Truth:
    """What scoring needs of a sample, from its source."""

    def __init__(self, svg: str, size: tuple[int, int]) -> None:
        self.svg, self.size = svg, size
        self.shapes: Sequence[Shape] = parse_svg(svg).shapes


def _question(data: Mapping[str, Any]) -> str | list[dict[str, Any]]:
    if data["ask"] == "words":
        return f"{in_words(data['svg'])}\n{PROMPT}"
    return [picture_part(data.get("shown", data["svg"]), tuple(data["size"])), {"type": "text", "text": PROMPT}]


def picture_part(svg: str, size: tuple[int, int]) -> dict[str, Any]:
    """A picture as a part of a message."""
    return {"type": "image_url", "image_url": {"url": _data_url(svg, size)}}


@lru_cache(maxsize=256)
def _data_url(svg: str, size: tuple[int, int]) -> str:
    """Drawn once for all samples of a task."""
    return f"data:image/png;base64,{base64.b64encode(rasterize_png(svg, *size)).decode()}"


def in_words(svg: str) -> str:
    """Size, background and shapes from the lowest to the uppermost, each with its box."""
    picture = parse_svg(svg)
    shapes = [
        f"{shape.colour} {shape.name}{'' if shape.fill != 'none' or shape.kind == 'line' else ' (outline)'} "
        f"in [{', '.join(map(str, box(shape)))}]"
        for shape in picture.shapes
    ]
    return f"A picture of {picture.width} x {picture.height} pixels, {picture.background}: {'; '.join(shapes)}."


def _other(sample: Sample, others: Iterable[Sample]) -> str:
    """The source of the first that differs and has the same size, else of the first that differs."""
    different = None
    for other in others:
        if other.svg != sample.svg:
            if other.size == sample.size:
                return other.svg
            different = different or other.svg
    return different or sample.svg
