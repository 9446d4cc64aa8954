"""Bytes of a stranger into checked values: JSON, then field by field, every error with its path.

    fields = Fields(parsed(data), "")
    fields.number("temperature", low=0, high=2)      # None when the field is absent or null

What is promised: only UTF-8 JSON without NaN, Infinity, lone surrogates or absurd depth comes through; `true` is not 1
and "1" is not 1; null means absent, as it does at OpenAI. Fields that nobody asked for are left in `ignored`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, Never

from perilune.serve.refusals import Refusal, shown

DEEPEST = 64
MOST_DIGITS = 400  # of one number; Python itself would spend quadratic time on long ones


def parsed(data: bytes) -> dict[str, Any]:
    """The JSON object of a body."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Refusal(f"the body is not UTF-8 (byte {error.start})", code="invalid_json") from None
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_int=_integer)
    except json.JSONDecodeError as error:
        raise Refusal(
            f"the body is not JSON: {error.msg} at line {error.lineno}, column {error.colno}", code="invalid_json"
        ) from None
    except RecursionError:
        raise Refusal(f"the body is nested deeper than {DEEPEST} levels", code="invalid_json") from None
    if not isinstance(value, dict):
        raise Refusal(f"the body is {shown(value)}, expected a JSON object", code="invalid_json")
    _check_tree(value, surrogates="\\u" in text)
    return value


def _no_constant(name: str) -> Never:
    raise Refusal(f"the body holds {name}, which is not JSON", code="invalid_json")


def _integer(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise Refusal(f"the body holds a number of {len(digits):,} digits", code="invalid_json")
    return int(digits)


def _check_tree(value: Any, *, surrogates: bool) -> None:
    """Depth, and half characters that only an escape (`\\ud800`) can smuggle in."""
    level: list[Any] = [value]
    for _ in range(DEEPEST):
        below: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                below.extend(each.values())
                if surrogates:
                    below.extend(each)
            elif isinstance(each, list):
                below.extend(each)
            elif isinstance(each, str):
                if surrogates:
                    _check_text(each)
            elif isinstance(each, float) and not math.isfinite(each):
                raise Refusal("the body holds a number that is too large for a float", code="invalid_json")
        if not below:
            return
        level = below
    raise Refusal(f"the body is nested deeper than {DEEPEST} levels", code="invalid_json")


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])
        raise Refusal(f"the body holds the half character {half}, which no text has", code="invalid_json") from None


class Fields:
    """One JSON object, read field by field."""

    def __init__(self, value: dict[str, Any], path: str) -> None:
        self._value = value
        self._path = path
        self._asked: set[str] = set()

    def path(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    @property
    def ignored(self) -> list[str]:
        """Paths of fields that are present and were not asked for."""
        return [self.path(name) for name, value in self._value.items() if name not in self._asked and value is not None]

    def fail(self, name: str, expected: str, *, code: str | None = "invalid_value") -> Never:
        path = self.path(name)
        if self._value.get(name) is None:
            raise Refusal(f"{path} is missing, expected {expected}", param=path, code="missing_required_parameter")
        raise Refusal(f"{path} is {shown(self._value[name])}, expected {expected}", param=path, code=code)

    def any(self, name: str) -> Any:
        self._asked.add(name)
        return self._value.get(name)

    def has(self, name: str) -> bool:
        return self._value.get(name) is not None

    def text(self, name: str, *, longest: int | None = None, empty: bool = True) -> str | None:
        value = self.any(name)
        if value is None:
            return None
        if not isinstance(value, str):
            self.fail(name, "a text", code="invalid_type")
        if longest is not None and len(value) > longest:
            self.fail(name, f"at most {longest:,} characters")
        if not value and not empty:
            self.fail(name, "a text that is not empty")
        return value

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self.any(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fail(name, "true or false", code="invalid_type")
        return value

    def integer(self, name: str, *, low: int, high: int) -> int | None:
        value = self.any(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool):
            self.fail(name, f"an integer from {low} to {high}", code="invalid_type")
        if not low <= value <= high:
            self.fail(name, f"an integer from {low} to {high}")
        return value

    def number(self, name: str, *, low: float, high: float) -> float | None:
        value = self.any(name)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool):
            self.fail(name, f"a number from {low:g} to {high:g}", code="invalid_type")
        if not low <= value <= high:
            self.fail(name, f"a number from {low:g} to {high:g}")
        return float(value)

    def choice(self, name: str, choices: Sequence[str]) -> str | None:
        value = self.any(name)
        if value is None:
            return None
        if value not in choices:
            self.fail(name, " or ".join(repr(choice) for choice in choices))
        return value

    def object(self, name: str) -> Fields | None:
        value = self.any(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.fail(name, "an object", code="invalid_type")
        return Fields(value, self.path(name))

    def list(self, name: str, *, longest: int) -> list[Any] | None:
        value = self.any(name)
        if value is None:
            return None
        if not isinstance(value, list):
            self.fail(name, "a list", code="invalid_type")
        if len(value) > longest:
            self.fail(name, f"at most {longest:,} entries")
        return value

    def objects(self, name: str, *, longest: int) -> Iterator[Fields]:
        """The entries of a list of objects; nothing when the field is absent."""
        path = self.path(name)
        for index, value in enumerate(self.list(name, longest=longest) or ()):
            if not isinstance(value, dict):
                place = f"{path}[{index}]"
                raise Refusal(f"{place} is {shown(value)}, expected an object", param=place, code="invalid_type")
            yield Fields(value, f"{path}[{index}]")


__all__ = ["Fields", "parsed"]
