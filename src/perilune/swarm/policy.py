"""Policy: which calls run, which are refused, and which a person must approve.

    [[rule]]
    tool = "shell"
    where = { command = "git status*" }
    decision = "allow"        # or "deny" or "ask"

Rules are read in their order and the first that matches decides. Where none does, what the tool declares decides:

    effects "none" or "workspace"    allow
    effects "outside" or undeclared  ask

A tainted agent (see `taint`) is asked for whenever effects go outside, also where a rule allows, unless that rule says
`even_tainted`. `ask` without anybody there is a refusal (see `approvals`).

Patterns match the whole text of a name or an argument; what is not a string is compared as JSON. In `deny` and `ask`, a
star stands for anything. In `allow` it must not widen what was meant: `*` and `?` stand for anything but operators of a
shell (; & | < > $ ` ( ) { } \\ and control characters) and the argument may have no `..` between separators; `**`
stands for anything at all. A rule that looks at arguments matches only calls that have them.

Patterns on a shell's command are for comfort: they keep the usual from being asked. What a command can reach is the
sandbox's matter, and no pattern of words can stand in for it.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import orjson

from perilune.swarm.arguments import parse_arguments
from perilune.swarm.taint import Taint
from perilune.swarm.tools.tool import Effects

Decision = Literal["allow", "deny", "ask"]
OPERATORS = r";&|<>$`(){}\\\x00-\x1f\x7f\u0085\u2028\u2029"
CLIMBS = re.compile(r"(?:^|[/\\\s=:,\"'])\.\.(?:$|[/\\\s:,\"'])")


@dataclass(frozen=True, kw_only=True)
class Rule:
    decision: Decision
    tool: str = "*"
    where: Mapping[str, str] = field(default_factory=dict)
    """Pattern by argument; all must match."""
    even_tainted: bool = False
    """An allowance that also holds for agents that read untrusted content."""

    def __post_init__(self) -> None:
        if self.decision not in get_args(Decision):
            raise ValueError(f"rule for {self.tool!r}: decision is {self.decision!r}, expected allow, deny or ask")
        if self.even_tainted and self.decision != "allow":
            raise ValueError(f"rule for {self.tool!r}: even_tainted is for rules that allow, not {self.decision!r}")
        if not isinstance(self.even_tainted, bool):
            raise ValueError(f"rule for {self.tool!r}: even_tainted is {self.even_tainted!r}, expected true or false")
        if not isinstance(self.where, Mapping) or not all(isinstance(each, str) for each in self.where.values()):
            raise ValueError(f"rule for {self.tool!r}: where is {self.where!r}, expected a pattern for each argument")
        if not isinstance(self.tool, str) or not self.tool:
            raise ValueError(f"rule: tool is {self.tool!r}, expected a name or a pattern")

    def matches(self, tool: str, arguments: Mapping[str, Any]) -> bool:
        return self._tool.fullmatch(tool) is not None and all(
            name in arguments and self._matches(name, _text(arguments[name])) for name in self.where
        )

    def _matches(self, name: str, text: str) -> bool:
        if self._where[name].fullmatch(text) is None:
            return False
        pattern = self.where[name].replace("**", "")
        return self.decision != "allow" or not ("*" in pattern or "?" in pattern) or CLIMBS.search(text) is None

    @cached_property
    def _tool(self) -> re.Pattern[str]:
        return _pattern(self.tool, is_strict=False)

    @cached_property
    def _where(self) -> dict[str, re.Pattern[str]]:
        return {name: _pattern(text, is_strict=self.decision == "allow") for name, text in self.where.items()}


@dataclass(frozen=True, kw_only=True)
class Ruling:
    decision: Decision
    reason: str
    """In words for a person who is asked, or a model that is refused."""
    rule: int | None = None
    """Number of the rule that decided, from 0."""


@dataclass(frozen=True)
class Policy:
    rules: tuple[Rule, ...] = ()

    def decide(
        self, tool: str, effects: Effects | None, arguments: Mapping[str, Any], *, taint: Taint | None = None
    ) -> Ruling:
        goes_outside = effects not in ("none", "workspace")
        sources = taint.sources if taint is not None else ()
        for number, rule in enumerate(self.rules):
            if rule.matches(tool, arguments):
                if rule.decision == "allow" and sources and goes_outside and not rule.even_tainted:
                    return Ruling(decision="ask", reason=_tainted(tool, sources), rule=number)
                return Ruling(decision=rule.decision, reason=f"rule {number} of the policy", rule=number)
        if not goes_outside:
            return Ruling(decision="allow", reason=f"{tool} has no effects outside the workspace")
        if sources:
            return Ruling(decision="ask", reason=_tainted(tool, sources))
        what = "has effects outside the workspace" if effects == "outside" else "does not declare its effects"
        return Ruling(decision="ask", reason=f"{tool} {what}")


def load_policy(path: Path) -> Policy:
    """From a TOML file with `[[rule]]` tables."""
    try:
        return read_policy(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def read_policy(text: str) -> Policy:
    plain = tomllib.loads(text)
    _known(plain, ("rule",), "policy")
    tables = plain.get("rule", [])
    if not isinstance(tables, list):
        raise ValueError("policy: write [[rule]] with two brackets, once for each rule")
    return Policy(tuple(_rule(number, table) for number, table in enumerate(tables)))


def _rule(number: int, table: Mapping[str, Any]) -> Rule:
    _known(table, [each.name for each in fields(Rule)], f"rule {number}")
    if "decision" not in table:
        raise ValueError(f"rule {number}: decision is missing: allow, deny or ask")
    try:
        return Rule(**table)
    except ValueError as error:
        raise ValueError(f"rule {number}: {error}") from None


def _known(table: Mapping[str, Any], names: Iterable[str], what: str) -> None:
    names = list(names)
    for key in table:
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"expected {', '.join(names)}"
            raise ValueError(f"{what}: there is no {key!r}; {hint}")


def _pattern(text: str, *, is_strict: bool) -> re.Pattern[str]:
    """Each star takes the shortest text up to what follows it and does not try again: matching takes linear time."""
    one = f"[^{OPERATORS}]" if is_strict else r"[\s\S]"
    stars = {"**": r"[\s\S]*", "*": f"{one}*"}
    first, *pairs = re.split(r"(\*+)", text)
    pieces = [_literal(first, one)]
    for at in range(0, len(pairs), 2):
        star, follows = stars[pairs[at][:2]], _literal(pairs[at + 1], one)
        pieces.append(f"(?>{star}?{follows})" if at + 2 < len(pairs) else f"{star}{follows}")
    return re.compile("".join(pieces))


def _literal(text: str, one: str) -> str:
    return "".join(one if sign == "?" else re.escape(sign) for sign in text)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()


def _tainted(tool: str, sources: tuple[str, ...]) -> str:
    return f"{tool} may have effects outside the workspace, and the agent read untrusted content ({sources[0]})"


__all__ = ["Decision", "Policy", "Rule", "Ruling", "Taint", "load_policy", "parse_arguments", "read_policy"]
