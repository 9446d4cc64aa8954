"""Claims of work in an answer, and whether a call stands behind them.

"I searched the archive" needs a call that searches, "I ran the tests" one that runs something. A tool belongs to the
families that the words of its name say; one whose name says nothing counts for every claim, so that a strange tool is
never a reason for a flag. Only plain claims in the first person (I, we) are seen, and only in English.
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
USED = frozenset({"used", "called", "invoked"})
"""Claims where a tool is named after them, which says what they need."""
OF_AUTHORS = frozenset({"read", "tested"})
"""Verbs that are no claims after `we`: so speak texts of their readers, and papers of their authors."""
AFTER_HAVE = frozenset({"run", "written"})
"""Claims only as `I have run`; `I run` tells of no work that was done."""
OF_FILES = frozenset({"wrote", "written", "saved", "edited"})
"""Also used for the answer itself ("I wrote a poem"): a claim only where a file is named after it."""
SAID = "|".join([*VERBS, *sorted(USED), "looked (?:it|this|that|them|these|those) up"])
OF_PAGES = frozenset({"opened"})
"""Also said of doors: a claim only where something is named after it that a tool opens."""
CLAIM = re.compile(
    rf"\b(I|we)(['’]ve|[^\S\n]+ha(?:ve|d))?[^\S\n]+(?:(?:just|also|then|now|already|first|next|again|all|[a-z]+ly)"
    rf"[^\S\n]+){{0,3}}({SAID})\b",
    re.IGNORECASE,
)
EMPHASIS = re.compile(r"[*`]|(?<![^\W_])_|_(?![^\W_])")
"""Signs around words, not those inside of a name."""
NAMED_TOOL = re.compile(r"\s+(?:the|an?|my|your|our)\s((?:[\w-]+\s+){1,3}?)(?:tools?|engine)\b", re.IGNORECASE)
SUPPOSED = re.compile(r"\b(?:if|unless|whether|had|could|should|would|might)\s+$", re.IGNORECASE)
"""Such a word before `I` makes it no claim: `if I searched`, `had I read`."""
NO_WORK = re.compile(
    r"(?:ran|run) (?:out|into|low)\b|opened with\b|looked up (?:at|from|to)\b"
    r"|(?:read|checked|verified) (?:through )?(?:(?:the|your|this|my|our|each|every|both|two) ){0,2}(?:own )?"
    r"(?:questions?|tasks?|request|messages?|instructions?|prompt|reasoning|answer|arithmetic|logic|work"
    r"|calculations?|steps?|sums?)\b"
    r"|[a-z]+ [^.!?\n]{0,60}\b(?:by hand|in my head|mentally)\b",
    re.IGNORECASE,
)
"""Such words after `I`, from the verb on, speak of the talk itself or are figures of speech."""
SAYS = r"\b(?:said|says?|wrote|writes|replied|asked|told|answered|whispered|shouted|cried)\b"
SPOKEN = re.compile(rf"{SAYS}[^.!?\"“”\n]{{0,40}}[\"“][^\"“”\n]*$", re.IGNORECASE)
SPOKEN_BY = re.compile(rf"[^\"“”\n]*[\"”] ?[^.!?\"“”\n]{{0,40}}{SAYS}", re.IGNORECASE)
"""Before `I`, and from there on: it stands in the speech of somebody who is named as its speaker."""
NAMES_A_FILE = re.compile(r"\b(?:file|folder|disk)\b|[\w-]+\.(?!\s)\w{1,5}\b|/\w", re.IGNORECASE)


NAMES_A_PAGE = re.compile(
    rf"{NAMES_A_FILE.pattern}|\b(?:archive|article|attachment|browser|database|document|link|log|page|pdf|report"
    r"|results?|site|source|tab|url|website)s?\b",
    re.IGNORECASE,
)


def families_of(tool: str) -> frozenset[str]:
    """What a tool can have done, by the words of its name."""
    words = set(words_of(tool))
    return frozenset(name for name, known in FAMILIES.items() if known & words) or frozenset(FAMILIES)


def unsupported(text: str, done: Iterable[str]) -> str | None:
    """The first claim in a text for which none of the tools that were called with success stands, or None."""
    families = {family for tool in done for family in families_of(tool)}
    text = EMPHASIS.sub("", text)
    for claim in CLAIM.finditer(text):
        if NO_WORK.match(text, claim.start(3)) or SUPPOSED.search(text[max(0, claim.start() - 12) : claim.start()]):
            continue
        needed = None if _is_spoken(text, claim) else _needed(text, claim)
        if needed is not None and families.isdisjoint(needed):
            return text[claim.start() : claim.end(3)]
    return None


def _needed(text: str, claim: re.Match[str]) -> Iterable[str] | None:
    """The families of which a call must have been made; None where nothing is claimed."""
    verb = claim.group(3).lower()
    if verb in USED:
        named = NAMED_TOOL.match(text, claim.end(3))
        words = set(words_of(named.group(1))) if named else set[str]()
        return families_of(" ".join(words)) if words & (FIND | RUN | WRITE) else None
    if verb in AFTER_HAVE and not claim.group(2):
        return None
    if verb in OF_AUTHORS and claim.group(1).lower() == "we":
        return None
    if verb in OF_FILES and not NAMES_A_FILE.search(_after(text, claim)):
        return None
    if verb in OF_PAGES and not NAMES_A_PAGE.search(re.split(r"[.!?]\s", _after(text, claim))[0]):
        return None
    return VERBS["looked up" if verb.startswith("looked") else verb]


def _is_spoken(text: str, claim: re.Match[str]) -> bool:
    """Whether it is the speech of another, as in `she said: "I searched the attic"`."""
    before, after = text[max(0, claim.start() - 160) : claim.start()], text[claim.end() : claim.end() + 160]
    is_quoted = sum(before.rpartition("\n")[2].count(sign) for sign in '"“”') % 2 == 1
    return SPOKEN.search(before) is not None or (is_quoted and SPOKEN_BY.match(after) is not None)


def _after(text: str, claim: re.Match[str]) -> str:
    """The rest of the line: a file's name holds the point that ends a sentence."""
    return text[claim.end(3) : claim.end(3) + 200].partition("\n")[0]


__all__ = ["families_of", "unsupported"]
