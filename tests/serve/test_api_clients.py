"""Programs other people wrote, and our own client, drive the server over a socket: openai, curl, the swarm's."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from PIL import Image

from perilune.serve.api import ServerConfig
from perilune.serve.keys import Keys
from perilune.serve.limits import Limits
from perilune.serve.request import Request
from perilune.serve.server import Server
from perilune.swarm.client import ModelError, ModelRequest
from perilune.swarm.http_client import HTTPClient
from perilune.swarm.messages import Message
from perilune.swarm.provider import Limits as ClientLimits
from perilune.swarm.provider import Provider, Secret
from tests.serve.api_engine import MODEL, ScriptedEngine, ids, tokenizer

KEY, ADMIN = "key-of-a-caller-1", "key-of-the-admin-1"
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}


def script(request: Request) -> list[int]:
    """Calls a tool when one is declared and has not answered; speaks of what it sees otherwise."""
    text = tokenizer().decode(request.prompt)
    if "Return of functions.weather:0" in text:
        return ids("I know.", "</think>", "It is sunny.", "<|im_end|>")
    if "weather" in text:
        call = ["<|tool_call_begin|>", "functions.weather:0", "<|tool_call_argument_begin|>", '{"place": "Moon"}']
        section = ["<|tool_calls_section_begin|>", *call, "<|tool_call_end|>", "<|tool_calls_section_end|>"]
        return ids("I ask.", "</think>", *section, "<|im_end|>")
    if request.media:
        return ids("I look.", "</think>", f"{len(request.media)} picture", "<|im_end|>")
    return ids("Hm.", "</think>", '{"answer": "Grüße 🌒"}', "<|im_end|>")


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine(script)


@pytest.fixture(scope="module")
def url(engine: ScriptedEngine) -> Iterator[str]:
    async def load(path: str, version: int | None) -> int:
        return version or 0

    config = ServerConfig(
        keys=Keys(api=(KEY,), admin=ADMIN), takes_pictures=True, load_weights=load, limits=Limits(drain_seconds=1.0)
    )
    with Server(engine, tokenizer(), MODEL, config) as address:
        yield address


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60) as made:
        yield made


def user(content: Any) -> Any:
    return [{"role": "user", "content": content}]


def picture() -> str:
    content = io.BytesIO()
    Image.new("RGB", (28, 28), "red").save(content, "PNG")
    return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"


# openai ---------------------------------------------------------------------------------------------------------------


def test_openai_chats_and_streams(client):
    reply = client.chat.completions.create(model=MODEL, messages=user("hello"), logprobs=True, top_logprobs=3)
    assert json.loads(reply.choices[0].message.content) == {"answer": "Grüße 🌒"}
    assert reply.choices[0].message.reasoning_content == "Hm." and reply.choices[0].finish_reason == "stop"
    assert reply.usage.completion_tokens == len(reply.choices[0].logprobs.content)
    assert len(reply.choices[0].logprobs.content[0].top_logprobs) == 3
    stream = client.chat.completions.create(
        model=MODEL, messages=user("hello"), stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == reply.choices[0].message.content and chunks[-1].usage == reply.usage


@pytest.mark.parametrize("stream", [False, True])
def test_openai_makes_a_tool_round_trip(client, engine, stream):
    messages = user("How is the weather?")
    if stream:
        with client.chat.completions.stream(model=MODEL, messages=messages, tools=[TOOL]) as events:
            for _ in events:
                pass
            message = events.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL]).choices[0].message
    call = message.tool_calls[0]
    assert call.id == "functions.weather:0" and json.loads(call.function.arguments) == {"place": "Moon"}
    plain = {"role": "assistant", "content": None, "tool_calls": [call.model_dump(include={"id", "type", "function"})]}
    plain["tool_calls"][0]["function"].pop("parsed_arguments", None)
    answer = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    reply = client.chat.completions.create(model=MODEL, messages=[*messages, plain, answer], tools=[TOOL])
    assert reply.choices[0].message.content == "It is sunny." and reply.choices[0].finish_reason == "stop"
    assert "## Return of functions.weather:0\nsunny" in tokenizer().decode(engine.seen[-1].prompt)


def test_openai_sends_a_picture(client):
    parts = [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": picture()}}]
    assert client.chat.completions.create(model=MODEL, messages=user(parts)).choices[0].message.content == "1 picture"


def test_openai_completes_text_and_token_ids(client):
    reply = client.completions.create(model=MODEL, prompt=["a", "b"], n=2, max_tokens=3, logprobs=2, echo=True)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert reply.choices[2].text.startswith("b") and reply.choices[0].logprobs.token_logprobs[0] is None
    whole = client.completions.create(model=MODEL, prompt=[5, 6], max_tokens=3)
    pieces = list(client.completions.create(model=MODEL, prompt=[5, 6], max_tokens=3, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text == "Hm."


def test_openai_lists_models(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_openai_reads_our_errors(client, url):
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=user("x"), temperature=9)
    assert bad.value.param == "temperature" and "from 0 to 2" in bad.value.message
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=user("x"))
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def test_openai_reads_an_error_in_the_middle_of_a_stream(client, engine):
    version_of, engine.version_of = engine.version_of, lambda number: 1 // (5 - number)
    try:
        with pytest.raises(openai.APIError, match="log says why"):
            list(client.chat.completions.create(model=MODEL, messages=user("x"), stream=True))
    finally:
        engine.version_of = version_of


# curl -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def curl(url: str, tool_path: Callable[[str], str]) -> Callable[..., tuple[int, str]]:
    """curl(path, body, key) -> (status, text of the answer)."""
    program = tool_path("curl")

    def run(path: str, body: Any = None, key: str | None = KEY, *options: str) -> tuple[int, str]:
        command = [program, "-sS", "-N", "-w", "\n%{http_code}", "--max-time", "60", *options, url + path]
        if key is not None:
            command += ["-H", f"Authorization: Bearer {key}"]
        if body is not None:
            command += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        text, _, status = out.rpartition("\n")
        return int(status), text

    return run


@pytest.mark.needs_tool("curl")
def test_curl_drives_every_endpoint(curl):
    chat = {"model": MODEL, "messages": user("hello")}
    status, text = curl("/v1/chat/completions", chat)
    assert status == 200 and json.loads(text)["choices"][0]["finish_reason"] == "stop"
    status, text = curl("/v1/chat/completions", chat | {"stream": True})
    assert status == 200 and text.rstrip().endswith("data: [DONE]") and text.count("data: ") > 3
    status, text = curl("/v1/completions", {"prompt": "x", "max_tokens": 2})
    assert status == 200 and json.loads(text)["usage"]["completion_tokens"] == 2
    assert curl("/v1/models")[0] == 200 and curl("/health", key=None) == (200, '{"status":"ok"}')
    status, text = curl("/metrics", key=ADMIN)
    assert status == 200 and "perilune_requests_total" in text
    assert curl("/admin/weights", {"path": "x", "version": 5}, ADMIN) == (200, '{"weight_version":5}')


@pytest.mark.needs_tool("curl")
def test_curl_is_told_what_is_wrong(curl):
    assert curl("/v1/models", key=None)[0] == 401 and curl("/metrics")[0] == 403 and curl("/v2")[0] == 404
    status, text = curl("/v1/chat/completions", {"messages": 3})
    assert status == 400 and json.loads(text)["error"]["param"] == "messages"
    assert curl("/v1/chat/completions", None, KEY, "-X", "POST", "-d", "{}")[0] == 415


# The swarm's own client -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_the_swarm_talks_to_the_server(url, engine, stream):
    provider = Provider(base_url=f"{url}/v1", api_key_env=None, api_key=Secret(KEY), session_field="session_id")

    async def play() -> None:
        async with HTTPClient(providers=(provider,), stream=stream, token_ids=True) as client:
            tools = json.dumps([TOOL]).encode()
            first = Message("user", "How is the weather?")
            asked = ModelRequest(
                agent="a", model=MODEL, messages=[first], tools=tools, max_tokens=200, session=f"s{stream}"
            )
            reply = await client.complete(asked)
            assert reply.message.tool_calls[0].id == "functions.weather:0" and reply.attempts == 1
            assert reply.prompt_token_ids == engine.seen[-1].prompt
            assert len(reply.token_ids) == len(reply.logprobs) == reply.usage.completion_tokens
            assert reply.weight_version == "0"

    asyncio.run(play())


def test_the_swarm_waits_as_long_as_a_full_server_says():
    engine = ScriptedEngine(script, capacity=0)
    config = ServerConfig(limits=Limits(drain_seconds=1.0))
    with Server(engine, tokenizer(), MODEL, config) as url:

        async def play() -> None:
            async with HTTPClient(
                base_url=f"{url}/v1", api_key_env=None, limits=ClientLimits(call_seconds=3.0)
            ) as client:
                request = ModelRequest(agent="a", model=MODEL, messages=[Message("user", "x")], max_tokens=5)
                with pytest.raises(ModelError) as refused:
                    await client.complete(request)
                assert refused.value.kind == "rate_limit" and refused.value.status == 429
                engine.capacity = 1
                assert (await client.complete(request)).finish_reason in ("length", "stop")

        asyncio.run(play())
