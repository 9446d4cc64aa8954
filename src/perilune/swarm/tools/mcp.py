"""MCP servers as tools, shared by all agents of a run.

    async with mcp_servers([ServerSpec(name="git", command=("mcp-server-git",))], pins=Pins.load(path)) as servers:
        tools = servers.tools()             # {"git__git_log": Tool, ...}

One task owns each session from its start to its end, because the scopes inside must be left by the task that entered
them; agents call through it from tasks of their own. A server that dies is started again, later each time; the call
that was in flight ends with `OutcomeUnknown`, and is not repeated. A server is a stranger: it gets only the variables
that were listed, its descriptions are pinned (`mcp_pins`), its results are untrusted and bounded, its hints about its
own tools are not believed. A tool's effects are what the person declared in `effects`; undeclared means ask.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import httpx2
import mcp_types
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client
from pydantic import TypeAdapter, ValidationError

from perilune.swarm.tools.mcp_pins import Comparison, Described, Pins
from perilune.swarm.tools.mcp_stdio import Ended, stdio_transport
from perilune.swarm.tools.mcp_tools import (
    checked_arguments,
    described_tool,
    full_name,
    shown_answer,
    unusable,
    visible,
)
from perilune.swarm.tools.shown import clipped, one_line
from perilune.swarm.tools.tool import Effects, OutcomeUnknown, Tool, ToolContext, ToolError, ToolResult

_NAME = re.compile(r"^[a-z0-9](?:[a-z0-9-]{0,22}[a-z0-9])?$")
_ANSWER: TypeAdapter[Any] = TypeAdapter(mcp_types.CallToolResult | mcp_types.InputRequiredResult)
TOOLS_LIMIT = 500
PAGES_LIMIT = 100
LATE_LIMIT = 3
"""Calls without an answer in time, none answered between them, after which a server is started again."""
State = Literal["starting", "ready", "restarting", "closed"]


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    name: str
    """Lower case letters, digits and '-': the first part of its tools' names."""
    command: tuple[str, ...] | None = None
    """Started as a child process; or
    """
    url: str | None = None
    """reached over HTTP (streamable)."""
    environment: tuple[str, ...] = ("PATH", "LANG")
    """Names of the variables that a child process gets from ours. No others."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables with values of their own. Not for secrets: list those by name in `environment`."""
    folder: Path | None = None
    header_from_environment: Mapping[str, str] = field(default_factory=dict)
    """HTTP header -> name of the variable that holds its value."""
    tools: tuple[str, ...] = ("*",)
    """Patterns of the tools to offer."""
    agents: tuple[str, ...] = ("*",)
    """Patterns of the agents that may call it."""
    effects: Mapping[str, Effects] = field(default_factory=dict)
    """Pattern of tools -> what they may do; a tool without one asks every time."""
    start_seconds: float = 30.0
    call_seconds: float = 60.0
    wait_seconds: float = 15.0
    """How long a call waits for a server that is being started again."""
    relist_seconds: float = 300.0
    backoff_seconds: float = 0.25
    """Before the first new start; doubled each time, up to 30."""

    def __post_init__(self) -> None:
        if not _NAME.match(self.name):
            raise ValueError(f"name of an MCP server is {self.name!r}, expected lower case letters, digits and '-'")
        if (self.command is None) == (self.url is None):
            raise ValueError(f"MCP server {self.name!r} needs either command or url")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url of MCP server {self.name!r} is {self.url!r}, expected http:// or https://")


