"""Arguments of a tool call, from the text a model wrote.

A call runs only on arguments that mean one thing. Text that is not JSON, an object with a key twice, NaN or a number
that no double holds goes back to the model as an error. A tool without effects may run on arguments that were repaired
(a code fence around them, a comma too many, closing brackets that were cut off); for any other tool a repair could do
what the model did not ask for, so it has to write them again.
"""

from __future__ import annotations

import json
import math
from typing import Any

from perilune.swarm.journal.event import canonical
from perilune.swarm.tools.tool import Effects, ToolError

CLOSING = {"{": "}", "[": "]"}


def parse_arguments(text: str, effects: Effects | None) -> dict[str, Any]:
    """The arguments; raises `ToolError` with what is wrong and what to do."""
    try:
        return _strict(text)
    except _Invalid as problem:
        if effects == "none" and (mended := repaired(text)) is not None:
            try:
                return _strict(mended)
            except _Invalid:
                pass
        why = "" if effects == "none" else ", and arguments of a tool with effects are not repaired"
        raise ToolError(
            f"the arguments are not a valid JSON object: {problem}. Nothing was run{why}: send the call again"
        ) from None


class _Invalid(ValueError):
    """Why a text is no arguments."""


def _strict(text: str) -> dict[str, Any]:
    try:
        value = json.loads(
            text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_float, parse_int=_integer
        )
    except json.JSONDecodeError as error:
        place = f"{error.msg.removesuffix(' at')} at character {error.pos}"
        raise _Invalid(place if text.strip() else "there is no text; write {}") from None
    except RecursionError:
        raise _Invalid("too many levels") from None
    if not isinstance(value, dict):
        raise _Invalid(f"it is a {type(value).__name__}, not an object")
    try:
        canonical(value)
    except (TypeError, ValueError):
        raise _Invalid("it holds a broken character or too many levels") from None
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for at, name in enumerate(names) if name in names[:at])
        raise _Invalid(f"the key {twice[:80]!r} is there twice")
    return value


def _constant(name: str) -> float:
    raise _Invalid(f"{name} is not JSON")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _Invalid(f"the number {text[:40]} is too large")
    return value


def _integer(text: str) -> int:
    if len(text) > 20 or not -(2**63) <= int(text) < 2**64:
        raise _Invalid(f"the number {text[:40]} does not fit into 64 bits; send it as a string")
    return int(text)


def repaired(text: str) -> str | None:
    """The text without a fence around it, without commas before closing brackets, and with the brackets that lack at
    its end; None when that is not what is wrong with it. One pass."""
    text = text.strip()
    if text.startswith("```") and text.endswith("```") and "\n" in text:
        text = text[text.index("\n") : -3].strip()
    kept: list[str] = []
    is_open: list[str] = []
    last = 0  # place of the last sign that is no space
    in_string = is_escaped = False
    for sign in text:
        if in_string:
            in_string = is_escaped or sign != '"'
            is_escaped = sign == "\\" and not is_escaped
        elif sign == '"':
            in_string = True
        elif sign in CLOSING:
            is_open.append(sign)
        elif sign in CLOSING.values():
            if not is_open:
                return None
            is_open.pop()
            _drop_comma(kept, last)
        kept.append(sign)
        if in_string or not sign.isspace():
            last = len(kept) - 1
    if in_string or (is_open and kept[last].isdigit()):
        return None  # a string or a number may go on where it was cut: nobody knows how
    if is_open:
        _drop_comma(kept, last)
    return "".join(kept) + "".join(CLOSING[each] for each in reversed(is_open)) or "{}"


def _drop_comma(kept: list[str], last: int) -> None:
    if kept[last] == ",":
        kept[last] = " "


__all__ = ["parse_arguments", "repaired"]
