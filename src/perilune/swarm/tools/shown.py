"""Text as the model sees it: never longer than a limit, names without control characters, bytes as text.

A long output keeps its head and its tail, because the cause of an error stands at either end. The line between them
says how much is missing, so nobody takes a part for the whole.
"""

from __future__ import annotations

import unicodedata

OUTPUT_LIMIT = 60_000
"""Characters of one result, unless a tool says otherwise; an agent's context bounds further what it sees at once."""


def clipped(text: str, limit: int = OUTPUT_LIMIT, *, advice: str = "") -> str:
    """The text, or its head and tail around a line that counts what was left out; at most `limit` characters."""
    if len(text) <= limit:
        return text
    note = f"\n[... {len(text)} characters in all, the middle is left out{'; ' + advice if advice else ''} ...]\n"
    room = limit - len(note)
    if room < 2:
        return text[:limit]
    tail = room // 3
    return text[: room - tail] + note + text[len(text) - tail :]


def one_line(name: str, limit: int = 300) -> str:
    """A name from outside on one line: control, bidirectional and line-breaking characters become escapes."""
    safe = "".join(
        character
        if unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
        else character.encode("unicode_escape", "surrogatepass").decode()
        for character in name[: limit + 1]
    )
    return safe if len(safe) <= limit else safe[: limit - 3] + "..."


def decoded(data: bytes) -> str:
    """Bytes of a program's output as text; what is not UTF-8 is shown as replacement characters."""
    return data.decode("utf-8", "replace")


def is_binary(data: bytes) -> bool:
    """Whether bytes look like something other than text: a NUL, or many bytes that are not UTF-8 in the first 8 KB."""
    head = data[:8192]
    if b"\0" in head:
        return True
    text = head.decode("utf-8", "replace")
    # A character cut at the end of the sample counts once, hence the 1.
    return text.count("\ufffd") > 1 + len(text) // 20