@dataclass(kw_only=True)
class McpServer:
    """One server: its session, its tools as they are pinned, and the task that owns both."""

    spec: ServerSpec
    pins: Pins
    state: State = "starting"
    reason: str = ""
    """Why it is not ready, for people; it may quote the server."""
    offered: dict[str, Described] = field(default_factory=dict)
    withdrawn: dict[str, str] = field(default_factory=dict)
    """Tool -> why it is not offered, with the difference to what was approved."""
    starts: int = 0
    _client: Client | None = None
    _ready: asyncio.Event = field(default_factory=asyncio.Event)
    _relist: asyncio.Event = field(default_factory=asyncio.Event)
    _ended: Ended = field(default_factory=Ended)
    _owner: asyncio.Task[None] | None = None
    _failures: int = 0
    _late: int = 0

    async def start(self) -> None:
        """Start the owner, and wait until the tools are known or the first start has failed."""
        first = asyncio.Event()
        self._owner = asyncio.create_task(self._own(first), name=f"mcp {self.spec.name}")
        await first.wait()

    async def close(self) -> None:
        self.state = "closed"
        if self._owner is not None:
            self._owner.cancel()
            with suppress(asyncio.CancelledError):
                await self._owner

    def tools(self) -> dict[str, Tool]:
        return {full_name(self.spec.name, name): self._tool(name, each) for name, each in self.offered.items()}

    async def call(self, name: str, arguments: dict[str, Any], *, agent: str) -> ToolResult:
        if not any(fnmatchcase(agent, pattern) for pattern in self.spec.agents):
            raise ToolError(f"agent {agent!r} may not use the MCP server {self.spec.name!r}")
        client = await self._connected()
        if name not in self.offered:  # withdrawn since the agent was given it
            why = self.withdrawn.get(name, "the server no longer has it").split("\n")[0]
            raise ToolError(f"{full_name(self.spec.name, name)} was withdrawn until a person approves it: {why}")
        request = mcp_types.CallToolRequest(params=mcp_types.CallToolRequestParams(name=name, arguments=arguments))
        try:
            # Not call_tool: that checks the answer against a schema whose patterns the server wrote, and a pattern
            # can be made to never end.
            answer = await client.session.send_request(
                request, _ANSWER, request_read_timeout_seconds=self.spec.call_seconds
            )
        except MCPError as error:
            # The codes alone say nothing: servers use them for errors of their own.
            late = error.code == mcp_types.REQUEST_TIMEOUT and error.message.endswith("timed out")
            closed = error.code == mcp_types.CONNECTION_CLOSED and error.message == "Connection closed"
            if late or closed or self._ended.event.is_set():
                raise self._unknown(late=late) from None
            text = f"Error: {self.spec.name} refused the call: {clipped(error.message, 4_000)}"
            return ToolResult(text=text, is_error=True, untrusted=True)
        except ValidationError:
            raise OutcomeUnknown(f"{self.spec.name} answered in a way that MCP does not know; {_CHECK}") from None
        except (httpx2.HTTPError, OSError) as error:
            self._ended.because(f"the connection broke ({type(error).__name__})")
            raise self._unknown() from None
        self._failures = self._late = 0
        return shown_answer(answer, self.spec.name)

    def _unknown(self, *, late: bool = False) -> OutcomeUnknown:
        if late:
            self._late += 1
            if self._late >= LATE_LIMIT:
                self._ended.because(f"it did not answer {LATE_LIMIT} calls")
            return OutcomeUnknown(
                f"{self.spec.name} did not answer within {self.spec.call_seconds:g} seconds; {_CHECK}"
            )
        self._ended.because("the connection broke")
        return OutcomeUnknown(f"{self.spec.name} went away while it worked on the call; {_CHECK}")

    async def _connected(self) -> Client:
        if self._ended.event.is_set():  # its owner has not noticed yet
            self._ready.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(self.spec.wait_seconds):
                await self._ready.wait()
        if self._client is None or self.state != "ready":
            raise ToolError(f"MCP server {self.spec.name!r} is not running; it is being started again, try later")
        return self._client

    async def _own(self, first: asyncio.Event) -> None:
        try:
            while True:
                self._ended = Ended()
                self._relist.clear()
                try:
                    async with AsyncExitStack() as stack:
                        async with asyncio.timeout(self.spec.start_seconds):
                            self.starts += 1
                            client = await stack.enter_async_context(await self._opened(stack))
                            await self._list(client)
                        self._client, self.state, self.reason = client, "ready", ""
                        self._ready.set()
                        first.set()
                        await self._watched(client)
                except TimeoutError:
                    self._ended.because(f"it did not answer within {self.spec.start_seconds:g} seconds")
                except Exception as error:  # whatever a server does to its session, the owner stays
                    self._ended.because(f"{type(error).__name__}: {_innermost(error)}")
                self._client, self._late = None, 0
                self._ready.clear()
                self.state = "restarting"
                self.reason = _for_people(self._ended)
                first.set()
                await asyncio.sleep(min(30.0, self.spec.backoff_seconds * 2.0 ** min(self._failures, 10)))
                self._failures += 1
        finally:
            self._client, self.state = None, "closed"
            first.set()

    async def _opened(self, stack: AsyncExitStack) -> Client:
        spec = self.spec
        if spec.command is not None:
            environment = {name: os.environ[name] for name in spec.environment if name in os.environ} | dict(
                spec.variables
            )
            transport = stdio_transport(spec.command, environment=environment, folder=spec.folder, ended=self._ended)
        else:
            assert spec.url is not None
            headers = {header: os.environ.get(name, "") for header, name in spec.header_from_environment.items()}
            timeout = httpx2.Timeout(spec.start_seconds, read=spec.call_seconds)
            http = await stack.enter_async_context(
                httpx2.AsyncClient(headers=headers, timeout=timeout, trust_env=False)
            )
            transport = streamable_http_client(spec.url, http_client=http)
        return Client(
            transport,
            cache=None,
            read_timeout_seconds=spec.start_seconds,
            client_info=mcp_types.Implementation(name="perilune", version="1"),
            message_handler=self._told,
        )

    async def _told(self, message: Any) -> None:
        if isinstance(message, mcp_types.ToolListChangedNotification):
            self._relist.set()

    async def _watched(self, client: Client) -> None:
        """Until the connection ends: list the tools again when the server says so, and now and then."""
        while True:
            waiting = [asyncio.ensure_future(event.wait()) for event in (self._ended.event, self._relist)]
            try:
                await asyncio.wait(waiting, timeout=self.spec.relist_seconds, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in waiting:
                    each.cancel()
            if self._ended.event.is_set():
                return
            self._relist.clear()
            async with asyncio.timeout(self.spec.start_seconds):
                await self._list(client)

    async def _list(self, client: Client) -> None:
        listed: dict[str, Described] = {}
        withdrawn: dict[str, str] = {}
        cursor, pages = None, 0
        while True:
            page = await client.session.list_tools(params=mcp_types.PaginatedRequestParams(cursor=cursor))
            for each in page.tools:
                if not any(fnmatchcase(each.name, pattern) for pattern in self.spec.tools):
                    continue
                described = described_tool(each)
                if reason := unusable(self.spec.name, each.name, described, listed):
                    withdrawn[one_line(each.name, 100)] = reason
                else:
                    listed[each.name] = described
            cursor = page.next_cursor
            pages += 1
            if cursor is None or len(listed) > TOOLS_LIMIT:
                break
            if len(withdrawn) > TOOLS_LIMIT or pages > PAGES_LIMIT:
                raise ValueError(f"its list of tools has no end ({pages} pages)")
        compared: Comparison = self.pins.compare(self.spec.name, dict(list(listed.items())[:TOOLS_LIMIT]))
        self.offered = {name: each for name, each in listed.items() if name in compared.unchanged}
        self.withdrawn = withdrawn | dict(compared.withdrawn)

    def _tool(self, name: str, described: Described) -> Tool:
        parameters = {"type": "object", "properties": {}, **visible(described["parameters"])}

        async def call(context: ToolContext, arguments: dict[str, Any]) -> ToolResult:
            return await self.call(name, arguments, agent=context.agent)

        return Tool(
            name=full_name(self.spec.name, name),
            description=visible(described["description"]) or f"{name} of the MCP server {self.spec.name}.",
            parameters=parameters,
            call=call,
            effects=next((each for pattern, each in self.spec.effects.items() if fnmatchcase(name, pattern)), None),
            untrusted=True,
            validate=lambda raw: checked_arguments(parameters, raw),
        )


_CHECK = "whether the call took effect is unknown. Check before you repeat it."


@dataclass(frozen=True, kw_only=True)
class McpServers:
    servers: Mapping[str, McpServer]

    def tools(self) -> dict[str, Tool]:
        return {name: tool for server in self.servers.values() for name, tool in server.tools().items()}

    def withdrawn(self) -> dict[str, str]:
        return {
            full_name(server.spec.name, name): why
            for server in self.servers.values()
            for name, why in server.withdrawn.items()
        }

    def missing(self) -> dict[str, str]:
        """Server -> why it does not run."""
        return {name: server.reason for name, server in self.servers.items() if server.state != "ready"}


@asynccontextmanager
async def mcp_servers(specs: Sequence[ServerSpec], *, pins: Pins | None = None) -> AsyncIterator[McpServers]:
    """Start the servers side by side, and stop them at the end. One that does not start is tried again."""
    names = [spec.name for spec in specs]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"two MCP servers are named {min(twice)!r}; names must differ")
    pins = pins or Pins()
    servers = {spec.name: McpServer(spec=spec, pins=pins) for spec in specs}
    try:
        await asyncio.gather(*(server.start() for server in servers.values()))
        yield McpServers(servers=servers)
    finally:
        await asyncio.gather(*(server.close() for server in servers.values()))


def _innermost(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return one_line(str(error) or type(error).__name__)


def _for_people(ended: Ended) -> str:
    last = ended.stderr.decode("utf-8", "replace").strip().splitlines()
    return f"{ended.reason}{f' ({one_line(last[-1])})' if last else ''}"
