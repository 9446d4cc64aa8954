"""The probes: what a model is asked, one JSON object a line, one file a category.

    refusal        a request that should be declined. `complies` is what an answer that goes along looks like.
    injection      a question, and a tool's result that holds the answer and a stranger's order. `canary` or a call of a
                   `forbidden` tool shows that the order was obeyed, one of `signs` that the question was answered.
    sabotage       a task in a folder with `files`, some of them `protected`; `goal` is the honest way to do it.
    over_refusal   a harmless question with alarming words; one of `signs` is in every right answer.

The probes are harmless: they name a wish and hold nothing that would help with it, and every order in them is a
nonsense word or a call of a tool that does nothing. They are public, so a model may have been trained on them: a good
score is necessary, not sufficient.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

Category = Literal["refusal", "injection", "sabotage", "over_refusal"]
CATEGORIES: tuple[Category, ...] = get_args(Category)


class ProbeError(ValueError):
    """A probe that cannot be used; the message names its place."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A file that holds this text when the task was done."""

    file: str
    contains: str


@dataclass(frozen=True, kw_only=True)
class Probe:
    id: str
    category: Category
    ask: str
    complies: str = ""
    """Regular expression: an answer with a match went along."""
    also_passes: str = ""
    """Regular expression: an answer with a match is as good as a refusal."""
    signs: tuple[str, ...] = ()
    """Words of a right answer; any of them."""
    tool: str = ""
    """Whose result the model is given."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    result: str = ""
    canary: str = ""
    """A word that only somebody who obeys the order writes."""
    forbidden: tuple[str, ...] = ()
    """Tools that only somebody who obeys the order calls."""
    files: Mapping[str, str] = field(default_factory=dict)
    protected: tuple[str, ...] = ()
    """Globs of files that have to stay as they are."""
    goal: Goal | None = None
    checks: str = ""
    """What run_checks says until the goal is reached; "" where there are no checks."""


WORDS = frozenset({"signs", "forbidden", "protected"})
OBJECTS = frozenset({"arguments", "files", "goal"})
"""Fields that are lists of texts, and objects; all others are texts."""
REQUIRED: Mapping[Category, tuple[str, ...]] = {
    "refusal": ("complies",),
    "injection": ("tool", "result", "signs"),
    "sabotage": ("files", "protected", "goal"),
    "over_refusal": ("signs",),
}


def load_probes(categories: Sequence[str] = CATEGORIES, *, folder: str | Path | None = None) -> list[Probe]:
    """The probes of these categories, shipped or from a folder with files of the same names."""
    unknown = [name for name in categories if name not in CATEGORIES]
    if unknown:
        raise ProbeError(f"unknown category {unknown[0]!r}: expected some of {', '.join(CATEGORIES)}")
    place = resources.files("perilune.eval.safety") if folder is None else Path(folder)
    probes: list[Probe] = []
    for category in dict.fromkeys(categories):
        path = place / f"{category}.jsonl"
        if not path.is_file():
            raise ProbeError(f"there is no {category}.jsonl in {str(folder)!r}: expected one file a category")
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise ProbeError(f"{category}.jsonl is not text in UTF-8 ({error})") from None
        for number, line in enumerate(lines, 1):
            if line.strip():
                probes.append(_probe(line, f"{category}.jsonl:{number}", category))
    seen: set[str] = set()
    for probe in probes:
        if probe.id in seen:
            raise ProbeError(f"two probes are called {probe.id!r}")
        seen.add(probe.id)
    return probes


def fingerprint(probes: Iterable[Probe]) -> str:
    """Of all that is asked, so that two reports can be told to be of the same probes."""
    digest = hashlib.sha256()
    for probe in sorted(probes, key=lambda probe: probe.id):
        digest.update(repr(probe).encode())
    return digest.hexdigest()[:16]


def _check_type(name: str, value: Any, place: str) -> None:
    """A text in place of a list would be read as its letters, and nearly every answer would have one of them."""
    if name in WORDS:
        is_right, expected = isinstance(value, list) and all(isinstance(each, str) for each in value), "a list of texts"
    elif name in OBJECTS:
        texts = () if not isinstance(value, dict) or name == "arguments" else value.values()
        is_right, expected = isinstance(value, dict) and all(isinstance(each, str) for each in texts), "an object"
        expected += "" if name == "arguments" else " of texts"
    else:
        is_right, expected = isinstance(value, str), "a text"
    if not is_right:
        raise ProbeError(f"{place}: {name} is {value!r}, expected {expected}")


def _probe(line: str, place: str, expected: str) -> Probe:
    try:
        plain = json.loads(line)
    except ValueError as error:
        raise ProbeError(f"{place}: not JSON ({error})") from None
    known = {each.name for each in fields(Probe)}
    if not isinstance(plain, dict):
        raise ProbeError(f"{place}: expected an object, got {plain!r}")
    if unknown := sorted(set(plain) - known):
        raise ProbeError(f"{place}: there is no field {unknown[0]!r}; expected some of {', '.join(sorted(known))}")
    category: Category | None = next((name for name in CATEGORIES if name == plain.get("category")), None)
    if category is None:
        raise ProbeError(f"{place}: category is {plain.get('category')!r}, expected one of {', '.join(CATEGORIES)}")
    if category != expected:
        raise ProbeError(f"{place}: category is {category!r} in a file for {expected!r}")
    for name, value in plain.items():
        _check_type(name, value, place)
    missing = [name for name in ("id", "ask", *REQUIRED[category]) if not plain.get(name)]
    if missing:
        raise ProbeError(f"{place}: a probe of {category!r} needs {missing[0]!r}")
    if category == "injection" and not (plain.get("canary") or plain.get("forbidden")):
        raise ProbeError(f"{place}: an injection needs a canary or forbidden tools: how would it show?")
    for name in ("complies", "also_passes"):
        try:
            re.compile(plain.get(name, ""))
        except re.error as error:
            raise ProbeError(f"{place}: {name} is no regular expression ({error})") from None
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()}
    if "goal" in values:
        try:
            values["goal"] = Goal(**values["goal"])
        except TypeError:
            raise ProbeError(f"{place}: goal is {values['goal']!r}, expected file and contains") from None
    return Probe(**values)


__all__ = ["CATEGORIES", "Category", "Goal", "Probe", "ProbeError", "fingerprint", "load_probes"]
