"""The journal as OpenTelemetry spans, by the conventions for generative AI.

    invoke_workflow RUN
      invoke_agent main
        chat MODEL
        execute_tool assign_task
          invoke_agent researcher
            chat MODEL ...

Feed events as they come (`journal.subscribe(Spans(...).receive)`) or from a file; both give the same spans, with the
journal's times. Texts of messages, arguments and results are left out: they may hold what a collector must not see.
The conventions are still in development, so all names stand here in one place.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from perilune.swarm.journal.event import Event

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider as SDKTracerProvider
    from opentelemetry.trace import Span, Tracer, TracerProvider

OPERATION = "gen_ai.operation.name"
WORKFLOW_NAME = "gen_ai.workflow.name"
AGENT_ID = "gen_ai.agent.id"
AGENT_NAME = "gen_ai.agent.name"
CONVERSATION = "gen_ai.conversation.id"
REQUEST_MODEL = "gen_ai.request.model"
RESPONSE_MODEL = "gen_ai.response.model"
FINISH_REASONS = "gen_ai.response.finish_reasons"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
TOOL_NAME = "gen_ai.tool.name"
TOOL_TYPE = "gen_ai.tool.type"
TOOL_CALL_ID = "gen_ai.tool.call.id"
ERROR_TYPE = "error.type"
# Not in the conventions.
AGENT_DEPTH = "perilune.agent.depth"
STEP = "perilune.step"
ATTEMPTS = "perilune.attempts"
CALL_STATUS = "perilune.tool.status"

ENDED_WELL = ("done", "ok", None)


def collector() -> SDKTracerProvider:
    """A provider that sends spans over OTLP/HTTP to where the OTEL_* variables say."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise ImportError("sending spans needs OpenTelemetry: pip install 'perilune[swarm-trace]'") from None
    provider = TracerProvider(resource=Resource.create({"service.name": "perilune"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


class Spans:
    """Turns events into spans. `run` names the run; `provider` is a TracerProvider (default: the global one)."""

    def __init__(self, run: str, provider: TracerProvider | None = None) -> None:
        try:
            from opentelemetry import trace
        except ImportError:
            raise ImportError("spans need OpenTelemetry: pip install 'perilune[swarm-trace]'") from None
        self._trace = trace
        self._tracer: Tracer = trace.get_tracer("perilune.swarm", tracer_provider=provider)
        self.run = run
        self._workflow: Span | None = None
        self._agents: dict[str, Span] = {}
        self._models: dict[str, str] = {}
        self._calls: dict[str, Span] = {}
        self._last = 0

    def receive(self, events: Iterable[Event]) -> None:
        """Take events in the order of the journal."""
        for event in events:
            self._last = round(event.time * 1e9)
            owner, is_call, _ = event.chain.rpartition("#")
            if event.chain == "run":
                self._of_run(event)
            elif is_call:
                self._of_call(event)
            else:
                self._of_agent(event)

    def close(self) -> None:
        """End what has not ended: the run broke off here."""
        for span in (*self._calls.values(), *self._agents.values(), self._workflow):
            if span is not None:
                self._end(span, "unfinished")
        self._calls, self._agents, self._workflow = {}, {}, None

    def _of_run(self, event: Event) -> None:
        body = event.read()
        if event.kind == "run_started":
            attributes = {OPERATION: "invoke_workflow", WORKFLOW_NAME: self.run, REQUEST_MODEL: body.get("model") or ""}
            self._workflow = self._start(f"invoke_workflow {self.run}", None, self._last, attributes)
        elif event.kind == "run_finished" and self._workflow is not None:
            self._end(self._workflow, body.get("status"))
            self._workflow = None

    def _of_agent(self, event: Event) -> None:
        body = event.read()
        if event.kind == "started":
            self._start_agent(event.chain, body)
        elif event.kind == "finished":
            span = self._agents.pop(event.chain, None)
            if span is not None:
                self._end(span, body.get("status"))
        elif event.kind == "reply" or (event.kind == "compacted" and body.get("how") == "summary"):
            self._chat(event, body)
            self._start_calls(event.chain, body)

    def _start_agent(self, agent: str, body: dict[str, Any]) -> None:
        parent = self._calls.get(f"{body.get('parent')}#{body.get('call')}") or self._agents.get(
            body.get("parent") or ""
        )
        name = body.get("name") or agent
        self._models[agent] = body.get("model") or ""
        attributes = {
            OPERATION: "invoke_agent",
            AGENT_ID: agent,
            AGENT_NAME: name,
            AGENT_DEPTH: body.get("depth") or 0,
            CONVERSATION: self.run,
            REQUEST_MODEL: self._models[agent],
        }
        self._agents[agent] = self._start(f"invoke_agent {name}", parent or self._workflow, self._last, attributes)

    def _chat(self, event: Event, body: dict[str, Any]) -> None:
        """A model call is known when it ends."""
        note, model = event.read_note(), self._models.get(event.chain, "")
        attributes = {
            OPERATION: "chat",
            AGENT_ID: event.chain,
            CONVERSATION: self.run,
            REQUEST_MODEL: model,
            RESPONSE_MODEL: note.get("model") or model,
            FINISH_REASONS: [body.get("finish") or "stop"],
            INPUT_TOKENS: note.get("prompt_tokens") or 0,
            OUTPUT_TOKENS: note.get("completion_tokens") or 0,
            ATTEMPTS: note.get("attempts") or 1,
            STEP: body.get("step") or 0,
        }
        began = self._last - round((note.get("seconds") or 0) * 1e9)
        span = self._start(f"chat {model}", self._agents.get(event.chain), began, attributes)
        span.end(self._last)

    def _start_calls(self, agent: str, body: dict[str, Any]) -> None:
        calls = (body.get("message") or {}).get("tool_calls") or ()
        for index, call in enumerate(calls):
            tool = (call.get("function") or {}).get("name") or ""
            attributes = {
                OPERATION: "execute_tool",
                TOOL_NAME: tool,
                TOOL_TYPE: "function",
                TOOL_CALL_ID: call.get("id") or "",
                AGENT_ID: agent,
                STEP: body.get("step") or 0,
            }
            span = self._start(f"execute_tool {tool}", self._agents.get(agent), self._last, attributes)
            self._calls[f"{agent}#{body.get('step')}.{index}"] = span

    def _of_call(self, event: Event) -> None:
        span = self._calls.pop(event.chain, None) if event.kind == "outcome" else None
        if span is not None:
            status = event.read().get("status")
            span.set_attribute(CALL_STATUS, status or "ok")
            self._end(span, status)

    def _start(self, name: str, parent: Span | None, began: int, attributes: dict[str, Any]) -> Span:
        # A span without a parent begins a trace of its own, whatever is current around the caller.
        context = self._trace.set_span_in_context(parent or self._trace.INVALID_SPAN)
        return self._tracer.start_span(name, context, start_time=began, attributes=attributes)

    def _end(self, span: Span, status: str | None) -> None:
        if status not in ENDED_WELL:
            span.set_attribute(ERROR_TYPE, str(status))
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, str(status)))
        span.end(self._last)


__all__ = ["Spans"]
