"""What a tool is: a name, a declaration for the model, what it may do to the world, and a coroutine.

    @tool(effects="none")
    async def word_count(context: ToolContext, text: str) -> str:
        "Count the words of a text."
        return str(len(text.split()))

The declaration is made from the signature and its first paragraph; arguments are checked against it before the call.
`effects` says what a call may change:

    "none"       nothing; may be repeated after a crash
    "workspace"  files in the agent's own workspace
    "outside"    anything beyond it (sends, posts, other people's files)
    None         undeclared: every call asks

`untrusted` marks results that come from outside (web pages, documents, servers): they taint the agent that reads them.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError, create_model

if TYPE_CHECKING:
    from perilune.swarm.journal.event import Journal
    from perilune.swarm.sandbox import Sandbox

Effects = Literal["none", "workspace", "outside"]


@dataclass(frozen=True, kw_only=True)
class ToolResult:
    text: str
    is_error: bool = False
    untrusted: bool | None = None
    """None: as the tool declares."""
    spawned: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()


@dataclass(kw_only=True)
class ToolContext:
    """What a call may use: the agent it runs for, its workspace, the sandbox and the journal's artefacts."""

    agent: str
    step: int
    index: int
    workspace: Path
    limit: int = 32_768
    """Bytes of the result that the model will see; of a longer one it gets a digest and a handle."""
    sandbox: Sandbox | None = None
    journal: Journal | None = None
    extras: dict[str, Any] = field(default_factory=dict)
    """Objects shared by all calls of a run, by the name of the part that owns them."""


class ToolError(ValueError):
    """Goes to the model as the result of its call: says what was wrong and what to do."""


class OutcomeUnknown(ToolError):
    """The call may have taken effect, or not: it is neither a success nor a failure, and is not repeated."""


@dataclass(frozen=True, kw_only=True)
class Tool:
    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments."""
    call: Callable[[ToolContext, dict[str, Any]], Awaitable[ToolResult | str]]
    effects: Effects | None = None
    untrusted: bool = False
    validate: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    """Checked arguments from raw ones; raises `ToolError`."""
    waits: bool = False
    """Its calls wait for agents: they have no time limit of their own."""
    again: bool = False
    """Called again when a run is resumed, for what it sets up, though its outcome is taken from the records."""

    @cached_property
    def declaration(self) -> bytes:
        """In the wire's form, encoded once."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return orjson.dumps({"type": "function", "function": function}, option=orjson.OPT_SORT_KEYS)

    @property
    def may_repeat(self) -> bool:
        return self.effects == "none"


def declarations(tools: Mapping[str, Tool]) -> bytes:
    """The wire's list of tools, in the order of their names."""
    return b"[" + b",".join(tools[name].declaration for name in sorted(tools)) + b"]"


def tool(
    *,
    effects: Effects | None = None,
    untrusted: bool = False,
    name: str | None = None,
    waits: bool = False,
    again: bool = False,
) -> Callable[[Callable[..., Awaitable[ToolResult | str] | ToolResult | str]], Tool]:
    """Make a tool of a function. Its first parameter may be a `ToolContext`; the others are the model's arguments."""

    def make(function: Callable[..., Any]) -> Tool:
        hints = get_type_hints(function, include_extras=True)
        hints.pop("return", None)
        takes_context, fields = False, {}
        for position, (parameter, declared) in enumerate(inspect.signature(function).parameters.items()):
            if parameter not in hints:
                raise TypeError(f"tool {function.__name__!r}: parameter {parameter!r} has no type")
            if hints[parameter] is ToolContext:
                if position:
                    raise TypeError(f"tool {function.__name__!r}: ToolContext must be the first parameter")
                takes_context = True
                continue
            default = ... if declared.default is inspect.Parameter.empty else declared.default
            fields[parameter] = (hints[parameter], default)
        model = create_model(function.__name__, __config__=ConfigDict(extra="forbid"), **fields)
        text = inspect.cleandoc(function.__doc__ or "")
        if not text:
            raise TypeError(f"tool {function.__name__!r} needs a docstring: the model reads it")

        async def call(context: ToolContext, arguments: dict[str, Any]) -> ToolResult | str:
            result = function(context, **arguments) if takes_context else function(**arguments)
            return await result if inspect.isawaitable(result) else result

        return Tool(
            name=name or function.__name__,
            description=text,
            parameters=_schema(model),
            call=call,
            effects=effects,
            untrusted=untrusted,
            validate=lambda raw: _checked(model, raw),
            waits=waits,
            again=again,
        )

    return make


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    schema = model.model_json_schema()
    schema.pop("title", None)
    for each in schema.get("properties", {}).values():
        each.pop("title", None)
    return schema


def _checked(model: type[BaseModel], raw: dict[str, Any]) -> dict[str, Any]:
    try:
        checked = model.model_validate(raw)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, each['loc'])) or 'arguments'}: {each['msg']} (got {_short(each['input'])})"
            for each in error.errors(include_url=False)
        )
        raise ToolError(f"wrong arguments: {problems}") from None
    return {name: getattr(checked, name) for name in type(checked).model_fields}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
