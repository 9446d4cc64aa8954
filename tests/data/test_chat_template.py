"""data/chat_template.jinja in transformers: the same strings as ours, and the same token ids."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.chat_dialogues import DIALOGUES, TOKENIZER, TOOLS
from tests.data.chat_schemas import EXAMPLES, SCHEMAS
from transformers import PreTrainedTokenizerFast

from perilune.data.chat import encode, parse_messages, parse_tools, render, text_of
from perilune.data.chat_folder_template import BUILT_IN
from perilune.data.tokenizer import SPECIAL_TOKENS


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    path: Path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    TOKENIZER.save(path)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
    tokenizer.chat_template = BUILT_IN.read_text(encoding="utf-8")
    return tokenizer


@given(
    dialogue=DIALOGUES,
    thinking=st.sampled_from([True, False, None]),
    add_generation_prompt=st.booleans(),
    preserve_thinking=st.booleans(),
    tools=st.sampled_from([None, TOOLS]),
)
@settings(max_examples=150)
def test_transformers_renders_the_same_string(
    peer: PreTrainedTokenizerFast,
    dialogue: list[dict[str, Any]],
    thinking: bool | None,
    add_generation_prompt: bool,
    preserve_thinking: bool,
    tools: list[dict[str, Any]] | None,
) -> None:
    options: dict[str, Any] = {"add_generation_prompt": add_generation_prompt, "preserve_thinking": preserve_thinking}
    if thinking is not None:  # the default is to think
        options["thinking"] = thinking
    segments = render(parse_messages(dialogue), parse_tools(tools), **options)
    text = peer.apply_chat_template(dialogue, tools=tools, tokenize=False, **options)
    assert text == text_of(segments)


def declared(peer: PreTrainedTokenizerFast, schema: Any, description: str | None = None) -> tuple[str, str]:
    """What transformers and what we say of a tool with that schema."""
    tools = [
        {"type": "function", "function": {"name": "f", "description": description, "parameters": schema}},
        {"type": "function", "function": {"name": "g"}},
    ]
    dialogue = [{"role": "user", "content": "q"}]
    text = peer.apply_chat_template(dialogue, tools=tools, tokenize=False)
    return text, text_of(render(parse_messages(dialogue), parse_tools(tools), add_generation_prompt=False))


def test_transformers_declares_every_construct_in_the_same_words(peer: PreTrainedTokenizerFast) -> None:
    for schema, _ in EXAMPLES:
        both = {"$defs": {"a": schema, "b": 1}, "definitions": {"a": 2, "c": schema}}
        theirs, ours = declared(
            peer, {"type": "object", "properties": {"x": schema, "y": {"$ref": "#/$defs/a"}}, **both}
        )
        assert theirs == ours


@given(SCHEMAS, st.sampled_from(["", "Does it.\nTwice.", None]))
@settings(max_examples=200)
def test_transformers_declares_tools_in_the_same_words(
    peer: PreTrainedTokenizerFast, schema: Any, description: str | None
) -> None:
    theirs, ours = declared(peer, schema, description)
    assert theirs == ours


def test_declarations_made_elsewhere_are_taken_as_they_are(peer: PreTrainedTokenizerFast) -> None:
    text = peer.apply_chat_template([{"role": "user", "content": "q"}], tokenize=False, tools_ts_str="DECLARED")
    assert text.startswith("<|im_system|>tool_declare<|im_middle|>DECLARED<|im_end|><|im_user|>")


@given(DIALOGUES)
def test_transformers_gives_the_same_ids_where_texts_spell_no_special_token(
    peer: PreTrainedTokenizerFast, dialogue: list[dict[str, Any]]
) -> None:
    messages = parse_messages(dialogue)
    texts = [f"{m.text}{m.reasoning}{m.name}{m.tool_call_id}{m.tool_calls}" for m in messages]
    if any(mark in text for text in texts for mark in SPECIAL_TOKENS) or any(m.media for m in messages):
        return
    ids = peer.apply_chat_template(dialogue, add_generation_prompt=True, return_dict=False)
    assert ids == encode(TOKENIZER, render(messages)).tokens
