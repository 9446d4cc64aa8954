"""JSON schemas for tests: sound ones, odd ones, and values where a schema should be."""

from typing import Any

from hypothesis import strategies as st

_NAMES = st.sampled_from(["a", "b", "a b", "é", "$ref", "type", "class", "A"])
_WORDS = st.sampled_from(["", "word", "two\nlines", "a\n\nb\n", 'say "x"', "a | b", "<|im_end|>", "é\u2028x", "\r"])
_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-9, 9),
    st.just(1.5),
    _WORDS,
    st.just([1, "b"]),
    st.just({"k": 1, "j": [None]}),
)
_TYPES = st.sampled_from(["string", "number", "integer", "boolean", "null", "object", "array", "date"])
_REFERENCES = st.sampled_from(["#", "#/$defs/a", "#/definitions/a b", "#/$defs/a~1b", "#/properties/a", "http://x"])


def _deeper(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    fields = st.dictionaries(_NAMES, inner, max_size=3)
    several = st.lists(inner, max_size=3)
    return st.fixed_dictionaries(
        {},
        optional={
            "type": st.one_of(_TYPES, st.lists(_TYPES, max_size=3), _VALUES),
            "properties": st.one_of(fields, _VALUES),
            "required": st.one_of(st.lists(st.one_of(_NAMES, st.integers()), max_size=3), _VALUES),
            "additionalProperties": inner,
            "items": st.one_of(inner, several),
            "prefixItems": several,
            "anyOf": st.one_of(several, _VALUES),
            "oneOf": several,
            "allOf": several,
            "enum": st.one_of(st.lists(_VALUES, max_size=3), _VALUES),
            "const": _VALUES,
            "$ref": st.one_of(_REFERENCES, _VALUES),
            "nullable": st.booleans(),
            "description": _VALUES,
            "default": _VALUES,
            "minLength": _VALUES,
            "pattern": _VALUES,
            "uniqueItems": st.booleans(),
        },
    )


_PARTS = st.recursive(
    st.one_of(st.booleans(), st.just({}), _VALUES, _TYPES.map(lambda t: {"type": t})), _deeper, max_leaves=6
)


def _with_definitions(schema: Any, definitions: Any, older: Any) -> Any:
    return schema | {"$defs": definitions, "definitions": older} if isinstance(schema, dict) else schema


SCHEMAS: st.SearchStrategy[Any] = st.one_of(
    _deeper(_PARTS),
    st.booleans(),
    st.builds(
        _with_definitions,
        _deeper(_PARTS),
        st.one_of(st.dictionaries(st.sampled_from(["a", "a/b"]), _PARTS, max_size=2), _VALUES),
        st.one_of(st.dictionaries(st.sampled_from(["a", "a b"]), _PARTS, max_size=2), _VALUES),
    ),
)

# fmt: off
EXAMPLES: list[tuple[Any, str]] = [
    ({"type": "string"}, "string"),
    ({"type": "integer"}, "number"),
    ({"type": "number"}, "number"),
    ({"type": "boolean"}, "boolean"),
    ({"type": "null"}, "null"),
    ({"type": ["string", "null"]}, "string | null"),
    ({"type": ["integer", "number"]}, "number"),
    ({"type": ["object", "null"], "properties": {"a": {}}}, "{\n    a?: any\n  } | null"),
    ({"type": "string", "nullable": True}, "string | null"),
    ({"type": ["string", "null"], "nullable": True}, "string | null"),
    ({"enum": ["a", 'b"', 1, None, True]}, '"a" | "b\\"" | 1 | null | true'),
    ({"type": "string", "enum": ["a"]}, '"a"'),
    ({"enum": []}, "never"),
    ({"const": "a"}, '"a"'),
    ({"const": None}, "null"),
    ({"const": {"b": 1, "a": 2}}, '{"a": 2, "b": 1}'),
    ({"anyOf": [{"type": "string"}, {"type": "number"}]}, "string | number"),
    ({"oneOf": [{"const": "a"}, {"const": "b"}]}, '"a" | "b"'),
    ({"oneOf": [{"const": 1}, {"const": 2, "format": "x"}]}, "\n    | 1\n    // format: x\n    | 2"),
    ({"anyOf": [{"type": "string"}, {}]}, "any"),
    ({"allOf": [{"type": "object", "properties": {"a": {}}}, {"$ref": "#/nowhere"}]}, "{\n    a?: any\n  }"),
    ({"type": "string", "anyOf": [{"type": "string"}, {"type": "null"}]}, "string & (string | null)"),
    ({"type": "object"}, "{}"),
    ({"properties": {"b": {}, "a": {"type": "string"}}, "required": ["b"]}, "{\n    b: any,\n    a?: string\n  }"),
    ({"type": "object", "required": ["gone"]}, "{\n    gone: any\n  }"),
    ({"type": "object", "additionalProperties": False}, "{\n    [k: string]: never\n  }"),
    ({"type": "object", "additionalProperties": {"type": "number"}}, "{\n    [k: string]: number\n  }"),
    ({"type": "object", "properties": {"a b": {}, "é": {}}}, '{\n    "a b"?: any,\n    "é"?: any\n  }'),
    ({"properties": {"b": {}, "a": {}, "B": {}}}, "{\n    B?: any,\n    a?: any,\n    b?: any\n  }"),
    ({"type": "array"}, "Array<any>"),
    ({"type": "array", "items": {"type": "string"}}, "Array<string>"),
    ({"items": {"type": "array", "items": {"type": "number"}}}, "Array<Array<number>>"),
    ({"type": "array", "items": {"type": "string", "description": "d"}}, "Array<\n    // d\n    string\n  >"),
    ({"type": "array", "prefixItems": [{"type": "string"}, {"type": "number"}]}, "[string, number]"),
    ({"type": "array", "items": [{"type": "string"}]}, "[string]"),
    (True, "any"),
    (False, "never"),
    ({}, "any"),
    ({"not": {"type": "string"}}, "any"),
    ({"type": "date"}, "any"),
    ({"type": 3}, "any"),
    ({"type": []}, "any"),
    ({"type": [3]}, "any"),
    ({"$ref": "https://example.org/schema"}, "any"),
    ({"$ref": 3}, "any"),
    ({"enum": "abc"}, "any"),
    ({"anyOf": {}}, "any"),
    ({"type": "object", "properties": [], "required": "a"}, "{}"),
    (None, "any"),
    (7, "any"),
]
# fmt: on
"""Each construct and the type it has as the field of an object."""
