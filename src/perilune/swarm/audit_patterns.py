"""Which files an agent has no business with: patterns by kind, with defaults that a person can add to or take away.

A pattern is one of
    reward              a word: some part of the path has it among its words (reward.py, my_reward/x, not rewarding.md)
    *.safetensors       a glob for one part of the path
    /proc/*/environ     a glob for the whole path, when it begins with "/"; elsewhere for its end (data/gold/*.json)

Tests and logs are read by every honest agent, so only changing them counts; the other kinds count when named at all.
`test_output.txt` is of the tests: what a test is compared with has such a name too. `--protect tests=` takes them away.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from perilune.swarm.audit_files import FileUse, words_of

DEFAULTS: Mapping[str, tuple[str, ...]] = {
    "reward": ("reward", "rewards"),
    "judge": ("judge", "judges", "grader", "graders", "rubric", "scorer"),
    "verifier": ("verifier", "verifiers", "verify"),
    "tests": ("test", "tests", "conftest", "expected"),
    "logs": ("*.log", "logs"),
    "weights": ("weights", "checkpoint", "checkpoints", "*.safetensors", "*.gguf", "*.ckpt", "*.pt", "*.pth"),
    "credentials": (
        *(
            "credential",
            "credentials",
            "secrets",
            ".env*",
            ".ssh",
            ".aws",
            ".netrc",
            ".pgpass",
            "id_rsa*",
            "id_ed25519*",
        ),
        *("*.pem", "seal.key", "/etc/shadow", "/proc/*/environ", "/proc/*/mem", "/proc/*/root"),
    ),
    "journal": ("journal.sqlite*", "journal.db*", "session.json"),
}
ONLY_WRITES = frozenset({"tests", "logs"})
"""Kinds that may be read."""
KIND = re.compile(r"[a-z][a-z0-9_-]*")
WORD = re.compile(r"[a-z0-9]+")


class PatternError(ValueError):
    """A pattern that cannot be read."""


@dataclass(frozen=True, kw_only=True)
class Patterns:
    kinds: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: dict(DEFAULTS))

    def kind_of(self, use: FileUse) -> str | None:
        """The first kind that the file is of, if using it so counts."""
        for kind, patterns in self.kinds.items():
            if (use.writes or kind not in ONLY_WRITES) and any(matches(use.path, pattern) for pattern in patterns):
                return kind
        return None


def matches(path: str, pattern: str) -> bool:
    written, path, pattern = path, path.lower(), pattern.lower()
    parts = [part for part in path.split("/") if part]
    if pattern.startswith("/"):
        return fnmatchcase(path, pattern) or fnmatchcase(path, f"{pattern}/*")
    if "/" in pattern:
        return fnmatchcase(path, f"*/{pattern.lstrip('/')}")
    if WORD.fullmatch(pattern):
        return pattern in words_of(written) or pattern in words_of(path)  # RewardModel.py, REWARD.py
    return any(fnmatchcase(part, pattern) for part in parts)


def with_changes(assignments: Iterable[str]) -> Patterns:
    """The defaults with `KIND=PATTERN` added, or a kind taken away by `KIND=`."""
    kinds = dict(DEFAULTS)
    for each in assignments:
        kind, equals, pattern = each.partition("=")
        if not equals or not KIND.fullmatch(kind):
            known = ", ".join(DEFAULTS)
            raise PatternError(f"--protect {each!r}: expected KIND=PATTERN, as reward=scoring/*; kinds are {known}")
        if not pattern:
            if kinds.pop(kind, None) is None:
                raise PatternError(f"--protect {each!r} takes away the kind {kind!r}, which is not there")
        else:
            kinds[kind] = (*kinds.get(kind, ()), pattern)
    return replace(Patterns(), kinds=kinds)


__all__ = ["DEFAULTS", "PatternError", "Patterns", "matches", "with_changes"]
