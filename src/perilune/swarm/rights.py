"""What an agent may use: tools, models, paths, hosts, effects, and how deep it may create others.

Rights are ordered: `a <= b` when everything that `a` permits `b` permits too. A child gets its rights from its parent
by `grant`, and these are always `<=` the parent's. Asking for more is an error that says what is missing, so that a
model learns of it; nothing is taken away silently.

    tools, models   names, or beginnings of names: "git__*", "*"
    network         host names, "*.example.org" (its subdomains), "*" (any; guards against inner addresses stay)
    paths           absolute; a path holds everything below it. Compared by components, as text: who opens a file must
                    follow no link out of them

Each set is kept in its shortest form, so equal rights are equal objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from perilune.swarm.tools.tool import Effects

EFFECTS: tuple[Effects, ...] = ("none", "workspace", "outside")
ANY = frozenset({"*"})


class RightsExceeded(ValueError):
    """A request for more than the one who asks has. `missing` holds it by field."""

    def __init__(self, missing: Mapping[str, tuple[str, ...]], own: Mapping[str, str]) -> None:
        parts = [f"{field}: {', '.join(map(repr, names))} (yours: {own[field]})" for field, names in missing.items()]
        super().__init__("you cannot grant what you do not have: " + "; ".join(parts))
        self.missing = dict(missing)


@dataclass(frozen=True, kw_only=True)
class RightsRequest:
    """What a parent asks for its child. None: all that the parent has (and one less of depth)."""

    tools: Iterable[str] | None = None
    models: Iterable[str] | None = None
    read_paths: Iterable[str] | None = None
    write_paths: Iterable[str] | None = None
    network: Iterable[str] | None = None
    effects: Iterable[str] | None = None
    depth: int | None = None


@dataclass(frozen=True, kw_only=True)
class Rights:
    tools: frozenset[str] = ANY
    models: frozenset[str] = ANY
    read_paths: frozenset[str] = frozenset()
    write_paths: frozenset[str] = frozenset()
    network: frozenset[str] = frozenset()
    effects: frozenset[str] = frozenset(EFFECTS)
    """Of tools. One that declares nothing counts as "outside"."""
    depth: int = 0
    """How many levels of agents it may create below itself."""

    def __post_init__(self) -> None:
        if isinstance(self.depth, bool) or not isinstance(self.depth, int) or self.depth < 0:
            raise ValueError(f"rights: depth is {self.depth!r}, expected a whole number, 0 or more")
        for field, (read, covers) in _FIELDS.items():
            names = getattr(self, field)
            if isinstance(names, str) or not all(isinstance(name, str) for name in names):
                raise ValueError(f"rights: {field} is {names!r}, expected a set of strings")
            object.__setattr__(self, field, _shortest({read(field, name) for name in names}, covers))

    def __le__(self, other: Rights) -> bool:
        return self.depth <= other.depth and not any(
            _missing(getattr(self, field), getattr(other, field), covers) for field, (_, covers) in _FIELDS.items()
        )

    def __lt__(self, other: Rights) -> bool:
        return self != other and self <= other

    def grant(self, request: RightsRequest | None = None) -> Rights:
        """The rights of a child; raises `RightsExceeded` for what is not there to give."""
        request = request or RightsRequest()
        if self.depth == 0:
            raise RightsExceeded({"depth": ("a further level of agents",)}, {"depth": "0 levels below you"})
        wanted = {field: names for field in _FIELDS if (names := getattr(request, field)) is not None}
        depth = self.depth - 1 if request.depth is None else request.depth
        child = Rights(**{field: getattr(self, field) for field in _FIELDS} | wanted | {"depth": depth})
        missing = {
            field: lacks
            for field, (_, covers) in _FIELDS.items()
            if (lacks := _missing(getattr(child, field), getattr(self, field), covers))
        }
        if depth > self.depth - 1:
            missing["depth"] = (str(depth),)
        if missing:
            raise RightsExceeded(missing, {field: self._own(field) for field in missing})
        return child

    def _own(self, field: str) -> str:
        if field == "depth":
            return f"at most {self.depth - 1} for a child"
        return ", ".join(sorted(getattr(self, field))) or "none"

    def allows_tool(self, name: str, effects: Effects | None) -> bool:
        return _holds(self.tools, name, _covers_name) and (effects or "outside") in self.effects

    def allows_model(self, name: str) -> bool:
        return _holds(self.models, name, _covers_name)

    def allows_host(self, host: str) -> bool:
        return _holds(self.network, host.rstrip(".").lower(), _covers_host)

    def may_read(self, path: str) -> bool:
        return _holds_path(self.read_paths, path)

    def may_write(self, path: str) -> bool:
        return _holds_path(self.write_paths, path)

    def plain(self) -> dict[str, Any]:
        return {field: sorted(getattr(self, field)) for field in _FIELDS} | {"depth": self.depth}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Rights:
        sets: dict[str, Any] = {field: frozenset(plain[field]) for field in _FIELDS}
        return cls(**sets, depth=plain["depth"])


# What holds what -----------------------------------------------------------------------------------------------------


def _covers_name(wide: str, narrow: str) -> bool:
    return wide == narrow or (wide.endswith("*") and narrow.startswith(wide[:-1]))


def _covers_host(wide: str, narrow: str) -> bool:
    return wide in ("*", narrow) or (wide.startswith("*.") and narrow != "*" and narrow.endswith(wide[1:]))


def _covers_path(wide: str, narrow: str) -> bool:
    return PurePosixPath(narrow).is_relative_to(wide)


def _covers_exactly(wide: str, narrow: str) -> bool:
    return wide == narrow


def _read_name(field: str, name: str) -> str:
    if not name or "*" in name[:-1]:
        raise ValueError(f"rights: {field} has {name!r}, expected a name or its beginning and '*' at the end")
    return name


def _read_host(field: str, host: str) -> str:
    plain = host.removeprefix("*.") if host != "*" else "any"
    if not plain or plain.count(":") == 1 or any(sign in plain for sign in "*/@ "):
        raise ValueError(
            f"rights: {field} has {host!r}, expected a host name without a port, '*.' and a domain, or '*'"
        )
    return host.rstrip(".").lower()


def _read_path(field: str, path: str) -> str:
    parts = path.split("/")
    if not path.startswith("/") or ".." in parts or "\0" in path:
        raise ValueError(f"rights: {field} has {path!r}, expected an absolute path without '..'")
    return "/" + "/".join(part for part in parts if part not in ("", "."))


def _read_effects(field: str, effects: str) -> str:
    if effects not in EFFECTS:
        raise ValueError(f"rights: {field} has {effects!r}, expected one of {', '.join(EFFECTS)}")
    return effects


Covers = Callable[[str, str], bool]
_FIELDS: dict[str, tuple[Callable[[str, str], str], Covers]] = {
    "tools": (_read_name, _covers_name),
    "models": (_read_name, _covers_name),
    "read_paths": (_read_path, _covers_path),
    "write_paths": (_read_path, _covers_path),
    "network": (_read_host, _covers_host),
    "effects": (_read_effects, _covers_exactly),
}


def _shortest(names: set[str], covers: Covers) -> frozenset[str]:
    return frozenset(name for name in names if not any(other != name and covers(other, name) for other in names))


def _missing(narrow: Iterable[str], wide: Iterable[str], covers: Covers) -> tuple[str, ...]:
    return tuple(sorted(name for name in narrow if not any(covers(each, name) for each in wide)))


def _holds(patterns: Iterable[str], name: str, covers: Covers) -> bool:
    return "*" not in name and any(covers(each, name) for each in patterns)


def _holds_path(paths: Iterable[str], path: str) -> bool:
    try:
        plain = _read_path("path", path)
    except ValueError:
        return False
    return any(_covers_path(each, plain) for each in paths)


__all__ = ["ANY", "EFFECTS", "Rights", "RightsExceeded", "RightsRequest"]
