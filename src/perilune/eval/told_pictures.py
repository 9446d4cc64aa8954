"""Pictures told in text, and questions as pre-training asks them: what a model without eyes knows of them.

    A picture of 112 x 112 pixels, white: yellow ellipse in [13, 23, 51, 77]; green circle in ...
    <svg ...>
    A yellow ellipse, a green circle, ... on a white background.
    Is the green circle larger than the brown diamond?                              yes or no

    spatial   further left, higher, larger, touching or inside           yes, no
    count     all of them, or those of a kind or a colour                0 to 6
    colour    of the only shape of a kind                                all colours

A small model answers questions in a form that it has read; eval/spatial.py asks in forms that nobody has trained on,
and finds such a model guessing. Pictures are held out, the form is not. Item n is a pure function of (seed, n), and
spatial answers are yes as often as no. The score of an item is the log-prob of the right answer among its choices:
nothing is sampled, and a change shows there long before it turns an answer.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count as counted
from typing import Any, Literal, get_args

import numpy as np

from perilune.data.scenes import Sample, ScenesConfig, make_sample
from perilune.data.tokenizer import Tokenizer
from perilune.eval.spatial import ROW_TOKENS, Document, documents_log_probs
from perilune.model import Decoder
from perilune.rl.environments.drawing import in_words

Kind = Literal["spatial", "count", "colour"]
KINDS: tuple[Kind, ...] = get_args(Kind)
COUNT = 1000
SEED = 0x746F6C64
"""Of the pictures: another than anything else draws with."""
_CHOICES: dict[str, tuple[str, ...]] = {
    "spatial": ("yes", "no"), "count": tuple(map(str, range(7))), "colour": ScenesConfig().colours,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ToldItem:
    kind: Kind
    text: str
    choices: tuple[str, ...]
    answer: int
    """Which of the choices."""


@dataclass(frozen=True, kw_only=True)
class ToldScore:
    log_probs: tuple[float, ...]
    """Of the right answer among the choices, of every item."""
    right: tuple[bool, ...]
    kinds: tuple[Kind, ...]

    def plain(self) -> dict[str, Any]:
        """JSON; log-probs rounded to what an interval can see."""
        kinds = np.array(self.kinds)
        return {
            "items": len(self.right),
            "log_probs": [round(value, 4) for value in self.log_probs],
            "log_prob": float(np.mean(self.log_probs)),
            "accuracy": float(np.mean(self.right)),
            "by_kind": {
                kind: {
                    "accuracy": float(np.mean(np.array(self.right)[kinds == kind])),
                    "log_prob": float(np.mean(np.array(self.log_probs)[kinds == kind])),
                    "items": int((kinds == kind).sum()),
                }
                for kind in KINDS
                if (kinds == kind).any()
            },
        }


def told_items(count: int = COUNT, *, seed: int = 0) -> list[ToldItem]:
    """Three of five are spatial, half of these yes; the others take turns."""
    if count < 1:
        raise ValueError(f"count is {count!r}, expected at least 1 item")
    turns: list[tuple[Kind, str | None]] = [
        ("spatial", "yes"), ("count", None), ("spatial", "no"), ("colour", None), ("spatial", "yes"),
        ("spatial", "no"), ("count", None), ("spatial", "yes"), ("colour", None), ("spatial", "no"),
    ]  # fmt: skip
    wanted = [turns[number % len(turns)] for number in range(count)]
    waiting: dict[tuple[Kind, str | None], deque[ToldItem]] = {turn: deque() for turn in turns}
    samples = (make_sample(SEED + seed, number, ScenesConfig(), held_out=True) for number in counted())
    found = []
    for turn in wanted:
        while not waiting[turn]:
            for item in _items(next(samples)):
                waiting[item.kind, item.choices[item.answer] if item.kind == "spatial" else None].append(item)
        found.append(waiting[turn].popleft())
    return found


def _items(sample: Sample) -> Iterator[ToldItem]:
    for question in sample.questions:
        kind = next((each for each in KINDS if each == question.task), None)
        if kind is not None and question.answer in _CHOICES[kind]:
            choices = _CHOICES[kind]
            text = f"{_told(sample)}\n{question.prompt}"
            yield ToldItem(kind=kind, text=text, choices=choices, answer=choices.index(question.answer))


def _told(sample: Sample) -> str:
    return "\n".join((in_words(sample.svg), sample.svg, sample.caption))


def told_score(
    model: Decoder, tokenizer: Tokenizer, items: Sequence[ToldItem], *, row_tokens: int = ROW_TOKENS
) -> ToldScore:
    documents = [_document(tokenizer, item.text, choice) for item in items for choice in item.choices]
    found = iter(documents_log_probs(model, documents, row_tokens=row_tokens))
    scores = [np.array([next(found) for _ in item.choices]) for item in items]
    return ToldScore(
        log_probs=tuple(
            float(each[item.answer] - np.logaddexp.reduce(each)) for each, item in zip(scores, items, strict=True)
        ),
        right=tuple(int(np.argmax(each)) == item.answer for each, item in zip(scores, items, strict=True)),
        kinds=tuple(item.kind for item in items),
    )


def _document(tokenizer: Tokenizer, text: str, answer: str) -> Document:
    before, after = [tokenizer.special_ids["[BOS]"], *tokenizer.encode(text)], tokenizer.encode(f" {answer}")
    return [*before, *after], [*(False for _ in before), *(True for _ in after)]
