"""What a constrained chat turn must look like, as one grammar: reasoning, then an answer in its format or tool calls.

    start      reasoning? (answer | calls)
    reasoning  any text </think>                                       when the prompt has opened the reasoning
    answer     JSON of a schema, or text that a regular expression matches
    calls      <|tool_calls_section_begin|> call+ <|tool_calls_section_end|>
    call       <|tool_call_begin|> functions.NAME:INDEX <|tool_call_argument_begin|> ARGUMENTS <|tool_call_end|>

ARGUMENTS is JSON of the function's own schema. Thought is never constrained. Marks are special tokens, by id: no text
can forge one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perilune.data.chat_messages import Tool
from perilune.data.tokenizer import Tokenizer
from perilune.serve.bodies import Constraint
from perilune.serve.grammar import Grammar, json_literal, regex_literal


def chat_grammar(
    tokenizer: Tokenizer,
    *,
    constraint: Constraint | None,
    tools: Sequence[Tool],
    is_required: bool,
    is_parallel: bool,
    is_thinking: bool,
) -> Grammar:
    """`tools` are those that may be called; without `constraint` one of them must be (`is_required`)."""
    bodies = [] if constraint is None else ["answer"]
    if tools and (is_required or constraint is not None):
        bodies.append("calls")

    def mark(name: str) -> str:
        return f"<[{tokenizer.special_ids[name]}]>"

    rules = [f"start: {'reasoning ' if is_thinking else ''}({' | '.join(bodies)})"]
    if is_thinking:
        rules.append(rf"reasoning: /(.|\n)*/ {mark('</think>')}")
    if constraint is not None:
        rules.append(f"answer: {_answer(constraint)}")
    if "calls" in bodies:
        more = "+" if is_parallel else ""
        rules.append(f"calls: {mark('<|tool_calls_section_begin|>')} call{more} {mark('<|tool_calls_section_end|>')}")
        rules.append(f"call: {mark('<|tool_call_begin|>')} ({' | '.join(_names(tools))}) {mark('<|tool_call_end|>')}")
        begin = mark("<|tool_call_argument_begin|>")
        rules += [
            rf'call_{number}: "functions.{tool.name}:" /[0-9]{{1,4}}/ {begin} {_arguments(tool)}'
            for number, tool in enumerate(tools)
        ]
    return Grammar.lark("\n".join(rules) + "\n")


def _names(tools: Sequence[Tool]) -> list[str]:
    return [f"call_{number}" for number in range(len(tools))]


def _answer(constraint: Constraint) -> str:
    return regex_literal(constraint.value) if constraint.kind == "regex" else json_literal(constraint.value)


def _arguments(tool: Tool) -> str:
    schema: dict[str, Any] = {"type": "object"}
    if isinstance(tool.parameters, dict):
        schema |= tool.parameters
    return json_literal(schema)


__all__ = ["chat_grammar"]
