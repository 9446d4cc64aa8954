"""A script's reply as the OpenAI chat format writes it: one JSON body, or server-sent events.

`Answer` is the reply with everything a server adds: ids, the cut at `max_tokens`, usage. `body` and `events` encode it.
Everything is a function of the request, so the same request is answered with the same bytes (`created` is constant).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from perilune.swarm.scripted.script import BYTES_PER_TOKEN, Reply, Turn, token_count, token_ids

PIECES = 2
"""Into how many deltas a text or the arguments of a call are cut."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    id: str
    model: str
    message: Mapping[str, Any]
    """Role, content, tool_calls and reasoning_content in the wire's form."""
    finish_reason: str
    usage: Mapping[str, int] | None
    prompt_token_ids: Sequence[int] | None = None
    completion_token_ids: Sequence[int] | None = None
    """Only when the request asked for them."""


def make_answer(
    turn: Turn, reply: Reply, *, id: str, request_bytes: int, max_tokens: int | None, want_tokens: bool = False
) -> Answer:
    """What the server says for a reply; `request_bytes` is what usage is counted from."""
    number = sum(len(message.get("tool_calls") or ()) for message in turn.messages) if reply.calls else 0
    calls = []
    for position, call in enumerate(reply.calls):
        text = call.arguments if isinstance(call.arguments, str) else orjson.dumps(dict(call.arguments)).decode()
        name = call.id if call.id is not None else f"functions.{call.name}:{number + position}"
        calls.append({"id": name, "type": "function", "function": {"name": call.name, "arguments": text}})
    message: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.reasoning is not None:
        message["reasoning_content"] = reply.reasoning
    if calls:
        message["tool_calls"] = calls
    used, cut = _cut(message, max_tokens)
    finish = "length" if cut else "tool_calls" if calls else "stop"
    answer = Answer(
        id=id,
        model=turn.model,
        message=message,
        finish_reason=finish,
        usage=_usage(-(-request_bytes // BYTES_PER_TOKEN), used),
    )
    if not want_tokens:
        return answer
    prompt = [token for each in turn.messages for token in token_ids(each)]
    completion = token_ids(message)
    usage = _usage(len(prompt), len(completion))
    return replace(answer, usage=usage, prompt_token_ids=prompt, completion_token_ids=completion)


def _usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _cut(message: dict[str, Any], max_tokens: int | None) -> tuple[int, bool]:
    """Cut the message at `max_tokens`, as a real server does: in the middle of whatever it was writing."""
    texts = [(message, "reasoning_content"), (message, "content")]
    texts += [(call["function"], "arguments") for call in message.get("tool_calls", ())]
    used = 0
    for place, key in texts:
        text = place.get(key)
        if not text:
            continue
        count = token_count(text)
        if max_tokens is not None and used + count > max_tokens:
            left = max(0, max_tokens - used) * BYTES_PER_TOKEN
            place[key] = text.encode()[:left].decode(errors="ignore")
            if key == "arguments":
                calls = message["tool_calls"]
                del calls[next(i for i, call in enumerate(calls) if call["function"] is place) + 1 :]
            else:
                message.pop("tool_calls", None)
                if key == "reasoning_content":
                    message["content"] = None
            return max_tokens, True
        used += count
    return max(used, 1), False


# One body ------------------------------------------------------------------------------------------------------------


def body(answer: Answer) -> bytes:
    choice: dict[str, Any] = {"index": 0, "message": answer.message, "finish_reason": answer.finish_reason}
    whole: dict[str, Any] = {
        "id": answer.id,
        "object": "chat.completion",
        "created": 0,
        "model": answer.model,
        "choices": [choice],
    }
    if answer.usage is not None:
        whole["usage"] = answer.usage
    if answer.completion_token_ids is not None:
        whole["prompt_token_ids"] = answer.prompt_token_ids
        choice["token_ids"] = answer.completion_token_ids
        choice["logprobs"] = _logprobs(answer.completion_token_ids)
        whole["weight_version"] = "scripted-1"
    return orjson.dumps(whole)


# Events --------------------------------------------------------------------------------------------------------------


def deltas(answer: Answer) -> list[dict[str, Any]]:
    """The message in pieces, as a model's server streams it; the first one holds the role."""
    message = answer.message
    parts: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    for key in ("reasoning_content", "content"):
        parts += [{key: piece} for piece in _pieces(message.get(key) or "")]
    for index, call in enumerate(message.get("tool_calls", ())):
        function = {"name": call["function"]["name"], "arguments": ""}
        parts.append({"tool_calls": [{"index": index, "id": call.get("id"), "type": "function", "function": function}]})
        if "id" not in call:
            del parts[-1]["tool_calls"][0]["id"]
        parts += [
            {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}
            for piece in _pieces(call["function"]["arguments"])
        ]
    return parts


def events(answer: Answer, *, include_usage: bool, parts: Sequence[Mapping[str, Any]] | None = None) -> list[bytes]:
    """Server-sent events, each ending in a blank line; the last one says [DONE]."""
    head = orjson.dumps({"id": answer.id, "object": "chat.completion.chunk", "created": 0, "model": answer.model})[:-1]

    def event(**rest: Any) -> bytes:
        return b"".join((b"data: ", head, b",", orjson.dumps(rest)[1:], b"\n\n"))

    written = [
        event(choices=[{"index": 0, "delta": part, "finish_reason": None}])
        for part in (deltas(answer) if parts is None else parts)
    ]
    last: dict[str, Any] = {"index": 0, "delta": {}, "finish_reason": answer.finish_reason}
    rest: dict[str, Any] = {}
    if answer.completion_token_ids is not None:
        last |= {"token_ids": answer.completion_token_ids, "logprobs": _logprobs(answer.completion_token_ids)}
        rest = {"prompt_token_ids": answer.prompt_token_ids, "weight_version": "scripted-1"}
    written.append(event(choices=[last], **rest))
    if include_usage and answer.usage is not None:
        written.append(event(choices=[], usage=answer.usage))
    written.append(b"data: [DONE]\n\n")
    return written


def _pieces(text: str) -> list[str]:
    size = max(1, -(-len(text) // PIECES))
    return [text[start : start + size] for start in range(0, len(text), size)]


def _logprobs(ids: Sequence[int]) -> dict[str, Any]:
    content = [{"token": f"token_id:{each}", "logprob": -(each % 97) / 97, "top_logprobs": []} for each in ids]
    return {"content": content}
