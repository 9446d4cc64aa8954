"""Bodies that nobody should send: never a 500, never a hang, and the next request is served.

Valid bodies of both endpoints are damaged in one to three places (a value becomes something hostile, a field vanishes
or is copied elsewhere), or their bytes are (cut, flipped, other encodings, absurd depth). The corpus is the same in
every run. Without a socket there are 2,400 of them, over a socket 300.
"""

from __future__ import annotations

import asyncio
import copy
import http.client
import json
import random
from collections.abc import Iterator
from typing import Any

from perilune.serve.limits import Limits
from perilune.serve.server import Server, ServerConfig
from tests.serve.api_engine import MODEL, ScriptedEngine, app_of, call, chat, says, tokenizer

SECONDS = 60.0  # of one exchange; only a hang takes so long
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
PNG = f"data:image/png;base64,{PIXEL}"
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [
        {"role": "system", "content": "You are terse.", "name": "boss"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Look."}, {"type": "image_url", "image_url": {"url": PNG}}],
        },
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "I look.",
            "tool_calls": [
                {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "functions.f:0", "content": "seen"},
    ],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "f",
                "description": "d",
                "parameters": {
                    "type": "object",
                    "properties": {"a": {"type": "integer", "enum": [1, 2]}, "b": {"anyOf": [{"type": "string"}]}},
                    "required": ["a"],
                },
            },
        }
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}},
    "max_tokens": 8,
    "temperature": 0.5,
    "top_p": 0.5,
    "n": 2,
    "stop": ["x"],
    "stream": False,
    "stream_options": None,
    "seed": 1,
    "presence_penalty": 0.5,
    "logit_bias": {"5": 1},
    "logprobs": True,
    "top_logprobs": 2,
    "thinking": {"type": "enabled"},
    "chat_template_kwargs": {"thinking": True},
    "session_id": "s",
    "return_token_ids": True,
}
COMPLETION: dict[str, Any] = {
    "model": MODEL,
    "prompt": ["a", [1, 2, 3]],
    "echo": True,
    "logprobs": 2,
    "max_tokens": 4,
    "n": 2,
    "best_of": 2,
    "stop": "zz",
    "suffix": None,
    "stream": True,
    "stream_options": {"include_usage": True},
    "return_token_ids": True,
    "stop_token_ids": [3],
    "structured_outputs": {"regex": "[a-z]+"},
}
ENDPOINTS = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}
HOSTILE: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 2**70, 10**300, 0.5, -0.5, 1e308, "", "x", "\ud800", "\x00",
    "<|im_end|>", "x" * 5000, "none", "required", "json_schema", "NaN", [], [[]], [None], [1], ["a"], {}, {"": None},
    {"type": "function"}, {"url": "http://[::1"}, {"url": "data:,"}, "data:image/png;base64,AAAA", "http://169.254.169.254/",
    [1] * 300, ["a"] * 300, {str(n): n for n in range(50)}, [[[[[[[[{}]]]]]]]], {"$ref": "#"}, {"pattern": "(" * 50},
    {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}}, "(a+)+$", "[", "\\", "é🌒", "1e999",
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, below in items:
        yield from places(below, (*path, name))


def damaged(body: dict[str, Any], dice: random.Random) -> Any:
    found: Any = copy.deepcopy(body)
    for _ in range(dice.randint(1, 3)):
        path = dice.choice([*places(found)])
        new = copy.deepcopy(dice.choice(HOSTILE))
        if not path:
            found = new if dice.random() < 0.1 else found
            continue
        holder = found
        for name in path[:-1]:
            holder = holder[name]
        kind = dice.random()
        if kind < 0.6:
            holder[path[-1]] = new
        elif kind < 0.8:
            del holder[path[-1]]
        elif isinstance(holder, dict):
            holder[dice.choice([*CHAT, *COMPLETION, "function", "content", "function_call", "x\r\ny"])] = new
        else:
            holder.append(new)
    return found


