"""Tools of an MCP server as a model sees them: names, declarations, checked arguments, and answers as text.

Everything here was written by a stranger. Characters that a person does not see are taken out, sizes are bounded, and
no pattern of a schema is ever run.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from typing import Any

import mcp_types
import orjson

from perilune.swarm.tools.mcp_pins import Described
from perilune.swarm.tools.shown import OUTPUT_LIMIT, clipped, one_line
from perilune.swarm.tools.tool import ToolError, ToolResult

DESCRIPTION_LIMIT = 8_000
SCHEMA_LIMIT = 64_000
NAME_LIMIT = 128


def full_name(server: str, tool: str) -> str:
    """`server__tool` in the characters and length that model endpoints take."""
    return f"{server}__{re.sub(r'[^a-zA-Z0-9_-]', '_', tool)}"[:64]


def described_tool(tool: mcp_types.Tool) -> Described:
    annotations = tool.annotations.model_dump(mode="json", exclude_none=True) if tool.annotations else {}
    return {"description": tool.description or "", "parameters": tool.input_schema, "annotations": annotations}


def unusable(server: str, name: str, described: Described, listed: Mapping[str, Described]) -> str | None:
    """Why a tool cannot be offered beside those listed before it, or None."""
    shown = repr(one_line(name))
    try:
        size = len(orjson.dumps(described["parameters"]))
    except TypeError:
        return f"tool {shown} has parameters that are no JSON of the usual kind"
    if len(described["description"]) > DESCRIPTION_LIMIT or size > SCHEMA_LIMIT:
        return f"tool {shown} says more than {DESCRIPTION_LIMIT} characters, or {SCHEMA_LIMIT} about its parameters"
    if len(name) > NAME_LIMIT:
        return f"tool {one_line(name, 100)!r} has a name of {len(name)} characters, more than {NAME_LIMIT}"
    if not name or any(full_name(server, name) == full_name(server, other) for other in listed):
        return f"tool {shown} has no name of its own in the characters that models take"
    return None


def visible(value: Any) -> Any:
    """Without characters that a person does not see and a model reads."""
    if isinstance(value, str):
        return "".join(c for c in value if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf", "Co", "Cs", "Cn"))
    if isinstance(value, Mapping):
        return {visible(key): visible(each) for key, each in value.items()}
    return [visible(each) for each in value] if isinstance(value, list) else value


_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


def checked_arguments(parameters: Mapping[str, Any], raw: dict[str, Any]) -> dict[str, Any]:
    """Names and plain types of the first level. The rest is the server's to check: its patterns are not run here."""
    properties = parameters.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    required = parameters.get("required")
    problems = (
        [f"{name} is missing" for name in required or () if name not in raw] if isinstance(required, list) else []
    )
    for name, value in raw.items():
        kind = properties[name].get("type") if isinstance(properties.get(name), Mapping) else None
        expected = _TYPES.get(kind) if isinstance(kind, str) else None
        if name not in properties and parameters.get("additionalProperties") is False:
            problems.append(f"{name} is not a parameter")
        elif expected and (not isinstance(value, expected) or (isinstance(value, bool) and bool not in expected)):
            problems.append(f"{name}: expected {kind}, got {type(value).__name__}")
    if problems:
        raise ToolError(f"wrong arguments: {'; '.join(problems)}")
    return raw


def shown_answer(answer: Any, server: str) -> ToolResult:
    """An answer as text; whatever is no text is named with its size."""
    if isinstance(answer, mcp_types.InputRequiredResult):
        raise ToolError(f"{server} asks for input from a person, which tools of a run do not give")
    pieces: list[str] = []
    for block in answer.content:
        if isinstance(block, mcp_types.TextContent):
            pieces.append(block.text)
        elif isinstance(block, mcp_types.EmbeddedResource) and isinstance(
            block.resource, mcp_types.TextResourceContents
        ):
            pieces.append(f"[{one_line(str(block.resource.uri), 500)}]\n{block.resource.text}")
        elif isinstance(block, mcp_types.ResourceLink):
            pieces.append(f"[{one_line(str(block.uri), 500)}]")
        else:
            size = len(getattr(block, "data", "") or "") * 3 // 4
            pieces.append(f"[{one_line(block.type)} of about {size} bytes, not shown]")
    if not pieces and answer.structured_content is not None:
        pieces.append(orjson.dumps(answer.structured_content).decode("utf-8", "replace"))
    return ToolResult(text=clipped("\n".join(pieces), OUTPUT_LIMIT) or "[no answer]", is_error=answer.is_error)
