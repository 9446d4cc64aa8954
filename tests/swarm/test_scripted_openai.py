"""The official `openai` client understands the scripted server: the wire format is the real one."""

from typing import Any

import pytest

from perilune.swarm.scripted import Behaviour, Call, Reply, ThreadedServer, Turn

openai = pytest.importorskip("openai")

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("look", "listen")
]


def looks(turn: Turn) -> Reply:
    if not turn.exchanges:
        return Reply("Let me see.", (Call("look", {"at": "ünïcode"}), Call("listen", {"to": "x"})))
    return Reply(f"I saw {turn.exchanges[0][2]} and heard {turn.exchanges[1][2]}.")


def client_of(server: ThreadedServer) -> Any:
    return openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0)


@pytest.mark.parametrize("stream", [False, True])
def test_the_official_client_holds_a_conversation_with_tools(stream: bool) -> None:
    with ThreadedServer(looks) as server, client_of(server) as client:
        messages: list[Any] = [{"role": "user", "content": "What is there?"}]

        def say() -> tuple[Any, Any, str]:
            common: dict[str, Any] = {"model": "m", "messages": messages, "tools": TOOLS, "max_tokens": 100}
            if not stream:
                whole = client.chat.completions.create(**common)
                return whole.choices[0].message, whole.usage, whole.choices[0].finish_reason
            with client.chat.completions.stream(**common, stream_options={"include_usage": True}) as events:
                whole = events.get_final_completion()
            return whole.choices[0].message, whole.usage, whole.choices[0].finish_reason

        message, usage, finish = say()
        assert message.content == "Let me see." and finish == "tool_calls"
        assert [(call.id, call.type, call.function.name, call.function.arguments) for call in message.tool_calls] == [
            ("functions.look:0", "function", "look", '{"at":"ünïcode"}'),
            ("functions.listen:1", "function", "listen", '{"to":"x"}'),
        ]
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens > 0
        messages.append(message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
        for call, result in zip(message.tool_calls, ("a moon", "an owl")):
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        message, _, finish = say()
        assert message.content == "I saw a moon and heard an owl." and finish == "stop"


def test_the_official_client_reads_chunks_models_and_errors() -> None:
    with ThreadedServer(looks, Behaviour(models=("moon-1",))) as server, client_of(server) as client:
        chunks = list(
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}], stream=True)
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Let me see."
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        assert [model.id for model in client.models.list()] == ["moon-1"]
    with ThreadedServer(looks, Behaviour(max_concurrent=0)) as server, client_of(server) as client:
        with pytest.raises(openai.RateLimitError, match="too many calls") as caught:
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
        assert caught.value.response.headers["retry-after"] == "1"