def broken(content: bytes, dice: random.Random) -> bytes:
    kind = dice.randrange(9)
    where = dice.randrange(len(content) + 1)
    if kind == 0:
        return content[:where]
    if kind == 1:
        return content[:where] + bytes([dice.randrange(256)]) + content[where + 1 :]
    if kind == 2:
        return content[:where] + dice.randbytes(dice.randint(1, 8)) + content[where:]
    if kind == 3:
        return content.decode("utf-8", "replace").encode(dice.choice(["utf-16", "utf-32", "utf-8-sig"]))
    if kind == 4:
        return content + content
    if kind == 5:
        return content.replace(b":", b": ", 1).replace(
            b"1", dice.choice([b"NaN", b"-Infinity", b"1" * 9999, b"1e999"]), 1
        )
    if kind == 6:
        return dice.choice([b"[", b'{"a":']) * dice.choice([10, 500, 50_000])
    if kind == 7:
        return dice.choice([b"", b"null", b"[]", b"0", b'""', b"\x00" * 10, b"\xff\xfe", b"{}"])
    return content.replace(b'"', b"'", dice.randint(1, 9))


def corpus(count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    dice = random.Random(seed)
    paths = list(ENDPOINTS)
    for number in range(count):
        path = paths[number % 2]
        body = damaged(ENDPOINTS[path], dice)
        content = json.dumps(body).encode()
        yield path, broken(content, dice) if dice.random() < 0.3 else content


def check(path: str, content: bytes, status: int, answer: bytes) -> None:
    assert status == 200 or 400 <= status < 429, (status, path, content[:2000], answer)
    if status != 200:
        error = json.loads(answer)["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"], (path, content[:2000])


def engine() -> ScriptedEngine:
    return ScriptedEngine(says("a", "</think>", "b", "<|im_end|>"))


def test_thousands_of_malformed_bodies_without_a_socket():
    app = app_of(engine(), takes_pictures=True)
    good = {"/v1/chat/completions": chat(), "/v1/completions": {"prompt": "x"}}

    async def play() -> dict[int, int]:
        counts: dict[int, int] = {}
        for number, (path, content) in enumerate(corpus(2400, seed=1)):
            async with asyncio.timeout(SECONDS):
                answer = await call(app, path, content)
            check(path, content, answer.status, answer.body)
            counts[answer.status] = counts.get(answer.status, 0) + 1
            if number % 50 == 0:
                assert (await call(app, path, good[path])).status == 200
        return counts

    counts = asyncio.run(play())
    assert counts[400] > 1000 and counts[200] > 20, "the corpus is mostly malformed, and not only at the first field"
    parts = app.state.parts
    assert parts.admission.sequences == 0 and parts.admission.body_bytes == 0


def test_hundreds_of_malformed_bodies_over_a_socket():
    config = ServerConfig(takes_pictures=True, limits=Limits(drain_seconds=1.0))
    with Server(engine(), tokenizer(), MODEL, config) as url:
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=SECONDS)
        for number, (path, content) in enumerate(corpus(300, seed=2)):
            connection.request("POST", path, content, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            check(path, content, answer.status, answer.read())
            if number % 50 == 0:
                connection.request("POST", "/v1/completions", b'{"prompt": "x"}', {"Content-Type": "application/json"})
                answer = connection.getresponse()
                assert answer.status == 200 and answer.read()
        connection.close()


def test_methods_and_paths_that_do_not_exist_are_answered_in_the_same_shape():
    app = app_of()

    async def play() -> None:
        for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "POST"):
            for path in ("/", "/v1", "/v1/chat/completions", "/v1/models/../x", "/v1/models/%00", "/admin/weights"):
                answer = await call(app, path, b"{}", method=method)
                assert answer.status in (400, 401, 403, 404, 405)
                assert answer.error["message"]

    asyncio.run(play())
