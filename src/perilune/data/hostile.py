"""What a stranger's picture source can end in besides a picture: refused before it is drawn, or lost while it is drawn.

Both are ordinary outcomes of scoring what a model wrote. Code that draws generated sources catches `PictureError` and
counts it; nothing else may come out of the guards and the render worker because of what a source says.
"""

from typing import Literal

Rule = Literal[
    "animation",
    "attribute",
    "characters",
    "colour",
    "css",
    "depth",
    "doctype",
    "element",
    "encoding",
    "instruction",
    "keyword",
    "markup",
    "namespace",
    "nesting",
    "number",
    "path",
    "size",
    "text",
    "transform",
    "url",
]
"""The rule that a source broke."""


class PictureError(ValueError):
    """A source that gives no picture."""


class HostileInput(PictureError):
    """A source that the guard refuses: `rule` is the rule it broke, `reason` says where and what is allowed."""

    def __init__(self, rule: Rule, reason: str) -> None:
        super().__init__(f"{rule}: {reason}")
        self.rule = rule
        self.reason = reason


class RenderFailed(PictureError):
    """A clean source whose rendering took too long or too much memory, or whose renderer refused or died."""


class RendererMissing(RuntimeError):
    """There is no renderer on this machine; the message says what to install."""


def shown(text: object, limit: int = 40) -> str:
    """A stranger's text in a message: quoted, escaped and cut."""
    words = text if isinstance(text, str) else str(text)
    return ascii(words[:limit]) + ("..." if len(words) > limit else "")
