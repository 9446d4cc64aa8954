"""Request bodies: JSON of /v1/chat/completions and /v1/completions into frozen, checked values. Written by hand.

Three rules for fields, the same everywhere:

    known      checked: type, range and cap; the error names the exact path, the value and what was expected
    refused    fields of the API that would change the answer and that this server does not have (`suffix`, `audio`,
               `functions`, ...): ignoring them would be a lie
    unknown    ignored, because clients send many; the answer's header X-Perilune-Ignored lists them, so that a
               misspelt one is found

null is the same as absent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from perilune.data.chat_messages import ChatError, ChatMessage, Tool, parse_messages, parse_tools
from perilune.serve.fields import Fields
from perilune.serve.limits import Limits
from perilune.serve.refusals import Refusal, shown
from perilune.serve.request import MAX_SEED

LARGEST_ID = 1 << 31
NOT_HERE = {
    "suffix": "text is only ever continued at its end",
    "audio": "there is no audio",
    "functions": "it is deprecated: use tools",
    "function_call": "it is deprecated: use tool_choice",
    "prediction": "predicted outputs do not exist here",
    "web_search_options": "there is no web search",
    "prompt_embeds": "prompts are texts or token ids",
    "truncate_prompt_tokens": "prompts are never cut",
    "use_beam_search": "there is no beam search",
}
IGNORED = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})
"""Known and meaningless here: not worth a line in the header."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to sample, as far as the body says it; None leaves it to the server."""

    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None
    stop: tuple[str, ...]
    include_stop: bool
    stop_ids: frozenset[int]
    min_tokens: int
    ignore_eos: bool


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """What the text must be: kind `json_object`, `json_schema` or `regex`; `value` is the schema or the expression."""

    kind: str
    value: Any
    path: str


@dataclass(frozen=True, kw_only=True)
class Common:
    """What both endpoints take."""

    model: str | None
    n: int
    stream: bool
    include_usage: bool
    return_token_ids: bool
    priority: int
    sampling: Sampling
    constraint: Constraint | None
    ignored: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ToolChoice:
    """mode: none, auto or required; `name` is the function a caller insists on (mode is then required)."""

    mode: str
    name: str | None = None


@dataclass(frozen=True, kw_only=True)
class ChatBody:
    common: Common
    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...]
    tool_choice: ToolChoice
    parallel_tool_calls: bool
    thinking: bool | None
    logprobs: int | None
    """None: none; else how many alternatives beside the chosen token."""
    session_id: str | None


@dataclass(frozen=True, kw_only=True)
class CompletionBody:
    common: Common
    prompts: tuple[str | tuple[int, ...], ...]
    echo: bool
    add_special_tokens: bool
    """Whether a text gets the document-start token before it; token ids are always taken as they are."""
    logprobs: int | None
    session_id: str | None


def read_chat(value: dict[str, Any], limits: Limits) -> ChatBody:
    body = Fields(value, "")
    messages, tools = _dialogue(body, limits)
    choice = _tool_choice(body, tools)
    parallel = body.boolean("parallel_tool_calls", True)
    thinking = _thinking(body)
    logprobs = _chat_logprobs(body, limits)
    session_id = _session_id(body)
    constraint = _response_format(body, limits)
    common = _common(body, limits, ("max_completion_tokens", "max_tokens"), constraint)
    if choice.mode == "required" and common.constraint is not None:
        body.fail("tool_choice", "'auto' or 'none' together with an output format: a call has a format of its own")
    return ChatBody(
        common=common,
        messages=messages,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        thinking=thinking,
        logprobs=logprobs,
        session_id=session_id,
    )


