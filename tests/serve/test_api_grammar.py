"""The grammar of a constrained chat turn admits what the chat format has, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from perilune.data.chat_messages import Tool
from perilune.serve.bodies import Constraint
from perilune.serve.chat_grammar import chat_grammar
from perilune.serve.grammar import GrammarCompiler
from tests.serve.api_engine import ids, tokenizer

WEATHER = Tool(
    name="weather",
    parameters={"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
)
LOOK = Tool(name="look-at.it", parameters=None)
SCHEMA = Constraint(
    kind="json_schema",
    value={
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    },
    path="response_format",
)
BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"


def call(name: str, arguments: str) -> tuple[str, ...]:
    return "<|tool_call_begin|>", f"functions.{name}:0", "<|tool_call_argument_begin|>", arguments, "<|tool_call_end|>"


CALL, LOOKED = call("weather", '{"place": "Moon"}'), call("look-at.it", "{}")


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(tokenizer())
    yield made
    made.close()


def admits(compiler: GrammarCompiler, grammar: Any, *parts: str) -> bool:
    """Whether a turn of these parts may be sampled, token by token, and end there."""
    end = tokenizer().special_ids["<|im_end|>"]
    state = compiler.start(grammar, stop_ids={end})
    for token_id in [*ids(*parts), end]:
        mask = state.mask(tokenizer().vocab_size)
        if mask is None or not mask[token_id // 32] >> (token_id % 32) & 1:
            return False
        state.accept(token_id)
    return True


def grammar_of(**fields: Any) -> Any:
    defaults = {"constraint": None, "tools": (), "is_required": False, "is_parallel": True, "is_thinking": False}
    return chat_grammar(tokenizer(), **defaults | fields)


def test_a_required_call_is_a_call_of_a_declared_tool_with_its_arguments(compiler):
    grammar = grammar_of(tools=(WEATHER, LOOK), is_required=True)
    assert admits(compiler, grammar, BEGIN, *CALL, END)
    assert admits(compiler, grammar, BEGIN, *CALL, *LOOKED, END)
    for wrong in (
        ("Text.",),
        (),
        (BEGIN, END),
        ("Text.", BEGIN, *CALL, END),
        (BEGIN, *call("other", "{}"), END),
        (BEGIN, *call("weather", "{}"), END),
        (BEGIN, *call("weather", '{"place": 3}'), END),
        (BEGIN, *call("look-at.it", "[]"), END),
        (BEGIN, *CALL),
    ):
        assert not admits(compiler, grammar, *wrong), wrong


def test_a_named_or_single_call_is_one_call(compiler):
    grammar = grammar_of(tools=(LOOK,), is_required=True, is_parallel=False)
    assert admits(compiler, grammar, BEGIN, *LOOKED, END)
    assert not admits(compiler, grammar, BEGIN, *LOOKED, *LOOKED, END)
    assert not admits(compiler, grammar, BEGIN, *CALL, END)


def test_thought_is_free_and_comes_first(compiler):
    grammar = grammar_of(tools=(WEATHER,), is_required=True, is_thinking=True)
    assert admits(compiler, grammar, 'I think:\n{"x"} 🌒', "</think>", BEGIN, *CALL, END)
    assert admits(compiler, grammar, "</think>", BEGIN, *CALL, END)
    assert not admits(compiler, grammar, "I think", BEGIN, *CALL, END)
    assert not admits(compiler, grammar, "a", "</think>", "b", "</think>", BEGIN, *CALL, END)


@pytest.mark.parametrize("thinking", [True, False])
def test_an_answer_follows_its_schema(compiler, thinking):
    grammar = grammar_of(constraint=SCHEMA, is_thinking=thinking)
    before = ("Hm.", "</think>") if thinking else ()
    assert admits(compiler, grammar, *before, '{"a": 12}')
    for wrong in ('{"a":' + " " * 60 + "1}", '{"a": "b"}', "{}", "Text", '{"a": 1} and more', '{"a": 1'):
        assert not admits(compiler, grammar, *before, wrong), wrong


def test_with_tools_an_answer_or_calls_may_come(compiler):
    grammar = grammar_of(constraint=SCHEMA, tools=(WEATHER,))
    assert admits(compiler, grammar, '{"a": 1}') and admits(compiler, grammar, BEGIN, *CALL, END)
    assert not admits(compiler, grammar, '{"a": 1}', BEGIN, *CALL, END)


@pytest.mark.parametrize(
    "pattern, good, bad",
    [
        ("[a-c]+/[0-9]", "abc/1", "abc1"),
        (r"a\/b", "a/b", "ab"),
        ("a\nb", "a\nb", "ab"),
        (r'"quoted"', '"quoted"', "quoted"),
        (r"\d{2}-(jan|feb)", "07-feb", "7-feb"),
        (r"\\/", "\\/", "/"),
    ],
)
def test_an_answer_follows_its_expression(compiler, pattern, good, bad):
    grammar = grammar_of(constraint=Constraint(kind="regex", value=pattern, path="x"), is_thinking=True)
    assert admits(compiler, grammar, "Hm", "</think>", good)
    assert not admits(compiler, grammar, "Hm", "</think>", bad)
