"""What a model sees of an agent's past, kept below a number of bytes.

Ways to make room, the cheap one first: results of older turns are hidden behind the handle under which they are stored,
then everything but the last turn is replaced by a summary that the model itself writes. Where the last turns alone are
more than a model can be asked to summarize, their results are hidden too, or they are dropped behind a handle. All of
it is in the journal; the system prompt and the task stay as they were, so they must leave room for the work.
"""

from __future__ import annotations

from perilune.swarm.messages import Message
from perilune.swarm.results import shortened

KEPT_TURNS = 2
"""Turns whose results stay when older ones are hidden."""
FULL = 0.7
"""Share of the context at which room is made: one more turn and a summary must still fit."""
FIXED = 0.6
"""Share of the context that the system prompt and the task may take."""


class Context:
    """A history that only grows, apart from the ways to make room."""

    def __init__(self, system_prompt: str, task: str) -> None:
        self._fixed = (Message("system", system_prompt), Message("user", task))
        self.messages: list[Message] = list(self._fixed)
        self.size = sum(len(message.wire) for message in self.messages)

    def add(self, message: Message) -> None:
        self.messages.append(message)
        self.size += len(message.wire)

    def past(self) -> bytes:
        """All but the fixed part, one message on each line."""
        return b"\n".join(message.wire for message in self.messages[len(self._fixed) :])

    def hideable(self, *, kept: int = KEPT_TURNS) -> list[int]:
        """Positions of results that are older than the last turns and longer than what would stand in their place."""
        turns = [at for at, message in enumerate(self.messages) if message.role == "assistant"]
        border = len(self.messages) if not kept else turns[-kept] if len(turns) > kept else 0
        return [
            at
            for at, message in enumerate(self.messages[:border])
            if message.role == "tool" and len(message.wire) > 2 * len(hidden(message).wire)
        ]

    def hide(self, positions: list[int], handles: list[str]) -> None:
        for at, handle in zip(positions, handles):
            self.messages[at] = hidden(self.messages[at], handle)
        self._measure()

    def summarize(self, summary: str, limit: float) -> None:
        """Keep the fixed part, the summary, and the last turn with its results unless it alone is too large."""
        turns = [at for at, message in enumerate(self.messages) if message.role == "assistant"]
        last = self.messages[turns[-1] :] if turns else []
        room = int(limit) - sum(len(message.wire) for message in self._fixed) - 200
        told = Message("user", f"What you found and did so far:\n\n{shortened(summary, max(0, room))}")
        self.messages = [*self._fixed, told, *last]
        self._measure()
        if self.size > limit:
            self.messages = [*self._fixed, told]
            self._measure()

    def drop(self, handle: str) -> None:
        """Keep the fixed part and a handle to the rest."""
        text = (
            f"[Your earlier turns were too long for your context. They are stored: read_result({handle!r}, start, end)]"
        )
        self.messages = [*self._fixed, Message("user", text)]
        self._measure()

    def _measure(self) -> None:
        self.size = sum(len(message.wire) for message in self.messages)


def hidden(message: Message, handle: str = "art:0123456789abcdef") -> Message:
    text = f"[An earlier result of {len(message.text):,} characters is hidden; read_result({handle!r}) shows it.]"
    return Message("tool", text, tool_call_id=message.tool_call_id)
