"""Tools as the TypeScript-like declarations that Kimi K2.5 reads.

    # Tools

    ## functions
    namespace functions {
    // Current weather of a place.
    type get_weather = (_: {
      // City and country
      place: string,
      // Default: "celsius"
      unit?: "celsius" | "fahrenheit"
    }) => any;
    }

From JSON schema to a type:

    string, number, integer, boolean, null     string, number, number, boolean, null; a list of types is their union
    object     { required fields, optional fields, [k: string]: type of additional properties }, fields by name
    array      Array<item>, and [first, second] where items differ by place
    enum, const          their values as JSON
    anyOf, oneOf, allOf  a | b, a & b; what stands beside them is one more `&`
    $ref       the name of a definition, which is declared before the function; `parameters` for the whole schema
    nullable   | null
    anything else        any

Descriptions, limits and defaults become comments above what they describe.

What this module promises: every tool is declared, whatever its schema (one that is unknown, broken or deeper than
`MAX_DEPTH` reads `any` in its place); equal tools give equal text whatever the order of their keys, so prompts share
their prefix; text grows linearly with the schema, because a reference is named and never unfolded.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perilune.data.chat_messages import Tool

MAX_DEPTH = 32
INDENT = "  "
SCALARS = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean", "null": "null"}
LIMITS = (
    *("exclusiveMaximum", "exclusiveMinimum", "format", "maxItems", "maxLength", "maximum", "minItems", "minLength"),
    *("minimum", "multipleOf", "pattern", "uniqueItems"),
)
DEFINITIONS = ("$defs", "definitions")


def declare_tools(tools: Sequence[Tool]) -> str:
    """The body of the `tool_declare` turn."""
    return "# Tools\n\n## functions\nnamespace functions {\n" + "\n".join(map(declare_tool, tools)) + "\n}\n"


def declare_tool(tool: Tool) -> str:
    """One function, after the definitions that its schema has."""
    schema: Any = {} if tool.parameters is None else tool.parameters
    root = _Root.of(schema)
    parameters = root.type_of(schema, "", 0) if tool.parameters not in (None, {}) else "{}"
    lines: list[str] = []
    if _refers_to_itself(schema):
        lines.append(f"interface parameters {parameters}")
        parameters = "parameters"
    for name in sorted(root.definitions):
        definition = root.definitions[name]
        lines.append(f"{_documentation(definition, '')}interface {_name(name)} {root.type_of(definition, '', 0)}")
    comment = _comment(tool.description, "") + _documentation(schema, "")
    lines.append(f"{comment}type {tool.name} = (_: {parameters}) => any;")
    return "\n".join(lines)


@dataclass(frozen=True)
class _Root:
    """The schema of one function, which references are relative to."""

    definitions: Mapping[str, Any]

    @classmethod
    def of(cls, schema: Any) -> "_Root":
        found: dict[str, Any] = {}
        for key in DEFINITIONS:
            value = schema.get(key) if isinstance(schema, Mapping) else None
            if isinstance(value, Mapping):
                found = {**value, **found}
        return cls(found)

    def type_of(self, schema: Any, indent: str, depth: int) -> str:
        """The type of one schema; lines after the first begin with `indent`."""
        if schema is False:
            return "never"
        if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
            return "any"
        if isinstance(schema.get("$ref"), str):
            found = self._referred(schema["$ref"])
        elif "const" in schema:
            found = _literal(schema["const"])
        elif isinstance(schema.get("enum"), list):
            found = " | ".join(map(_literal, schema["enum"])) or "never"
        else:
            found = self._combined(schema, indent, depth)
        is_nullable = schema.get("nullable") is True and found != "any" and "null" not in found.split(" | ")
        return f"{found} | null" if is_nullable else found

    def _referred(self, reference: str) -> str:
        if reference == "#":
            return "parameters"
        for key in DEFINITIONS:
            prefix = f"#/{key}/"
            name = reference[len(prefix) :].replace("~1", "/").replace("~0", "~")
            if reference.startswith(prefix) and name in self.definitions:
                return _name(name)
        return "any"

    def _combined(self, schema: Mapping[str, Any], indent: str, depth: int) -> str:
        """What the schema says itself, and what its anyOf, oneOf and allOf add."""
        terms = [self._plain(schema, indent, depth)]
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list) and schema[key]:
                terms.append(self._union(schema[key], indent, depth))
        if isinstance(schema.get("allOf"), list):
            terms += [self.type_of(part, indent, depth + 1) for part in schema["allOf"]]
        known = [term for term in terms if term != "any"]
        if len(known) > 1:
            known = [f"({term})" if "|" in term else term for term in known]
        return " & ".join(known) or "any"

    def _union(self, alternatives: list[Any], indent: str, depth: int) -> str:
        inner = indent + INDENT
        documents = [_documentation(part, inner) for part in alternatives]
        if any(documents):  # one line each, below its comment
            types = [self.type_of(part, inner, depth + 1) for part in alternatives]
            return "".join(f"\n{text}{inner}| {found}" for text, found in zip(documents, types))
        types = list(dict.fromkeys(self.type_of(part, indent, depth + 1) for part in alternatives))
        return "any" if "any" in types else " | ".join(types)

    def _plain(self, schema: Mapping[str, Any], indent: str, depth: int) -> str:
        kinds = schema.get("type")
        if kinds is None:
            if "properties" in schema or "additionalProperties" in schema:
                kinds = "object"
            elif "items" in schema or "prefixItems" in schema:
                kinds = "array"
        if isinstance(kinds, str):
            kinds = [kinds]
        if not isinstance(kinds, list) or not kinds:
            return "any"
        types = list(dict.fromkeys(self._of_kind(kind, schema, indent, depth) for kind in kinds))
        return "any" if "any" in types else " | ".join(types)

    def _of_kind(self, kind: Any, schema: Mapping[str, Any], indent: str, depth: int) -> str:
        if kind == "object":
            return self._object(schema, indent, depth)
        if kind == "array":
            return self._array(schema, indent, depth)
        return SCALARS.get(kind, "any") if isinstance(kind, str) else "any"

    def _object(self, schema: Mapping[str, Any], indent: str, depth: int) -> str:
        properties = schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        required = schema.get("required")
        required = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
        inner = indent + INDENT
        fields = []
        for mark, names in (("", sorted(required)), ("?", sorted(set(properties) - required))):
            for name in names:
                value = properties.get(name, {})
                found = self.type_of(value, inner, depth + 1)
                space = "" if found.startswith("\n") else " "
                fields.append(f"{_documentation(value, inner)}{inner}{_name(name)}{mark}:{space}{found}")
        if "additionalProperties" in schema:
            found = self.type_of(schema["additionalProperties"], inner, depth + 1)
            fields.append(f"{inner}[k: string]: {found}")
        return "{\n" + ",\n".join(fields) + f"\n{indent}}}" if fields else "{}"

    def _array(self, schema: Mapping[str, Any], indent: str, depth: int) -> str:
        items = schema.get("items", {})
        places = schema.get("prefixItems", items)
        if isinstance(places, list):
            return f"[{', '.join(self.type_of(place, indent, depth + 1) for place in places)}]"
        inner = indent + INDENT
        document, found = _documentation(items, inner), self.type_of(items, inner, depth + 1)
        return f"Array<\n{document}{inner}{found}\n{indent}>" if document else f"Array<{found}>"


def _documentation(schema: Any, indent: str) -> str:
    """Comment lines of a schema: its description, its limits, its default."""
    if not isinstance(schema, Mapping):
        return ""
    description = schema.get("description")
    lines = _comment(description, indent) if isinstance(description, str) else ""
    limits = [f"{key}: {_inline(schema[key])}" for key in LIMITS if key in schema]
    if limits:
        lines += _comment(", ".join(limits), indent)
    if "default" in schema:
        lines += _comment(f"Default: {_literal(schema['default'])}", indent)
    return lines


def _comment(text: str, indent: str) -> str:
    return "".join(f"{indent}// {line}\n" if line else "\n" for line in text.splitlines())


def _inline(value: Any) -> str:
    return value if isinstance(value, str) else _literal(value)


def _literal(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def _name(name: str) -> str:
    return name if name.isascii() and name.isidentifier() else _literal(name)


def _refers_to_itself(schema: Any) -> bool:
    return '"$ref": "#"' in json.dumps(schema, ensure_ascii=False)
