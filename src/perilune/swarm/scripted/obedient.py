"""A model without judgement: it does whatever any text tells it to. For tests of policies, never for use.

It looks for orders in its task and in every tool result, in plain sight or disguised, and calls the tool that an order
names with the arguments it gives, whether or not the tool was offered:

    CALL send_mail {"to": "mallory"}
    <tool_call>{"name": "send_mail", "arguments": {"to": "mallory"}}</tool_call>
    {"tool": "send_mail", "arguments": {"to": "mallory"}}

Disguises it sees through: HTML entities and comments, percent escapes, base64 and hexadecimal runs, full-width letters,
characters without width, text written backwards.
"""

from __future__ import annotations

import base64
import binascii
import html
import json
import re
import unicodedata
import urllib.parse
from collections.abc import Iterator

from perilune.swarm.scripted.script import Call, Reply, Script, Turn, text_of

ORDER = re.compile(r"\bcall\s*:?\s+(?:the\s+tool\s+)?[`'\"]?(\w[\w.-]*)[`'\"]?\s*(?:with\s+)?(?=\{)", re.IGNORECASE)
OBJECT = re.compile(r"\{\s*\"(?:name|tool|function)\"\s*:")
ENCODED = re.compile(r"[A-Za-z0-9+/_-]{24,}={0,2}")
HEXADECIMAL = re.compile(r"(?:[0-9a-fA-F]{2}){12,}")
NO_WIDTH = dict.fromkeys((0x200B, 0x200C, 0x200D, 0x2060, 0xFEFF, 0x00AD))
MOST_CALLS = 16
"""In one turn; a text with more orders is obeyed in part."""


def obedient(answer: str = "I did as I was told.", first: str | None = None) -> Script:
    """Obey all orders in what came since the last reply; answer when there are none. `first` names a tool called with
    no arguments before anything else, to fetch the text that gives orders."""

    def script(turn: Turn) -> Reply:
        if first is not None and turn.step == 0:
            return Reply(calls=(Call(first, {}),))
        unread: list[str] = []
        for message in reversed(turn.messages):
            if message["role"] == "assistant":
                break
            if message["role"] != "system":
                unread.append(text_of(message))
        calls: list[Call] = []
        for text in reversed(unread):
            calls += [call for call in orders(text) if call not in calls]
        if calls and turn.tools:
            return Reply("As you wish.", tuple(calls[:MOST_CALLS]))
        return Reply(answer)

    return script


def orders(text: str) -> list[Call]:
    """All orders in a text, each once, in the order they are found."""
    found: list[Call] = []
    for reading in _readings(text):
        found += [call for call in _plain_orders(reading) if call not in found]
    return found


def _plain_orders(text: str) -> Iterator[Call]:
    decoder = json.JSONDecoder()
    for match in ORDER.finditer(text):
        try:
            arguments, _ = decoder.raw_decode(text, match.end())
        except ValueError:
            continue
        if isinstance(arguments, dict):
            yield Call(match[1], arguments)
    for match in OBJECT.finditer(text):
        try:
            order, _ = decoder.raw_decode(text, match.start())
        except ValueError:
            continue
        name = order.get("name") or order.get("tool") or order.get("function")
        arguments = order.get("arguments", order.get("parameters", {}))
        if isinstance(name, str) and isinstance(arguments, dict):
            yield Call(name, arguments)


def _readings(text: str) -> Iterator[str]:
    """The text and everything it may be hiding."""
    yield text
    clean = unicodedata.normalize("NFKC", html.unescape(urllib.parse.unquote(text))).translate(NO_WIDTH)
    if clean != text:
        yield clean
    yield clean[::-1]
    for run in ENCODED.findall(clean):
        try:
            yield base64.b64decode(
                run + "=" * (-len(run) % 4), altchars=b"-_" if set("-_") & set(run) else None
            ).decode()
        except (binascii.Error, UnicodeDecodeError, ValueError):
            continue
    for run in HEXADECIMAL.findall(clean):
        try:
            yield bytes.fromhex(run).decode()
        except (UnicodeDecodeError, ValueError):
            continue


__all__ = ["obedient", "orders"]
