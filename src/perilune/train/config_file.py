"""Frozen dataclasses to JSON and back, and what differs between two of them.

A recipe composes dataclasses; a run keeps its own as config.json and in every checkpoint. Reading one back checks every
name and every type: an unknown field is refused with the nearest one that exists.
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

Config = TypeVar("Config")


def to_plain(value: Any) -> Any:
    """A dataclass tree as what JSON can hold: tuples become lists, paths strings."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(entry) for entry in value]
    return str(value) if isinstance(value, Path) else value


def from_plain(kind: type[Config], value: Any, where: str = "config") -> Config:
    """The dataclass `kind` with what `to_plain` wrote; ValueError names the field that does not fit."""
    return _convert(kind, value, where)


def _convert(kind: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin is typing.Union or origin is types.UnionType:
        return _convert_union(arguments, value, where)
    if origin is Literal:
        return _expect(value in arguments, value, where, f"one of {', '.join(map(repr, arguments))}")
    if dataclasses.is_dataclass(kind):
        return _convert_dataclass(kind, value, where)
    if origin in (tuple, list):
        _expect(isinstance(value, list | tuple), value, where, "a list")
        entry = arguments[0] if arguments else Any
        return origin(_convert(entry, each, f"{where}[{index}]") for index, each in enumerate(value))
    if origin in (dict, Mapping) or kind is dict:
        return dict(_expect(isinstance(value, Mapping), value, where, "an object"))
    if kind is Path:
        return Path(_expect(isinstance(value, str), value, where, "a path"))
    if kind is float:
        return float(_expect(isinstance(value, int | float) and not isinstance(value, bool), value, where, "a number"))
    if kind in (int, bool, str):
        return _expect(type(value) is kind, value, where, kind.__name__)
    if kind is type(None):
        return _expect(value is None, value, where, "null")
    raise TypeError(f"{where}: cannot read a value of type {kind!r} from JSON")


def _convert_union(options: tuple[Any, ...], value: Any, where: str) -> Any:
    errors = []
    for option in options:
        try:
            return _convert(option, value, where)
        except ValueError as error:
            errors.append(error)
    # None is rarely what was meant, so the other option's complaint tells more.
    raise next((error for error, option in zip(errors, options) if option is not type(None)), errors[0])


def _convert_dataclass(kind: Any, value: Any, where: str) -> Any:
    _expect(isinstance(value, Mapping), value, where, f"the fields of {kind.__name__}")
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    for name in value:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
            raise ValueError(f"{where}.{name} is not a field of {kind.__name__}; the nearest is {near[0]!r}")
    return kind(**{name: _convert(hints[name], entry, f"{where}.{name}") for name, entry in value.items()})


def _expect(holds: bool, value: Any, where: str, expected: str) -> Any:
    if not holds:
        raise ValueError(f"{where} is {value!r}, expected {expected}")
    return value


def differences(before: Any, after: Any, where: str = "") -> Iterator[str]:
    """Every leaf in which two plain trees differ, as `model.hidden_size: 64 -> 128`."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for name in [*before, *(name for name in after if name not in before)]:
            yield from differences(before.get(name), after.get(name), f"{where}.{name}" if where else name)
    elif before != after:
        yield f"{where}: {before!r} -> {after!r}"
