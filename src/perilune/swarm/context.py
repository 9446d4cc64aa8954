"""What a model sees of an agent's past, kept below a number of bytes.

Two ways to make room, the cheap one first: results of older turns are hidden behind the handle under which they are
stored, then everything but the last turn is replaced by a summary that the model itself writes. Both are events of the
journal; both leave the system prompt and the task as they were.
"""

from __future__ import annotations

from perilune.swarm.messages import Message

KEPT_TURNS = 2
"""Turns whose results stay when older ones are hidden."""
FULL = 0.8
"""Share of the context at which room is made."""


class Context:
    """A history that only grows, apart from the two ways to make room."""

    def __init__(self, system_prompt: str, task: str) -> None:
        self._fixed = (Message("system", system_prompt), Message("user", task))
        self.messages: list[Message] = list(self._fixed)
        self.size = sum(len(message.wire) for message in self.messages)

    def add(self, message: Message) -> None:
        self.messages.append(message)
        self.size += len(message.wire)

    def hideable(self) -> list[int]:
        """Positions of results that belong to older turns and are longer than what would stand in their place."""
        turns = [at for at, message in enumerate(self.messages) if message.role == "assistant"]
        border = turns[-KEPT_TURNS] if len(turns) > KEPT_TURNS else 0
        return [
            at
            for at, message in enumerate(self.messages[:border])
            if message.role == "tool" and len(message.text) > 2 * len(hidden(message).text)
        ]

    def hide(self, positions: list[int], handles: list[str]) -> None:
        for at, handle in zip(positions, handles):
            self.messages[at] = hidden(self.messages[at], handle)
        self._measure()

    def summarize(self, summary: str, limit: float) -> None:
        """Keep the fixed part, the summary, and the last turn with its results unless it alone is too large."""
        turns = [at for at, message in enumerate(self.messages) if message.role == "assistant"]
        last = self.messages[turns[-1] :] if turns else []
        self.messages = [*self._fixed, Message("user", f"What you found and did so far:\n\n{summary}"), *last]
        self._measure()
        if self.size > limit:
            self.messages = self.messages[: len(self._fixed) + 1]
            self._measure()

    def _measure(self) -> None:
        self.size = sum(len(message.wire) for message in self.messages)


def hidden(message: Message, handle: str = "art:0123456789abcdef") -> Message:
    text = f"[An earlier result of {len(message.text):,} characters is hidden; read_result({handle!r}) shows it.]"
    return Message("tool", text, tool_call_id=message.tool_call_id)
