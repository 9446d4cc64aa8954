"""Faults that real endpoints show, dealt out by a seed: what a client must survive.

Whether a call is faulty, and how, depends on the seed, on the request and on how often that request came before: a
retry draws again, and a run repeated with the same seed meets the same faults.

A fault either spoils the answer (`spoil_answer`: odd ids, bad arguments), the stream (`spoil_events`: empty deltas,
calls that got lost) or the transport (`Transport`: cut, stalled, reset, refused). Some only exist in streams, as in
vllm-project/vllm#54701; a request without streaming meets their nearest relative.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from perilune.swarm.scripted.wire import Answer, deltas

Fault = Literal[
    "bad_arguments",
    "bad_event",
    "cut_stream",
    "dropped_calls",
    "duplicate_ids",
    "empty_deltas",
    "error_in_stream",
    "missing_ids",
    "no_usage",
    "odd_ids",
    "overloaded",
    "rate_limit",
    "reset",
    "server_error",
    "stalled_stream",
    "truncated_body",
    "unfinished_stream",
    "wrong_type",
]
FAULTS: tuple[Fault, ...] = get_args(Fault)
ODD_IDS = ("", 'call ä/ü?#%00 "quoted"', "x" * 300, "functions.no_op:0\n", "0")


@dataclass(frozen=True, kw_only=True)
class Chaos:
    share: float
    """Of calls that are faulty, from 0 to 1."""
    seed: int = 0
    faults: tuple[Fault, ...] = FAULTS

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"chaos share {self.share!r}: expected a number from 0 to 1")
        if unknown := set(self.faults) - set(FAULTS):
            raise ValueError(f"unknown faults {sorted(unknown)!r}; expected some of {', '.join(FAULTS)}")

    def draw(self, digest: bytes, attempt: int) -> Fault | None:
        """The fault of this attempt at the request with this digest, or None."""
        key = b"%d %d " % (self.seed, attempt)
        number = int.from_bytes(hashlib.blake2b(key + digest, digest_size=8).digest(), "big")
        if number % 1_000_000 >= self.share * 1_000_000:
            return None
        return self.faults[number // 1_000_000 % len(self.faults)]


@dataclass(frozen=True, slots=True)
class Transport:
    """How the bytes of a response fare."""

    end: Literal["whole", "cut", "stalled", "unfinished"] = "whole"
    """cut: half of the bytes, then the connection closes. stalled: half, then nothing. unfinished: half of the events,
    but a proper end of the body."""


TRANSPORTS: Mapping[Fault, Transport] = {
    "cut_stream": Transport("cut"),
    "truncated_body": Transport("cut"),
    "stalled_stream": Transport("stalled"),
    "unfinished_stream": Transport("unfinished"),
}


def spoil_answer(answer: Answer, fault: Fault, *, stream: bool) -> Answer:
    """The answer with what the fault does to its content; the same one when the fault is not of that kind."""
    if fault == "no_usage":
        return replace(answer, usage=None)
    calls = answer.message.get("tool_calls")
    if not calls:
        return answer
    if fault == "bad_arguments" or (fault == "dropped_calls" and not stream):
        # As many real ones: the text stops in the middle. An empty object gets a stray brace instead.
        last = calls[-1]
        text = last["function"]["arguments"]
        spoilt = text[:-1] if len(text) > 2 else text + "}"
        function = {**last["function"], "arguments": spoilt}
        return _with_calls(answer, [*calls[:-1], {**last, "function": function}])
    if fault == "odd_ids":
        return _with_calls(answer, [{**call, "id": ODD_IDS[i % len(ODD_IDS)]} for i, call in enumerate(calls)])
    if fault == "duplicate_ids":
        return _with_calls(answer, [{**call, "id": calls[0]["id"]} for call in calls])
    if fault == "missing_ids":
        return _with_calls(answer, [{key: call[key] for key in call if key != "id"} for call in calls])
    return answer


def spoil_parts(answer: Answer, fault: Fault) -> Sequence[Mapping[str, Any]]:
    """The deltas of a stream with what the fault does to them."""
    parts = deltas(answer)
    if fault == "dropped_calls":
        return [part for part in parts if "tool_calls" not in part]
    if fault == "empty_deltas":
        empty: list[dict[str, Any]] = [
            {"tool_calls": []},
            {"tool_calls": [{"index": 0}]},
            {"tool_calls": [{"index": 0, "function": {}}]},
            {"tool_calls": None},
            {},
        ]
        calls = answer.message.get("tool_calls")
        fitting = empty if calls else [empty[0], empty[3], empty[4]]
        return [each for part in parts for each in (part, *fitting)]
    return parts


def _with_calls(answer: Answer, calls: list[dict[str, Any]]) -> Answer:
    return replace(answer, message={**answer.message, "tool_calls": calls})
