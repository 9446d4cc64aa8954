"""JSON schema into declarations: every construct, and no schema that loses its tool."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from tests.data.chat_schemas import EXAMPLES, SCHEMAS

from perilune.data.chat_messages import Tool
from perilune.data.tool_declarations import MAX_DEPTH, declare_tool, declare_tools


def declared(schema: Any) -> str:
    """The type of one field `x` of that schema."""
    tool = Tool(name="f", parameters={"type": "object", "properties": {"x": schema}, "required": ["x"]})
    text = declare_tool(tool)
    start, end = "type f = (_: {\n", "\n}) => any;"
    assert text.startswith(start) and text.endswith(end)
    return text[len(start) : -len(end)]


@pytest.mark.parametrize("schema, expected", EXAMPLES)
def test_each_construct_has_its_type(schema: Any, expected: str) -> None:
    space = "" if expected.startswith("\n") else " "
    assert declared(schema) == f"  x:{space}{expected}"


def test_descriptions_limits_and_defaults_are_comments() -> None:
    schema = {
        "type": "string",
        "description": "First.\r\nSecond.\n\nLast.",
        "minLength": 1,
        "pattern": "^\\d+\n$",
        "default": "7",
    }
    assert declared(schema) == (
        "  // First.\n  // Second.\n\n  // Last.\n  // minLength: 1, pattern: ^\\d+\n  // $\n"
        '  // Default: "7"\n  x: string'
    )


def test_alternatives_with_descriptions_stand_on_lines_of_their_own() -> None:
    schema = {"oneOf": [{"const": "a", "description": "the first"}, {"const": "b"}]}
    assert declared(schema) == '  x:\n    // the first\n    | "a"\n    | "b"'


def test_definitions_are_declared_once_and_may_refer_to_themselves() -> None:
    schema = {
        "type": "object",
        "properties": {"tree": {"$ref": "#/$defs/Node"}, "also": {"$ref": "#/definitions/a~1b"}},
        "$defs": {
            "Node": {
                "type": "object",
                "description": "A tree.",
                "properties": {"children": {"type": "array", "items": {"$ref": "#/$defs/Node"}}},
            }
        },
        "definitions": {"a/b": {"enum": [1, 2]}},
    }
    assert declare_tool(Tool(name="grow", description="Grow.", parameters=schema)) == (
        "// A tree.\n"
        "interface Node {\n  children?: Array<Node>\n}\n"
        'interface "a/b" 1 | 2\n'
        "// Grow.\n"
        'type grow = (_: {\n  also?: "a/b",\n  tree?: Node\n}) => any;'
    )


def test_of_two_definitions_with_one_name_the_newer_keyword_counts() -> None:
    schema = {"type": "object", "$defs": {"a": {"const": 1}}, "definitions": {"a": {"const": 2}}}
    assert "interface a 1\n" in declare_tool(Tool(name="f", parameters=schema))


def test_a_schema_that_refers_to_its_whole_is_named_parameters() -> None:
    schema = {"type": "object", "properties": {"next": {"$ref": "#"}}}
    assert declare_tool(Tool(name="f", parameters=schema)) == (
        "interface parameters {\n  next?: parameters\n}\ntype f = (_: parameters) => any;"
    )


def test_all_tools_stand_in_one_namespace() -> None:
    tools = [Tool(name="a"), Tool(name="b", description="B.", parameters={}), Tool(name="c", parameters=True)]
    assert declare_tools(tools) == (
        "# Tools\n\n## functions\nnamespace functions {\n"
        "type a = (_: {}) => any;\n// B.\ntype b = (_: {}) => any;\ntype c = (_: any) => any;\n}\n"
    )


def test_what_is_nested_too_deeply_reads_any_and_the_rest_stays() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(80):
        schema = {"type": "array", "items": schema}
    text = declare_tool(
        Tool(name="f", parameters={"type": "object", "properties": {"deep": schema, "flat": {"type": "number"}}})
    )
    assert text.count("Array<") == MAX_DEPTH and "any>" in text and "  flat?: number\n" in text


def reordered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: reordered(value[key]) for key in reversed(list(value))}
    return [reordered(item) for item in value] if isinstance(value, list) else value


@given(SCHEMAS)
@settings(max_examples=150)
def test_any_schema_is_declared_and_the_order_of_keys_does_not_matter(schema: Any) -> None:
    tool = Tool(name="f", description="d", parameters=schema)
    text = declare_tool(tool)
    assert text.splitlines().count("// d") >= 1 and "type f = (_: " in text and text.endswith(") => any;")
    assert declare_tool(Tool(name="f", description="d", parameters=reordered(schema))) == text
    assert len(text) < 200 + 60 * len(json.dumps(schema))
