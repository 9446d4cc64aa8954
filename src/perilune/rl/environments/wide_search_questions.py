"""Questions about the library: one grammar for a lookup, a wide table and a chain.

    Find the length of the bridge Amber Falcon.
    Find the length of each bridge: Amber Falcon, Silver Gate, Grey Oak.
    Find the mayor of the place of each bridge: Amber Falcon, Silver Gate.                       two hops for each
    Find the trade of the teacher of the captain of the ship Empty Bell.                         a chain

A path is read from its end: of the ship the captain, of this person the teacher, of that one the trade. Every value but
the last names the page that comes next, so the hops of one item cannot be done at the same time; items can.
"""

import re
from dataclasses import dataclass
from typing import Literal

import numpy as np

from perilune.rl.environment import Split
from perilune.rl.environments.wide_search_corpus import KINDS, REFERENCES, Corpus

TaskKind = Literal["wide", "narrow", "chain"]
WIDE, NARROW, CHAIN = (8, 16), (1, 3), (3, 4)
"""Least and most items of a wide and a narrow question; least and most hops of a chain."""
STEPS_PER_HOP = 2
"""A search and a page."""
_NAME = r"[A-Z]\w* [A-Z]\w*"
_QUESTION = re.compile(
    rf"Find the (?P<path>[a-z]+(?: of the [a-z]+)*?) of (?:the (?P<one>{'|'.join(KINDS)}) (?P<name>{_NAME})"
    rf"|each (?P<many>{'|'.join(KINDS)}): (?P<names>{_NAME}(?:, {_NAME})*))\."
)


@dataclass(frozen=True, kw_only=True)
class Question:
    kind: str
    """Of the things it names."""
    names: tuple[str, ...]
    path: tuple[str, ...]
    """Attributes from the named thing on: ("captain", "teacher", "trade")."""

    @property
    def text(self) -> str:
        what = " of the ".join(reversed(self.path))
        if len(self.names) == 1:
            return f"Find the {what} of the {self.kind} {self.names[0]}."
        return f"Find the {what} of each {self.kind}: {', '.join(self.names)}."

    @property
    def oracle_steps(self) -> int:
        """Of one agent that never errs."""
        return STEPS_PER_HOP * len(self.path) * len(self.names)

    def one(self, name: str) -> "Question":
        """The same about a single thing."""
        return Question(kind=self.kind, names=(name,), path=self.path)


def parse_question(text: str) -> Question | None:
    """The question that is all of the text; None for any other text."""
    found = _QUESTION.fullmatch(text.strip())
    if found is None:
        return None
    kind = found["one"] or found["many"]
    names = (found["name"],) if found["name"] else tuple(found["names"].split(", "))
    path = tuple(reversed(found["path"].split(" of the ")))
    at: str | None = kind
    for attribute in path:
        if at is None or attribute not in KINDS[at]:
            return None
        at = REFERENCES.get(attribute)
    return Question(kind=kind, names=names, path=path)


def draw_question(
    corpus: Corpus, task: TaskKind, split: Split, drawn: np.random.Generator, *, two_hops: float
) -> Question:
    """A question about things of the split. `two_hops`: how often an item of a wide or narrow one takes two."""
    kind = str(drawn.choice(list(KINDS)))
    if task == "chain":
        names, path = 1, _path(kind, int(drawn.integers(CHAIN[0], CHAIN[1] + 1)), drawn)
    else:
        low, high = WIDE if task == "wide" else NARROW
        names = int(drawn.integers(low, high + 1))
        path = _path(kind, 2 if drawn.random() < two_hops else 1, drawn)
    chosen = drawn.choice(corpus.of(kind, split), names, replace=False)
    return Question(kind=kind, names=tuple(corpus.name(int(entity)) for entity in chosen), path=path)


def truth_of(corpus: Corpus, question: Question) -> list[tuple[str, str]]:
    """Items and their values, as the library has them."""
    found = []
    for name in question.names:
        last = corpus.follow(corpus.by_name[question.kind, name], question.path)[-1]
        found.append((name, corpus.value(last, question.path[-1])))
    return found


def _path(kind: str, hops: int, drawn: np.random.Generator) -> tuple[str, ...]:
    path, at = list[str](), kind
    for hop in range(hops):
        names = [name for name in KINDS[at] if hop == hops - 1 or name in REFERENCES]
        path.append(str(drawn.choice(names)))
        at = REFERENCES.get(path[-1], at)
    return tuple(path)