def read_completion(value: dict[str, Any], limits: Limits) -> CompletionBody:
    body = Fields(value, "")
    prompts = _prompts(body, limits)
    echo = body.boolean("echo")
    special = body.boolean("add_special_tokens", True)
    logprobs = body.integer("logprobs", low=0, high=limits.top_logprobs)
    session_id = _session_id(body)
    if session_id is not None:
        body.fail("session_id", "to be absent: sessions belong to /v1/chat/completions; token ids need none")
    best_of = body.integer("best_of", low=1, high=limits.n)
    common = _common(body, limits, ("max_tokens",), _response_format(body, limits))
    if best_of is not None and best_of != common.n:
        body.fail("best_of", f"n={common.n}: every sample is returned")
    if len(prompts) * common.n > limits.sequences:
        body.fail("prompt", f"at most {limits.sequences} sequences (prompts times n={common.n}) in one request")
    if common.sampling.max_tokens == 0 and not echo:
        body.fail("max_tokens", "at least 1, unless echo is true")
    return CompletionBody(
        common=common,
        prompts=prompts,
        echo=echo,
        add_special_tokens=special,
        logprobs=logprobs,
        session_id=session_id,
    )


# Parts of a chat ------------------------------------------------------------------------------------------------------


def _dialogue(body: Fields, limits: Limits) -> tuple[tuple[ChatMessage, ...], tuple[Tool, ...]]:
    """Messages and tools, checked by the chat format itself; the caps on them are the server's."""
    body.list("messages", longest=limits.messages)
    body.list("tools", longest=limits.tools)
    try:
        messages, tools = parse_messages(body.any("messages")), parse_tools(body.any("tools"))
    except ChatError as error:
        raise Refusal(str(error), param=error.path, code="invalid_value") from None
    pictures = sum(len(message.media) for message in messages)
    if pictures > limits.images:
        raise Refusal(f"messages hold {pictures} pictures, expected at most {limits.images}", param="messages")
    for index, tool in enumerate(tools):
        _check_size(tool.parameters, f"tools[{index}].function.parameters", limits)
    return messages, tools


def _tool_choice(body: Fields, tools: tuple[Tool, ...]) -> ToolChoice:
    asked = body.any("tool_choice")
    if asked is None:
        return ToolChoice(mode="auto" if tools else "none")
    if not isinstance(asked, dict):
        mode = body.choice("tool_choice", ("none", "auto", "required"))
        if mode == "required" and not tools:
            body.fail("tool_choice", "tools to choose from in the field tools")
        return ToolChoice(mode=mode if mode is not None and tools else "none")
    choice = Fields(asked, "tool_choice")
    if choice.choice("type", ("function",)) is None:
        choice.fail("type", "'function'")
    function = choice.object("function")
    if function is None:
        choice.fail("function", "an object with the name of a function")
    name, names = function.text("name"), [tool.name for tool in tools]
    if name not in names:
        function.fail("name", f"one of the tools ({', '.join(names[:20]) or 'there are none'})")
    return ToolChoice(mode="required", name=name)


# Parts of both --------------------------------------------------------------------------------------------------------


def _common(body: Fields, limits: Limits, length_names: tuple[str, ...], constraint: Constraint | None) -> Common:
    for name, why in NOT_HERE.items():
        # An empty text or list asks for nothing.
        if body.any(name) not in (None, "", [], {}, False):
            raise Refusal(f"{name} is not supported: {why}", param=name, code="unsupported_parameter")
    modalities = body.any("modalities")
    if modalities not in (None, ["text"]):
        body.fail("modalities", "['text']", code="unsupported_parameter")
    stream = body.boolean("stream")
    options = body.object("stream_options")
    if options is not None and not stream:
        body.fail("stream_options", "to be absent unless stream is true")
    include_usage = options.boolean("include_usage") if options is not None else False
    n = body.integer("n", low=1, high=limits.n) or 1
    constraint = _structured(body, limits, constraint)
    sampling = _sampling(body, limits, length_names)
    for name in IGNORED:
        body.any(name)
    return Common(
        model=body.text("model", longest=512),
        n=n,
        stream=stream,
        include_usage=include_usage,
        return_token_ids=body.boolean("return_token_ids"),
        priority=body.integer("priority", low=-1000, high=1000) or 0,
        sampling=sampling,
        constraint=constraint,
        ignored=tuple(body.ignored),
    )


