"""What an agent saw and said, read from the journal a page at a time.

A page is a range of the agent's own chain; the calls of a reply come with it, each with its outcome once there is one.
Long texts are cut to `MAX_TEXT` characters and say how long they were: where the whole is an artefact, its hash is
there to read on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

from perilune.swarm.journal.event import Event

MAX_PAGE = 100
MAX_TEXT = 50_000

Events = Callable[[str], Iterable[Event]]
"""The events of one chain."""


def page(events: Events, agent: str, *, start: int, end: int, began: float) -> list[dict[str, Any]]:
    """Entries `start` to `end` (exclusive) of an agent; fewer where it has fewer, at most `MAX_PAGE`."""
    end = min(end, start + MAX_PAGE)
    return [_entry(events, agent, event, began) for event in islice(events(agent), start, end)]


def _entry(events: Events, agent: str, event: Event, began: float) -> dict[str, Any]:
    body, note = event.read(), event.read_note()
    entry: dict[str, Any] = {"seq": event.seq, "kind": event.kind, "time": round((event.time - began) * 1000)}
    if event.kind == "started":
        entry |= _texts(body, "system_prompt", "task")
        entry |= {"tools": body.get("tools") or [], "model": body.get("model") or ""}
    elif event.kind == "reply":
        entry |= _reply(events, agent, body) | {
            "seconds": note.get("seconds"),
            "attempts": note.get("attempts"),
            "tokens": (note.get("prompt_tokens") or 0) + (note.get("completion_tokens") or 0),
        }
    elif event.kind == "message":
        entry |= _texts(body, "text") | {"sender": str(body.get("sender", "")), "tainted": bool(body.get("tainted"))}
    elif event.kind == "task":
        entry |= _texts(body, "text") | {"number": body.get("number")}
    elif event.kind == "compacted":
        entry |= _texts(body, "summary") | {"how": str(body.get("how", ""))}
    elif event.kind in ("finished", "result"):
        entry |= _texts(body, "error") | {"status": str(body.get("status", "")), "result": body.get("result")}
    return entry


def _reply(events: Events, agent: str, body: dict[str, Any]) -> dict[str, Any]:
    message = body.get("message") or {}
    content = message.get("content")
    if isinstance(content, list):  # parts: text and images
        content = "".join(
            part.get("text", "") if part.get("type") == "text" else f"[{part.get('type')}]" for part in content
        )
    step = body.get("step")
    shown = _texts({"text": content, "reasoning": message.get("reasoning_content")}, "text", "reasoning")
    return shown | {
        "step": step,
        "finish": str(body.get("finish") or ""),
        "calls": [
            _call(events, f"{agent}#{step}.{index}", call) for index, call in enumerate(message.get("tool_calls") or ())
        ],
    }


def _call(events: Events, chain: str, call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    shown = {"tool": str(function.get("name", ""))} | _texts({"arguments": function.get("arguments")}, "arguments")
    started = None
    for event in events(chain):
        if event.kind == "call_started":
            started = event.time
        elif event.kind == "outcome":
            body = event.read()
            return shown | {
                "outcome": _texts(body, "text")
                | {
                    "status": str(body.get("status", "")),
                    "untrusted": bool(body.get("untrusted")),
                    "result": body.get("result"),
                    "spawned": body.get("spawned") or [],
                    "seconds": event.read_note().get("seconds"),
                }
            }
    return shown | {"outcome": None, "started": started is not None}


def _texts(body: dict[str, Any], *names: str) -> dict[str, Any]:
    """The named texts, cut; `NAME_length` says how long a cut one was."""
    shown: dict[str, Any] = {}
    for name in names:
        value = body.get(name)
        text = "" if value is None else value if isinstance(value, str) else str(value)
        shown[name] = text[:MAX_TEXT]
        if len(text) > MAX_TEXT:
            shown[f"{name}_length"] = len(text)
    return shown
