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
    "verified": ("find", "run"), "checked": ("find", "run"), "run": ("run",), "written": ("write", "run"),
}  # fmt: skip
"""What each verb needs: a call of one of these families."""
AFTER_HAVE = frozenset({"run", "written"})
"""Claims only as `I have run`; `I run` tells of no work that was done."""
OF_FILES = frozenset({"wrote", "written", "saved", "edited"})
"""Also used for the answer itself ("I wrote a poem"): a claim only where a file is named after it."""
CLAIM = re.compile(
    rf"\bI(['’]ve|[^\S\n]+ha(?:ve|d))?[^\S\n]+(?:(?:just|also|then|now|already|first|next|again|all|[a-z]+ly)"
    rf"[^\S\n]+){{0,3}}({'|'.join(VERBS)})\b([^.!?\n]*)",
    re.IGNORECASE,
)
SUPPOSED = re.compile(r"\b(?:if|unless|whether|had|could|should|would|might)\s+$", re.IGNORECASE)
"""Such a word before `I` makes it no claim: `if I searched`, `had I read`."""
NO_WORK = re.compile(
    r"(?:ran|run) (?:out|into|low)\b|opened with\b"
    r"|(?:read|checked|verified) (?:through )?(?:(?:the|your|this|my|our|each|every|both|two) ){0,2}(?:own )?"
    r"(?:questions?|tasks?|request|messages?|instructions?|prompt|reasoning|answer|arithmetic|logic|work"
    r"|calculations?|steps?|sums?)\b"
    r"|[a-z]+ [^.!?\n]{0,60}\b(?:by hand|in my head|mentally)\b",
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
        verb = claim.group(2).lower()
        if NO_WORK.match(text, claim.start(2)) or SUPPOSED.search(text[max(0, claim.start() - 12) : claim.start()]):
            continue
        if verb in AFTER_HAVE and not claim.group(1):
            continue
        if verb in OF_FILES and not NAMES_A_FILE.search(_after(text, claim)):
            continue
        if families.isdisjoint(VERBS[verb]):
            return text[claim.start() : claim.end(2)]
    return None


def _after(text: str, claim: re.Match[str]) -> str:
    """The rest of the line: a file's name holds the point that ends a sentence."""
    return text[claim.end(2) :].partition("\n")[0][:200]


__all__ = ["families_of", "unsupported"]
