"""Answers that follow a JSON schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jsonschema
import orjson


def check_schema(schema: Mapping[str, Any]) -> str | None:
    """Why this is not a usable schema; None when it is."""
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.SchemaError as error:
        return f"output_schema is not a JSON schema: {error.message}"
    return None


def problem_with(text: str, schema: Mapping[str, Any]) -> str | None:
    """What keeps the text from being JSON of the schema; None when nothing does. A code fence around it is fine."""
    try:
        value = orjson.loads(bare_json(text))
    except orjson.JSONDecodeError as error:
        return f"it is not JSON ({error})"
    validator = jsonschema.Draft202012Validator(schema)
    problem = next(iter(sorted(validator.iter_errors(value), key=lambda each: list(map(str, each.path)))), None)
    if problem is None:
        return None
    where = "/".join(map(str, problem.path))
    return f"{problem.message[:300]}{f' at {where}' if where else ''}"


def bare_json(text: str) -> str:
    """JSON without the code fence that models like to put around it."""
    text = text.strip()
    if text.startswith("```") and text.endswith("```"):
        text = text[3:-3]
        text = text.removeprefix("json").strip()
    return text
