"""Token in, token out through the server: in random dialogues with tools, every turn begins with the ids before."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from perilune.data.chat import encode, generation_prompt, render_message
from perilune.data.chat_messages import parse_message
from tests.serve.api_engine import ScriptedEngine, app_of, call, ids, tokenizer

PATH = "/v1/chat/completions"
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("search", "look")
]
WORDS = ("moon", " earth", "\n", "é", "🌒", "<|im_end|>", "</think>", " far", '{"a": 1}', "  ")
DIALOGUES = 150


def words(dice: random.Random) -> str:
    return "".join(dice.choices(WORDS, k=dice.randint(1, 6)))


def turn(dice: random.Random) -> list[int]:
    """What a model may write: thought, text, calls, in good form or not, sometimes without an end."""
    parts: list[str] = [words(dice)] if dice.random() < 0.8 else []
    if dice.random() < 0.8:
        parts.append("</think>")
    found = [id for part in parts for id in (ids(part) if part == "</think>" else tokenizer().encode(part))]
    if dice.random() < 0.7:
        found += tokenizer().encode(words(dice))
    if dice.random() < 0.5:
        found += ids("<|tool_calls_section_begin|>")
        for number in range(dice.randint(1, 3)):
            name = dice.choice(("search", "look"))
            found += ids("<|tool_call_begin|>", f"functions.{name}:{number}", "<|tool_call_argument_begin|>", "{ }")
            found += ids("<|tool_call_end|>")
        found += ids("<|tool_calls_section_end|>")
    return found + (ids("<|im_end|>") if dice.random() < 0.8 else [])


def answers(dice: random.Random, said: dict[str, Any]) -> list[dict[str, Any]]:
    """What the client sends after a reply: results of its calls, in order, or a new question."""
    calls = said.get("tool_calls") or ()
    if calls:
        return [{"role": "tool", "tool_call_id": call["id"], "content": words(dice)} for call in calls]
    return [{"role": "user", "content": words(dice)}]


def test_every_turn_of_random_dialogues_begins_with_the_exact_ids_of_the_turn_before():
    dice = random.Random(4)
    engine = ScriptedEngine(lambda request: turn(dice))
    app = app_of(engine)

    async def dialogue(number: int) -> None:
        messages: list[dict[str, Any]] = [{"role": "user", "content": words(dice)}]
        before: list[int] = []
        added: list[dict[str, Any]] = []
        tools = TOOLS if dice.random() < 0.7 else []
        for step in range(dice.randint(2, 5)):
            thinking = dice.random() < 0.8
            body: dict[str, Any] = {
                "messages": messages,
                "tools": tools,
                "session_id": f"dialogue {number}",
                "return_token_ids": True,
                "max_tokens": dice.choice([3, 60, 200]),
                "thinking": {"type": "enabled" if thinking else "disabled"},
                "stream": False,
            }
            answer = await call(app, PATH, body)
            assert answer.status == 200, answer.body
            prompt = answer.json["prompt_token_ids"]
            assert answer.headers["x-perilune-session"].startswith("continued" if step else "begun")
            if step:
                assert prompt[: len(before)] == before
                segments = [s for m in added for s in render_message(parse_message(m), thinking=thinking)]
                new = encode(tokenizer(), [*segments, *generation_prompt(thinking=thinking)]).tokens
                assert prompt[-len(new) :] == new
                between = prompt[len(before) : -len(new)]
                assert all(tokenizer().special_name(token) for token in between), "only marks that close a cut turn"
                last = tokenizer().special_ids["<|im_end|>"]
                assert (before + between)[-1] == last and (before + between)[-2] != last
            choice = answer.json["choices"][0]
            before = prompt + choice["token_ids"]
            said = {name: value for name, value in choice["message"].items() if value is not None}
            if dice.random() < 0.5:
                said.pop("reasoning_content", None)  # many clients do not send it back
            added = answers(dice, said)
            messages = [*messages, said, *added]

    async def play() -> None:
        for number in range(DIALOGUES):
            await dialogue(number)

    asyncio.run(play())
    assert len(engine.seen) > 2 * DIALOGUES