def _sampling(body: Fields, limits: Limits, length_names: tuple[str, ...]) -> Sampling:
    lengths = [
        body.integer(name, low=0 if name == "max_tokens" else 1, high=limits.max_tokens) for name in length_names
    ]
    max_tokens = next((length for length in lengths if length is not None), None)
    if max_tokens == 0 and len(length_names) > 1:
        body.fail("max_tokens", f"an integer from 1 to {limits.max_tokens}")
    min_tokens = body.integer("min_tokens", low=0, high=limits.max_tokens) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        body.fail("min_tokens", f"at most max_tokens={max_tokens}")
    repetition = body.number("repetition_penalty", low=0.01, high=10)
    stop_ids = body.list("stop_token_ids", longest=limits.logit_bias) or []
    if not all(_is_id(each) for each in stop_ids):
        body.fail("stop_token_ids", "a list of token ids")
    return Sampling(
        max_tokens=max_tokens,
        temperature=body.number("temperature", low=0, high=2),
        top_p=_top_p(body),
        top_k=body.integer("top_k", low=-1, high=LARGEST_ID),
        min_p=body.number("min_p", low=0, high=1),
        presence_penalty=body.number("presence_penalty", low=-2, high=2) or 0.0,
        frequency_penalty=body.number("frequency_penalty", low=-2, high=2) or 0.0,
        repetition_penalty=1.0 if repetition is None else repetition,
        logit_bias=_logit_bias(body, limits),
        seed=_seed(body),
        stop=_stop(body, limits),
        include_stop=body.boolean("include_stop_str_in_output"),
        stop_ids=frozenset(stop_ids),
        min_tokens=min_tokens,
        ignore_eos=body.boolean("ignore_eos"),
    )


def _top_p(body: Fields) -> float | None:
    top_p = body.number("top_p", low=0, high=1)
    if top_p is not None and top_p <= 0:
        body.fail("top_p", "a number above 0 and at most 1")
    return top_p


def _seed(body: Fields) -> int | None:
    """Any 64-bit integer, as clients send them; the engine counts from 0."""
    seed = body.integer("seed", low=-MAX_SEED, high=2 * MAX_SEED - 1)
    return None if seed is None else seed % MAX_SEED


def _stop(body: Fields, limits: Limits) -> tuple[str, ...]:
    value = body.any("stop")
    texts = [value] if isinstance(value, str) else body.list("stop", longest=limits.stop) or []
    for index, text in enumerate(texts):
        path = "stop" if isinstance(value, str) else f"stop[{index}]"
        if not isinstance(text, str) or not 0 < len(text) <= limits.stop_characters:
            raise Refusal(
                f"{path} is {shown(text)}, expected a text of 1 to {limits.stop_characters} characters",
                param=path,
                code="invalid_value",
            )
    return tuple(dict.fromkeys(texts))


def _logit_bias(body: Fields, limits: Limits) -> dict[int, float]:
    """Keys are token ids in decimal, as JSON has no other."""
    fields = body.object("logit_bias")
    if fields is None:
        return {}
    asked = body.any("logit_bias")
    if len(asked) > limits.logit_bias:
        body.fail("logit_bias", f"at most {limits.logit_bias} entries")
    biases: dict[int, float] = {}
    for key in asked:
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            path = f"logit_bias[{shown(key)}]"
            raise Refusal(f"{path}: expected a token id as the key", param="logit_bias", code="invalid_value")
        bias = fields.number(key, low=-100, high=100)
        if bias is not None:
            biases[int(key)] = bias
    return biases


def _chat_logprobs(body: Fields, limits: Limits) -> int | None:
    wanted = body.boolean("logprobs")
    top = body.integer("top_logprobs", low=0, high=limits.top_logprobs)
    if top and not wanted:
        body.fail("top_logprobs", "logprobs to be true as well")
    return (top or 0) if wanted else None


