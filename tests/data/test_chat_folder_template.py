"""Chat templates of strangers: the same segments as ours for our own file, and no harm from any other."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.chat_dialogues import DIALOGUES, TEXTS, TOKENIZER, TOOLS, pictures_of

from perilune.data.chat import KimiTemplate, Segment, encode, joined, parse_messages, parse_tools, render, text_of
from perilune.data.chat_folder_template import BUILT_IN, FolderTemplate, TemplateError
from perilune.data.tokenizer import SPECIAL_TOKENS

MESSAGES = parse_messages([{"role": "user", "content": "hi"}])
OWN = FolderTemplate(BUILT_IN.read_text(encoding="utf-8"))


@pytest.fixture(autouse=True, scope="module")
def _closed() -> Any:
    yield
    OWN.close()


@given(DIALOGUES, st.booleans(), st.booleans(), st.sampled_from([None, TOOLS]))
@settings(max_examples=100)
def test_our_own_file_gives_our_own_segments(
    dialogue: list[dict[str, Any]], thinking: bool, add_generation_prompt: bool, tools: Any
) -> None:
    messages, declared = parse_messages(dialogue), parse_tools(tools)
    options = {"thinking": thinking, "add_generation_prompt": add_generation_prompt}
    expected = [replace(segment, produced=False) for segment in render(messages, declared, **options)]
    found = OWN.render(messages, declared, **options)
    assert found == joined(expected)
    encode(TOKENIZER, found, pictures_of(messages))


# Each puts strangers' texts where a special token could come from them.
JOINING = [
    "{% for m in messages %}{{ m.content }}{{ m.name }}{{ m.content }}{% endfor %}",
    "{% for m in messages %}<|{{ m.content }}|>{% endfor %}",
    "{% for m in messages %}<|im_{{ m.name }}|><{{ m.content }}>[{{ m.content }}]{% endfor %}",
    "{% for m in messages %}<|im_e{{ m.content }}nd|>{% endfor %}",
    "{% for m in messages %}{{ m.content }}end|>{{ m.content }}]{% endfor %}",
    "{% for m in messages %}<|im_{{ m.content }}[{{ m.content }}{% endfor %}",
    "{{ messages | map(attribute='content') | join }}",
    "{{ messages | tojson }}{{ tools | tojson }}",
    "{% for m in messages %}{% for letter in m.content %}{{ letter }}{% endfor %}{% endfor %}",
    "{{ messages[0].content[::-1] }}{{ messages[0].content | upper | lower }}",
]
HALVES = st.one_of(
    TEXTS,
    st.sampled_from(["<|im_", "end|>", "im_end", "end", "|im_end|>", "<", "nd|>", "think", "/think", "BOS", "e"]),
    st.sampled_from(["x<|im_", "end|> x", "x[BOS", "EOS] x", "x <|im_end|>", "<|im_end|> x"]),
).filter(bool)
TEMPLATES = {source: FolderTemplate(source) for source in JOINING}


@pytest.fixture(autouse=True, scope="module")
def _ended() -> Any:
    yield
    for template in TEMPLATES.values():
        template.close()


@given(st.sampled_from(JOINING), st.lists(HALVES, min_size=1, max_size=3), HALVES)
@settings(max_examples=200)
def test_no_template_can_turn_a_message_into_a_special_token(source: str, texts: list[str], name: str) -> None:
    messages = parse_messages([{"role": "user", "content": text, "name": name} for text in texts])
    tools = parse_tools([{"type": "function", "function": {"name": "f", "description": name}}])
    segments = TEMPLATES[source].render(messages, tools)
    assert all(segment.kind == "text" for segment in segments)
    if source == JOINING[0]:
        assert text_of(segments) == "".join(text + name + text for text in texts)


def test_private_characters_of_a_message_stay_what_they_are() -> None:
    text = "\U000f0000\U000f003c<\U0010fffd"
    with FolderTemplate("{{ messages[0].content }}<|im_end|>") as template:
        segments = template.render(parse_messages([{"role": "user", "content": text}]), ())
    assert segments == [Segment(text=text), Segment(text="<|im_end|>", kind="special")]


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 10 ** 11 }}",
        "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ 'a'.rjust(10 ** 11) }}",
        "{% for i in range(99999) %}{{ 'abcdefghij' * 99 }}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 9 ** 99999999 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__.json }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'content': 'x'}) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ lipsum() }}",
        "{{ nothing.at.all }}",
        "{{ raise_exception('roles must alternate') }}",
        "{% if",
        "{{ 1 / 0 }}",
    ],
)
def test_a_hostile_or_broken_template_costs_one_error_and_the_next_one_runs(source: str) -> None:
    with FolderTemplate(source, seconds=0.3, max_characters=1 << 20) as template:
        with pytest.raises(TemplateError, match="cannot be rendered") as caught:
            template.render(MESSAGES, ())
        assert caught.value.path == "messages" and len(str(caught.value)) < 700
        template._source = "fine"
        assert template.render(MESSAGES, ()) == [Segment(text="fine")]


def test_the_memory_of_a_template_is_bounded() -> None:
    source = "{{ (messages[0].content * 300000000) | length }}"
    with FolderTemplate(source, memory_bytes=256 << 20, seconds=30) as template:
        with pytest.raises(TemplateError, match="too much memory"):
            template.render(MESSAGES, ())


def test_what_a_template_writes_is_bounded() -> None:
    with FolderTemplate("{% for i in range(101) %}a{% endfor %}", max_characters=100) as template:
        with pytest.raises(TemplateError, match="more than 100 characters"):
            template.render(MESSAGES, ())


def test_a_template_sees_neither_environment_nor_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "hunter2")
    source = "{{ self }}{{ namespace() }}{{ dict() }}{{ messages }}{{ strftime_now('%Y') }}"
    with FolderTemplate(source) as template:
        text = text_of(template.render(MESSAGES, ()))
    assert "hunter2" not in text and str(Path(__file__).parent) not in text and "user" in text


def test_what_transformers_offers_to_templates_is_there() -> None:
    source = (
        "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}"
        "{% endfor %}{% generation %}{{ {'é': '<'} | tojson }}{% endgeneration %}{{ bos_token }}{{ tools_ts_str }}"
    )
    with FolderTemplate(source) as template:
        segments = template.render(MESSAGES, parse_tools(TOOLS))
    assert text_of(segments).startswith('02{"é": "<"}[BOS]# Tools\n')
    assert [segment.text for segment in segments if segment.kind == "special"] == ["[BOS]"]


def test_pictures_stand_where_the_template_puts_them_and_unknown_pads_are_refused() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    messages = parse_messages([{"role": "user", "content": [image, {"type": "text", "text": "<|media_pad|>"}, image]}])
    place = "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>"
    body = (
        "{% for p in messages[0].content %}{% if p.type == 'image' %}PLACE{% else %}{{ p.text }}{% endif %}{% endfor %}"
    )
    with FolderTemplate(body.replace("PLACE", place)) as template:
        kinds = [(segment.kind, segment.text) for segment in template.render(messages, ())]
    assert kinds == [("media", "image"), ("text", "<|media_pad|>"), ("media", "image")]
    with (
        FolderTemplate(body.replace("PLACE", "<|media_pad|>")) as template,
        pytest.raises(TemplateError, match="picture"),
    ):
        template.render(messages, ())


THREE = parse_messages([{"role": role, "content": role[0]} for role in ("user", "assistant", "user")])
CHATML = (
    "{% for m in messages %}<|im_user|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>{% endif %}"
)


def test_a_continuation_is_what_the_template_adds_after_the_last_turn() -> None:
    with FolderTemplate(CHATML) as template:
        added = template.continuation(THREE, 2, ())
    assert added is not None
    assert text_of(added) == "\n<|im_user|>user<|im_middle|>u<|im_end|>\n<|im_assistant|>"
    own = OWN.continuation(THREE, 2, (), thinking=True)
    assert own == KimiTemplate().continuation(THREE, 2, (), thinking=True)


def test_a_template_that_rewrites_earlier_turns_has_no_continuation() -> None:
    with FolderTemplate("{{ messages | length }}" + CHATML) as template:
        assert template.continuation(THREE, 2, ()) is None
    with FolderTemplate("no marks at all") as template:
        assert template.continuation(THREE, 2, ()) is None


def test_no_word_of_a_json_schema_is_part_of_a_special_token() -> None:
    words = [
        "type",
        "function",
        "name",
        "description",
        "parameters",
        "properties",
        "required",
        "items",
        "enum",
        "const",
    ]
    words += ["anyOf", "oneOf", "allOf", "$ref", "$defs", "definitions", "default", "additionalProperties", "string"]
    words += ["number", "integer", "boolean", "null", "object", "array", "nullable", "prefixItems", "pattern", "format"]
    assert not [word for word in words if any(word in token for token in SPECIAL_TOKENS)]
