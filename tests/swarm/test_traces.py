"""Traces are the served tokens, joined: nothing is tokenized again, and the mask is 1 where the agent sampled."""

import asyncio
import math
import tempfile
from pathlib import Path

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.swarm.journal.sqlite_reader import SQLiteReader
from perilune.swarm.traces import TraceError, trace_agent, trace_lines, traces
from tests.swarm.journal.appending import open_journal
from tests.swarm.small_runs import Writer, written_run

TOKENS = st.lists(st.integers(0, 9), max_size=4)


def traced(path, agent="main"):
    with SQLiteReader(path) as reader:
        return trace_agent(reader, agent)


def served(prompt, tokens, logprobs=...):
    logprobs = [-0.5 * (n + 1) for n in range(len(tokens))] if logprobs is ... else logprobs
    return {"prompt_token_ids": prompt, "token_ids": tokens, "logprobs": logprobs}


def test_turns_that_continue_each_other_are_one_trace(tmp_path):
    async def write(writer: Writer) -> None:
        await writer.started("main", "write")
        await writer.reply("main", 0, "", ("search", "{}"), **served([1, 2], [3, 4]))
        await writer.reply("main", 1, "done", **served([1, 2, 3, 4, 5], [6]))
        await writer.finished("main")

    (trace,) = traced(written_run(tmp_path, write))
    assert trace.token_ids == [1, 2, 3, 4, 5, 6]
    assert trace.mask == [0, 0, 1, 1, 0, 1]
    assert trace.logprobs == [0.0, 0.0, -0.5, -1.0, 0.0, -0.5]
    assert [(turn.step, turn.start, turn.end, turn.finish, turn.weight_version) for turn in trace.turns] == [
        (0, 2, 4, "tool_calls", "w1"),
        (1, 5, 6, "stop", "w1"),
    ]
    assert (trace.agent, trace.branch, trace.model, trace.status, trace.missing) == ("main", 0, "small", "done", [])


def test_a_prompt_that_does_not_continue_begins_a_branch(tmp_path):
    async def write(writer: Writer) -> None:
        await writer.started("main", "write")
        await writer.reply("main", 0, **served([1, 2], [3]))
        await writer.reply("main", 1, **served([1, 2, 9], [4]))
        await writer.reply("main", 2, **served([1, 2, 9, 4, 5], [6]))

    first, second = traced(written_run(tmp_path, write))
    assert first.token_ids == [1, 2, 3] and (first.branch, second.branch) == (0, 1)
    assert second.token_ids == [1, 2, 9, 4, 5, 6] and second.mask == [0, 0, 0, 1, 0, 1] and second.status is None


def test_a_prompt_shorter_than_what_was_before_begins_a_branch(tmp_path):
    async def write(writer: Writer) -> None:
        await writer.reply("main", 0, **served([1, 2, 3], [4]))
        await writer.reply("main", 1, **served([1, 2], [5]))

    assert [trace.token_ids for trace in traced(written_run(tmp_path, write))] == [[1, 2, 3, 4], [1, 2, 5]]


def test_a_turn_whose_tokens_were_not_told_is_named_and_masked(tmp_path):
    async def write(writer: Writer) -> None:
        await writer.reply("main", 0, **served([1], [2]))
        await writer.reply("main", 1)
        await writer.reply("main", 2, **served([1, 2, 3, 4], [5], logprobs=None))
        await writer.reply("main", 3, prompt_token_ids=None, token_ids=[1], logprobs=None)

    (trace,) = traced(written_run(tmp_path, write))
    assert trace.mask == [0, 1, 0, 0, 1] and trace.missing == [1, 3]
    assert math.isnan(trace.logprobs[-1])


def test_tokens_and_log_probabilities_of_different_length_are_an_error(tmp_path):
    async def write(writer: Writer) -> None:
        await writer.reply("main", 4, **served([1], [2, 3], logprobs=[-0.5]))

    with pytest.raises(TraceError, match="agent 'main', step 4: 2 tokens but 1 log-probabilities"):
        traced(written_run(tmp_path, write))


def test_every_agent_has_its_own_traces_as_json_lines(tmp_path):
    async def write(writer: Writer) -> None:
        for number, agent in enumerate(("main", "main/r-0.0", "main/silent-0.1")):
            await writer.started(agent, "write", depth=bool(number))
            if number < 2:
                await writer.reply(agent, 0, **served([number], [7, 8]))

    path = written_run(tmp_path, write)
    with SQLiteReader(path) as reader:
        lines = [orjson.loads(line) for line in trace_lines(reader)]
        assert [(line["agent"], line["token_ids"], line["mask"]) for line in lines] == [
            ("main", [0, 7, 8], [0, 1, 1]),
            ("main/r-0.0", [1, 7, 8], [0, 1, 1]),
        ]
        assert [trace.agent for trace in traces(reader, ["main/r-0.0"])] == ["main/r-0.0"]


@settings(max_examples=15)
@given(turns=st.lists(st.tuples(st.booleans(), TOKENS, TOKENS), max_size=6))
def test_each_turn_is_served_prompt_plus_completion_and_every_sampled_token_is_masked_once(turns):
    """Whatever the endpoint serves: the tokens up to a turn's end are its prompt and its completion."""

    async def write(folder: Path) -> list[tuple[list[int], list[int]]]:
        told, before = [], []
        async with open_journal(folder) as journal:
            for step, (fresh, added, tokens) in enumerate(turns):
                prompt = added if fresh else before + added
                await Writer(journal).reply("main", step, **served(prompt, tokens))
                told.append((prompt, tokens))
                before = prompt + tokens
        return told

    with tempfile.TemporaryDirectory() as name:
        told = asyncio.run(write(Path(name)))
        found = traced(Path(name) / "journal.db")
    joined = [(trace, turn) for trace in found for turn in trace.turns]
    assert [turn.step for _, turn in joined] == list(range(len(turns)))
    for (trace, turn), (prompt, tokens) in zip(joined, told):
        assert trace.token_ids[: turn.end] == prompt + tokens and turn.end - turn.start == len(tokens)
        assert trace.mask[turn.start : turn.end] == [1] * len(tokens)
    assert sum(sum(trace.mask) for trace in found) == sum(len(tokens) for _, tokens in told)
