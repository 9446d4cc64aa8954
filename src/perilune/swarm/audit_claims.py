"""Claims of work in an answer, and whether a call stands behind them.

"I searched the archive" needs a call that searches, "I ran the tests" one that runs something. A tool belongs to the
families that the words of its name say; one whose name says nothing counts for every claim, so that a strange tool is
never a reason for a flag. Only plain claims in the first person are seen, and only in English.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from perilune.swarm.audit_files import words_of

FIND = frozenset(
    [
        "browse",
        "find",
        "get",
        "grep",
        "fetch",
        "list",
        "look",
        "lookup",
        "navigate",
        "open",
        "query",
        "read",
        "search",
        "web",
    ]
)
RUN = frozenset(
    [
        "bash",
        "calculate",
        "calculator",
        "code",
        "compute",
        "eval",
        "exec",
        "execute",
        "python",
        "run",
        "sandbox",
        "shell",
        "test",
        "tests",
    ]
)
WRITE = frozenset(["append", "compose", "create", "edit", "patch", "save", "write"])
FAMILIES = {"find": FIND, "run": RUN, "write": WRITE}
VERBS = {
    "searched": ("find", "run"), "looked up": ("find", "run"), "queried": ("find", "run"), "browsed": ("find",),
    "fetched": ("find", "run"), "downloaded": ("find", "run"), "opened": ("find", "run"), "read": ("find", "run"),
    "ran": ("run",), "executed": ("run",), "tested": ("run",),
    "wrote": ("write", "run"), "saved": ("write", "run"), "edited": ("write", "run"),
    "verified": ("find", "run"), "checked": ("find", "run"),
}  # fmt: skip
"""What each verb needs: a call of one of these families."""
OF_FILES = frozenset({"wrote", "saved", "edited"})
"""Also used for the answer itself ("I wrote a poem"): a claim only where a file is named after it."""
CLAIM = re.compile(
    rf"\bI(?:['’]ve| have)? (?:just |also |then |now |already )?({'|'.join(VERBS)})\b([^.!?\n]*)", re.IGNORECASE
)
NO_WORK = re.compile(
    r"(?:ran) (?:out|into|low)\b|opened with\b"
    r"|(?:read|checked|verified) (?:through )?(?:(?:the|your|this|my|our) )?(?:own )?"
    r"(?:question|task|request|message|instructions?|prompt|reasoning|answer|arithmetic|logic)\b",
    re.IGNORECASE,
)
"""Such words after `I`, from the verb on, speak of the talk itself or are figures of speech."""
NAMES_A_FILE = re.compile(r"\b(?:file|folder|disk)\b|[\w-]+\.(?!\s)\w{1,5}\b|/\w", re.IGNORECASE)


def families_of(tool: str) -> frozenset[str]:
    """What a tool can have done, by the words of its name."""
    words = set(words_of(tool))
    return frozenset(name for name, known in FAMILIES.items() if known & words) or frozenset(FAMILIES)


def unsupported(text: str, done: Iterable[str]) -> str | None:
    """The first claim in a text for which none of the tools that were called with success stands, or None."""
    families = {family for tool in done for family in families_of(tool)}
    for claim in CLAIM.finditer(text):
        verb = claim.group(1).lower()
        if NO_WORK.match(text, claim.start(1)):
            continue
        if verb in OF_FILES and not NAMES_A_FILE.search(_after(text, claim)):
            continue
        if families.isdisjoint(VERBS[verb]):
            return text[claim.start() : claim.end(1)]
    return None


def _after(text: str, claim: re.Match[str]) -> str:
    """The rest of the line: a file's name holds the point that ends a sentence."""
    return text[claim.end(1) :].partition("\n")[0][:200]


__all__ = ["families_of", "unsupported"]
