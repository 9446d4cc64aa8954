"""The journal as OpenTelemetry spans: who called whom, when, with the names of the conventions."""

import sys

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

from perilune.swarm import spans as naming
from perilune.swarm.journal.sqlite_reader import SQLiteReader
from perilune.swarm.spans import Spans
from tests.swarm.small_runs import Writer, write_good_run, written_run


def spans_of(path, *, one_by_one=False):
    memory = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    with SQLiteReader(path) as reader:
        spans, events = Spans("run-7", provider), list(reader.events())
        for batch in [[event] for event in events] if one_by_one else [events]:
            spans.receive(batch)
        spans.close()
    return memory.get_finished_spans(), events


def tree(spans) -> list[tuple[str, str | None]]:
    names = {span.context.span_id: span.name for span in spans}
    ordered = sorted(spans, key=lambda span: (span.start_time, span.name))
    return [(span.name, names[span.parent.span_id] if span.parent else None) for span in ordered]


def test_spans_follow_the_run_from_the_workflow_to_the_calls(tmp_path):
    path = written_run(tmp_path, write_good_run)
    spans, events = spans_of(path)
    assert tree(spans) == [
        ("invoke_workflow run-7", None),
        ("invoke_agent main", "invoke_workflow run-7"),
        ("chat small", "invoke_agent main"),
        ("execute_tool assign_task", "invoke_agent main"),
        ("invoke_agent r-0.0", "execute_tool assign_task"),
        ("chat small", "invoke_agent r-0.0"),
        ("execute_tool search", "invoke_agent r-0.0"),
        ("chat small", "invoke_agent r-0.0"),
        ("chat small", "invoke_agent main"),
    ]
    assert len({span.context.trace_id for span in spans}) == 1
    assert all(span.status.is_ok for span in spans)
    chat = next(span for span in spans if span.name == "chat small" and span.attributes["gen_ai.agent.id"] == "main")
    assert chat.attributes["gen_ai.usage.input_tokens"] == 7 and chat.attributes["gen_ai.response.model"] == "small-1"
    assert chat.attributes["gen_ai.response.finish_reasons"] == ("tool_calls",)
    assert (chat.start_time, chat.end_time) == (round((events[2].time - 0.5) * 1e9), round(events[2].time * 1e9))
    tool = next(span for span in spans if span.name == "execute_tool search")
    assert tool.attributes["gen_ai.tool.call.id"] == "search:0" and tool.attributes["perilune.tool.status"] == "ok"


def test_a_live_feed_gives_the_same_spans_as_the_file(tmp_path):
    path = written_run(tmp_path, write_good_run)
    (whole, _), (parts, _) = spans_of(path), spans_of(path, one_by_one=True)
    assert tree(whole) == tree(parts)
    assert [(span.start_time, span.end_time) for span in whole] == [(span.start_time, span.end_time) for span in parts]


def test_no_text_of_the_run_reaches_a_span(tmp_path):
    async def write(writer: Writer) -> None:
        await writer.started("main", "the secret task")
        await writer.reply("main", 0, "the secret thought", ("search", '{"query":"secret"}'))
        await writer.outcome("main#0.0", "search", text="secret result")
        await writer.finished("main", "failed")

    spans, _ = spans_of(written_run(tmp_path, write))
    assert len(spans) == 3 and "secret" not in "".join(span.to_json() for span in spans)


def test_failures_and_what_broke_off_are_errors(tmp_path):
    async def write(writer: Writer) -> None:
        await writer.run_started()
        await writer.started("main", "write")
        await writer.reply("main", 0, "", ("shell", "{}"), ("shell", "{}"))
        await writer.outcome("main#0.0", "shell", "denied")
        await writer.journal.append("main", "compacted", {"step": 0, "how": "summary"}, {"seconds": 1.0})
        await writer.journal.append("main", "compacted", {"step": 0, "how": "hidden"})
        await writer.started("main/r-9.9", "find", depth=1, call="9.9")
        await writer.finished("main/r-9.9", "budget")
        await writer.finished("main/nobody-0.0", "done")
        await writer.journal.append("other", "message", {"id": "1"})

    spans, _ = spans_of(written_run(tmp_path, write))
    errors = sorted(
        (span.name, span.attributes["error.type"])
        for span in spans
        if not span.status.is_unset and not span.status.is_ok
    )
    assert errors == [
        ("execute_tool shell", "denied"),
        ("execute_tool shell", "unfinished"),
        ("invoke_agent main", "unfinished"),
        ("invoke_agent r-9.9", "budget"),
        ("invoke_workflow run-7", "unfinished"),
    ]
    assert ("invoke_agent r-9.9", "invoke_agent main") in tree(spans), "its call is unknown, its parent is not"
    assert sum(span.name == "chat small" for span in spans) == 2


def test_names_are_those_of_the_conventions():
    known = {value for value in vars(gen_ai_attributes).values() if isinstance(value, str)}
    used = {value for value in vars(naming).values() if isinstance(value, str) and value.startswith("gen_ai.")}
    assert used <= known and len(used) >= 12
    operations = {each.value for each in gen_ai_attributes.GenAiOperationNameValues}
    assert {"invoke_workflow", "invoke_agent", "chat", "execute_tool"} <= operations


def test_without_opentelemetry_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ImportError, match="perilune\\[swarm-trace\\]"):
        Spans("run")