def _thinking(body: Fields) -> bool | None:
    """`thinking.type` (Moonshot's API) or `chat_template_kwargs.thinking` (vLLM, SGLang); they must agree."""
    found: list[bool] = []
    thinking = body.object("thinking")
    if thinking is not None:
        kind = thinking.choice("type", ("enabled", "disabled"))
        if kind is None:
            thinking.fail("type", "'enabled' or 'disabled'")
        found.append(kind == "enabled")
    template = body.object("chat_template_kwargs")
    if template is not None:
        for name in ("thinking", "enable_thinking"):
            if template.has(name):
                found.append(template.boolean(name))
    if len(set(found)) > 1:
        body.fail("thinking", "the same as chat_template_kwargs says")
    return found[0] if found else None


def _session_id(body: Fields) -> str | None:
    return body.text("session_id", longest=256, empty=False)


def _response_format(body: Fields, limits: Limits) -> Constraint | None:
    fields = body.object("response_format")
    if fields is None:
        return None
    kind = fields.choice("type", ("text", "json_object", "json_schema"))
    if kind is None:
        fields.fail("type", "'text', 'json_object' or 'json_schema'")
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint(kind=kind, value={"type": "object"}, path="response_format")
    named = fields.object("json_schema")
    if named is None:
        fields.fail("json_schema", "an object with name and schema")
    named.text("name", longest=256)
    schema = _schema(named, "schema", limits)
    if schema is None:
        named.fail("schema", "a JSON schema")
    return Constraint(kind=kind, value=schema, path="response_format.json_schema.schema")


def _schema(fields: Fields, name: str, limits: Limits) -> dict[str, Any] | None:
    """A JSON schema: an object that is not too long. What it means is the grammar's business."""
    if fields.object(name) is None:
        return None
    schema = fields.any(name)
    _check_size(schema, fields.path(name), limits)
    return schema


def _check_size(schema: Any, path: str, limits: Limits) -> None:
    size = len(json.dumps(schema))
    if size > limits.schema_bytes:
        raise Refusal(f"{path} has {size:,} bytes, expected at most {limits.schema_bytes:,}", param=path)


def _structured(body: Fields, limits: Limits, constraint: Constraint | None) -> Constraint | None:
    """`structured_outputs`, vLLM's name for the same and for regular expressions."""
    fields = body.object("structured_outputs")
    if fields is None:
        return constraint
    schema, pattern = _schema(fields, "json", limits), fields.text("regex", longest=limits.schema_bytes)
    if (schema is None) == (pattern is None) or constraint is not None:
        body.fail("structured_outputs", "one of json and regex, and no response_format beside it")
    if pattern is not None:
        return Constraint(kind="regex", value=pattern, path=fields.path("regex"))
    return Constraint(kind="json_schema", value=schema, path=fields.path("json"))


def _prompts(body: Fields, limits: Limits) -> tuple[str | tuple[int, ...], ...]:
    """A text, a list of texts, token ids, or a list of lists of token ids."""
    expected = "a text, a list of texts, a list of token ids or a list of such lists"
    value = body.any("prompt")
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        body.fail("prompt", expected, code="invalid_type")
    if isinstance(value[0], int | float):
        bad = next((index for index, each in enumerate(value) if not _is_id(each)), None)
        if bad is not None:
            path = f"prompt[{bad}]"
            raise Refusal(f"{path} is {shown(value[bad])}, expected a token id", param=path, code="invalid_type")
        return (tuple(value),)
    if len(value) > limits.prompts:
        body.fail("prompt", f"at most {limits.prompts} prompts")
    prompts: list[str | tuple[int, ...]] = []
    for index, each in enumerate(value):
        if isinstance(each, str):
            prompts.append(each)
        elif isinstance(each, list) and each and all(_is_id(token) for token in each):
            prompts.append(tuple(each))
        else:
            path = f"prompt[{index}]"
            raise Refusal(f"{path} is {shown(each)}, expected a text or token ids", param=path, code="invalid_type")
    return tuple(prompts)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < LARGEST_ID


__all__ = [
    "ChatBody",
    "Common",
    "CompletionBody",
    "Constraint",
    "Sampling",
    "ToolChoice",
    "read_chat",
    "read_completion",
]
