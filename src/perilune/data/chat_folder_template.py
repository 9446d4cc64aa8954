"""The chat template that a model's folder brings along, run where it can do no harm.

    with FolderTemplate(source) as template:
        segments = template.render(messages, tools, thinking=True)

A folder's `chat_template.jinja` is a program by a stranger. It runs in a process of its own, in jinja2's sandbox, with
limits on time, memory and length (data/template_process.py), and gives back one string.

In that string the template's own special tokens have to become tokens, and the same spelling in a message must not. So
every text of a message or tool goes in with stand-ins, private characters that nobody else uses, for the characters
that begin and end special tokens, and for the whole of a text that is itself a part of such a name. They are turned
back after the string was cut at its special tokens. A special token made of a text would need its first character, its
last one or a whole part of its name from there, and all three are stand-ins.

What this module promises: no text of a message or tool becomes a special token or a part of one (a template that cuts
a piece out of a text and writes `<|` and `|>` around it means it); a template that hangs, grows or raises costs one
TemplateError; pictures stand where the template has put its placeholders.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from perilune.data.chat import END_OF_TURN, ChatError, ChatMessage, Segment, Tool, joined
from perilune.data.hostile import RenderFailed
from perilune.data.render_worker import RenderWorker
from perilune.data.tokenizer import SPECIAL_TOKENS
from perilune.data.tool_declarations import declare_tools

TEMPLATE_FILE = "chat_template.jinja"
BUILT_IN = Path(__file__).with_name(TEMPLATE_FILE)
PROGRAM = Path(__file__).with_name("template_process.py")
MAX_CHARACTERS = 16 << 20
MEMORY_BYTES = 512 << 20
RENDER_SECONDS = 2.0

EDGES = "<>[]"
"""The characters with which special tokens begin and end."""
_PRIVATE = re.compile("[\U000f0000-\U0010ffff]")
_BLOCK = 128
_MEDIA = re.compile(
    r"<\|media_begin\|>(image|video)<\|media_content\|><\|media_pad\|><\|media_end\|>|<\|kimi_k25_(video)_placeholder\|>"
)


class TemplateError(ChatError):
    """A chat template that cannot be used, or that refuses these messages."""


class FolderTemplate:
    """A `ChatTemplate` from jinja source. `special_tokens` are the names that become tokens."""

    def __init__(
        self,
        source: str,
        *,
        name: str = TEMPLATE_FILE,
        special_tokens: Sequence[str] = SPECIAL_TOKENS,
        max_characters: int = MAX_CHARACTERS,
        memory_bytes: int = MEMORY_BYTES,
        seconds: float = RENDER_SECONDS,
    ) -> None:
        self._source = source
        self._name = name
        self._specials = re.compile("(" + "|".join(map(re.escape, special_tokens)) + ")")
        self._parts = frozenset(
            token[start:end]
            for token in special_tokens
            for start in range(len(token))
            for end in range(start + 1, len(token) + 1)
        )
        self._seconds = seconds
        self._worker = RenderWorker(
            program=PROGRAM, memory_bytes=memory_bytes, render_seconds=seconds, arguments=(str(max_characters),)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._worker.close()

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool],
        *,
        thinking: bool = True,
        add_generation_prompt: bool = True,
    ) -> list[Segment]:
        base = _free_block(messages, tools)
        options = {"thinking": thinking, "add_generation_prompt": add_generation_prompt}
        return self._segments(self._run(messages, tools, base, options), base)

    def continuation(
        self, messages: Sequence[ChatMessage], count: int, tools: Sequence[Tool], *, thinking: bool = True
    ) -> list[Segment] | None:
        base = _free_block(messages, tools)
        options = {"thinking": thinking, "preserve_thinking": True}
        before = self._run(messages[:count], tools, base, options | {"add_generation_prompt": False})
        after = self._run(messages, tools, base, options | {"add_generation_prompt": True})
        end = before.rfind(END_OF_TURN)
        if end < 0 or not after.startswith(before):
            return None
        # A template may write something between turns: it belongs to what follows.
        return self._segments(after[end + len(END_OF_TURN) :], base)

    def _run(self, messages: Sequence[ChatMessage], tools: Sequence[Tool], base: int, options: dict[str, Any]) -> str:
        def shielded(value: Any) -> Any:
            return _shielded(value, base, self._parts)

        variables: dict[str, Any] = {
            "messages": [_message(message, shielded) for message in messages],
            "tools": [_tool(tool, shielded) for tool in tools] or None,
            "documents": None,
            "bos_token": "[BOS]",
            "eos_token": "[EOS]",
            **options,
        }
        if tools:
            variables["tools_ts_str"] = shielded(declare_tools(tools))
        try:
            answer = json.loads(self._worker.render({"template": self._source, "variables": variables}))
        except RenderFailed:
            limits = f"{self._seconds:g} s of processor time, or more memory than it may have"
            raise TemplateError("messages", f"cannot be rendered: {self._name!r} needs more than {limits}") from None
        if "error" in answer:
            raise TemplateError("messages", f"cannot be rendered by {self._name!r}: {answer['error']}")
        return answer["text"]

    def _segments(self, text: str, base: int) -> list[Segment]:
        back = {base + code: code for code in range(_BLOCK)}
        found: list[Segment] = []
        position = 0
        for slot in _MEDIA.finditer(text):
            found += self._ordinary(text[position : slot.start()], back)
            found.append(Segment(text=slot.group(1) or slot.group(2), kind="media"))
            position = slot.end()
        found += self._ordinary(text[position:], back)
        return joined(found)

    def _ordinary(self, text: str, back: dict[int, int]) -> Iterator[Segment]:
        for number, part in enumerate(self._specials.split(text)):
            if part == "<|media_pad|>":
                raise TemplateError("messages", f"have a picture whose placeholder in {self._name!r} is not known here")
            yield Segment(text=part, kind="special") if number % 2 else Segment(text=part.translate(back))


def _message(message: ChatMessage, shielded: Callable[[Any], Any]) -> dict[str, Any]:
    """A message as templates expect it; its role and the kinds of its parts are the program's own words."""
    plain = message.plain()
    if message.media:
        plain["content"] = [
            {"type": "text", "text": shielded(part["text"])} if part["type"] == "text" else _placeholder(part["type"])
            for part in plain["content"]
        ]
    elif "content" in plain:
        plain["content"] = shielded(plain["content"])
    for key in plain.keys() & {"name", "reasoning_content", "tool_call_id"}:
        plain[key] = shielded(plain[key])
    if message.tool_calls:
        plain["tool_calls"] = [
            {"id": shielded(call.id), "type": "function", "function": {"name": shielded(call.name), "arguments": text}}
            for call in message.tool_calls
            for text in [shielded(call.arguments)]
        ]
    return plain


def _tool(tool: Tool, shielded: Callable[[Any], Any]) -> dict[str, Any]:
    return {"type": "function", "function": {key: shielded(value) for key, value in tool.plain()["function"].items()}}


def _placeholder(kind: str) -> dict[str, str]:
    kind = kind.removesuffix("_url")
    return {"type": kind, kind: ""}


def _shielded(value: Any, base: int, parts: frozenset[str]) -> Any:
    if isinstance(value, str):
        hidden = value if value in parts else EDGES
        return value.translate({ord(character): base + ord(character) for character in hidden})
    if isinstance(value, dict):
        return {_shielded(key, base, parts): _shielded(inner, base, parts) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_shielded(inner, base, parts) for inner in value]
    return value


def _free_block(messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> int:
    """The first of 128 neighbouring private characters that no message or tool has."""
    plain = [message.plain() for message in messages] + [tool.plain() for tool in tools]
    taken = {ord(character) // _BLOCK for character in _PRIVATE.findall(json.dumps(plain, ensure_ascii=False))}
    blocks = range(0xF0000 // _BLOCK, 0x110000 // _BLOCK)
    free = next((block for block in blocks if block not in taken), None)
    if free is None:
        raise TemplateError("messages", "use private characters of every block, expected some block to be free")
    return free * _BLOCK
